"""transformers is the oracle: the same files, the same messages, the same ids."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from kvoy_contract.openai import parse_chat
from kvoy_contract.prompt import PromptEncoder, TokenizerFiles
from kvoy_contract.testing_tokenizer import (
    BOS_TEMPLATE,
    CHATML_TEMPLATE,
    byte_level_tokenizer,
    sentencepiece_tokenizer,
    tokenizer_files,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

LLAMA_TEMPLATE = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
# Blocks on lines of their own, loop controls, namespaces, JSON and the training tag.
MODERN_TEMPLATE = """\
{{- bos_token }}
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {%- if message.role == 'skip' %}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
<|im_start|>{{ message.role }}
{% generation %}{{ message.content | trim }}{% endgeneration %}<|im_end|>
{{ message | tojson }}
{% endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' -}}
{% endif %}
"""


def post_processed(special: tuple[str, ...]) -> Any:
    tokenizer = byte_level_tokenizer(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


CHATML = ("<s>", "<|im_start|>", "<|im_end|>")
# As Phi-3 has it: the end of a turn takes the white space after it.
GREEDY_END = (
    "<s>",
    AddedToken("<|im_start|>", special=True),
    AddedToken("<|im_end|>", special=True, rstrip=True, normalized=False),
)
SENTENCEPIECE = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
FILES: dict[str, TokenizerFiles] = {
    "chatml": tokenizer_files(byte_level_tokenizer(CHATML), CHATML_TEMPLATE, {"bos_token": "<s>"}),
    "bos": tokenizer_files(post_processed(CHATML), BOS_TEMPLATE, {"bos_token": "<s>"}),
    "no-bos": tokenizer_files(
        post_processed(CHATML), CHATML_TEMPLATE, {"bos_token": "<s>", "add_bos_token": False}
    ),
    "modern": tokenizer_files(post_processed(CHATML), MODERN_TEMPLATE, {"bos_token": "<s>"}),
    "greedy-end": tokenizer_files(
        byte_level_tokenizer(GREEDY_END), CHATML_TEMPLATE, {"bos_token": "<s>"}
    ),
    "sentencepiece": tokenizer_files(sentencepiece_tokenizer(), LLAMA_TEMPLATE, SENTENCEPIECE),
    "sentencepiece-first": tokenizer_files(
        sentencepiece_tokenizer(first_only=True), LLAMA_TEMPLATE, SENTENCEPIECE
    ),
}
CONTENT = st.text("ab .,\n\t<>|[]{}'\"0123éďあ访🦙\u200d\u00a0", max_size=40) | st.lists(
    st.sampled_from(["The quick", " brown", "fox", "\r\n", "\n\n", "  ", "访问", "🦙", "<p>"])
).map("".join)


def oracle_of(files: TokenizerFiles) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.parts.items():
            (Path(folder) / name).write_bytes(data)
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module", params=FILES)
def pair(request: pytest.FixtureRequest) -> tuple[PromptEncoder, Any]:
    files = FILES[request.param]
    return PromptEncoder(files), oracle_of(files)


@settings(max_examples=60)
@given(st.lists(CONTENT, min_size=1, max_size=5), st.booleans())
def test_a_chat_has_the_ids_of_the_oracle(
    pair: tuple[PromptEncoder, Any], contents: list[str], add_generation_prompt: bool
) -> None:
    encoder, oracle = pair
    roles = ["system", *["user", "assistant"] * 3]
    messages = [{"role": r, "content": c} for r, c in zip(roles[1:], contents, strict=False)]
    body = {"model": "m", "messages": messages, "add_generation_prompt": add_generation_prompt}

    ids = encoder.encode_chat(parse_chat(json.dumps(body).encode()))

    assert ids == oracle.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )


@settings(max_examples=60)
@given(CONTENT.filter(bool))
def test_a_plain_text_has_the_ids_of_the_oracle(pair: tuple[PromptEncoder, Any], text: str) -> None:
    encoder, oracle = pair

    assert encoder.encode_text(text) == oracle(text)["input_ids"]


@settings(max_examples=30)
@given(CONTENT)
def test_an_open_last_message_has_the_ids_of_the_oracle(
    pair: tuple[PromptEncoder, Any], content: str
) -> None:
    encoder, oracle = pair
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{content}"}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    body = {"model": "m", "messages": messages, **options}
    if encoder.files is FILES["modern"]:
        return  # It writes the message twice, and the oracle cuts at the later one.

    ids = encoder.encode_chat(parse_chat(json.dumps(body).encode()))

    assert ids == oracle.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


@settings(max_examples=60)
@given(st.data())
def test_ids_have_the_text_of_the_oracle(
    pair: tuple[PromptEncoder, Any], data: st.DataObject
) -> None:
    encoder, oracle = pair
    ids = data.draw(st.lists(st.integers(0, encoder.vocab_size - 1), max_size=20))

    for skip in (False, True):
        expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert encoder.decode(ids, skip_special_tokens=skip) == expected
