"""From a request to the token ids of its prompt: the one implementation, for engines and routers.

A chat is rendered by the model's own template and split at the control tokens that the template
wrote; the pieces between them are encoded one by one through a cache. The result equals
transformers' `apply_chat_template` for ordinary content, and content that spells a control token
stays text. A plain completion's text is read as transformers reads it: control tokens in it count,
and the beginning-of-text token is there exactly once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvoy_contract import known_prefixes
from kvoy_contract.byte_tokenizer import ByteCodec, byte_tokenizer_files
from kvoy_contract.chat_prompt import ChatRenderer, RenderedChat
from kvoy_contract.chat_template import ChatTemplate
from kvoy_contract.codec import Codec, HuggingFaceCodec
from kvoy_contract.control_tokens import ControlTokens, Segment
from kvoy_contract.errors import BadRequest, ContextLengthExceeded
from kvoy_contract.known_prefixes import KnownPrefix, KnownPrefixes
from kvoy_contract.openai_requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from kvoy_contract.segment_cache import DEFAULT_MAX_BYTES, SegmentCache
from kvoy_contract.tokenizer_files import GENERATION_CONFIG, TokenizerFiles

__all__ = ["PromptEncoder", "TokenizerFiles", "byte_tokenizer_files"]

_MAX_DROPPED = 4
"""Messages may be so many times as long as what a template makes of them."""
_PROBE_TEXTS = ("Hello  world\n", " a", "\n\n  é中🦙", "x")


_TOKENS_BEHIND = 4
"""A chat's beginning is remembered up to the so manieth control token from its end: what a template
writes around the last message and before the answer is behind it, so the same history with another
last message begins alike."""


@dataclass(frozen=True, slots=True)
class EncodedChat:
    ids: array[int]
    known: KnownPrefix | None
    """Its beginning, encoded earlier or just now; None where none is kept."""


@dataclass(frozen=True, slots=True)
class BegunChat:
    """A chat's prompt as text, which is most of the work on a known conversation's next turn."""

    rendered: RenderedChat
    max_tokens: int | None
    is_by_segments: bool
    known: KnownPrefix | None
    """The longest beginning that is encoded already."""

    @property
    def num_new_chars(self) -> int:
        """Still to be encoded."""
        return len(self.rendered.text) - (len(self.known.text) if self.known else 0)


class PromptEncoder:
    """The tokenizer of one model with its chat template. Safe to use from several threads."""

    def __init__(
        self,
        files: TokenizerFiles,
        *,
        vocab_size: int | None = None,
        cache_bytes: int = DEFAULT_MAX_BYTES,
        known_bytes: int = known_prefixes.DEFAULT_MAX_BYTES,
    ) -> None:
        """`vocab_size` is the model's own, where it differs from the tokenizer's; `cache_bytes` and
        `known_bytes`: for pieces and for beginnings of prompts.

        Raises ValueError when the files make no tokenizer.
        """
        self.files = files
        self.codec = _make_codec(files)
        self.vocab_size = vocab_size if vocab_size is not None else self.codec.vocab_size
        """Ids from a client are below it."""
        source = files.chat_template()
        self._controls = ControlTokens(self.codec.added_tokens.values(), source or "")
        self._renderer = (
            ChatRenderer(ChatTemplate(source, files.special_tokens()), self._controls)
            if source
            else None
        )
        self.special_ids = frozenset(t.id for t in self.codec.added_tokens.values() if t.is_special)
        """Left out of shown text."""
        self._cache = SegmentCache(cache_bytes)
        self._known = KnownPrefixes(known_bytes)
        self.eos_token_ids = _eos_token_ids(files, self.codec)
        """Sampling one of these ends an answer."""
        self.bos_token_id = _token_id(self.codec, files.special_tokens().get("bos_token"))
        self.is_segment_safe = self._probe_segments()
        """Whether encoding piece by piece gives the ids of the whole; else it is encoded whole."""

    @property
    def has_chat_template(self) -> bool:
        return self._renderer is not None

    @property
    def cache(self) -> SegmentCache:
        return self._cache

    @property
    def known_prefixes(self) -> KnownPrefixes:
        return self._known

    def encode_chat(
        self, request: ChatCompletionRequest, max_tokens: int | None = None
    ) -> list[int]:
        """The prompt of a chat. Raises BadRequest, naming the field.

        A text that cannot fit into `max_tokens` is refused before the work of encoding it.
        """
        return self.encode_chat_array(request, max_tokens).ids.tolist()

    def encode_chat_array(
        self, request: ChatCompletionRequest, max_tokens: int | None = None
    ) -> EncodedChat:
        """The same as an array, which costs a known conversation's next turn no more than its
        tail. Nobody changes it."""
        return self.finish_chat(self.begin_chat(request, max_tokens))

    def begin_chat(
        self, request: ChatCompletionRequest, max_tokens: int | None = None
    ) -> BegunChat:
        """The first half of `encode_chat_array`, in case that the second is done elsewhere."""
        self.check_token_ids(request)
        self.check_length(request, max_tokens)
        rendered = self._render(request)
        self._check_length(len(rendered.text), max_tokens, "messages")
        is_by_segments = self.is_segment_safe and self._controls.are_separate
        known = self._known.find(rendered.text, rendered.sentinel) if is_by_segments else None
        return BegunChat(rendered, max_tokens, is_by_segments, known)

    def finish_chat(self, begun: BegunChat) -> EncodedChat:
        rendered = begun.rendered
        if begun.is_by_segments:
            encoded = self._encode_from_known(rendered, begun.known)
        else:
            ids = self._encode(rendered.text, rendered.sentinel, begun.max_tokens, "messages")
            encoded = EncodedChat(array("I", ids), None)
        if not encoded.ids:
            raise BadRequest("The chat template renders an empty prompt.", param="messages")
        return encoded

    def encode_prompts(
        self, request: CompletionRequest, max_tokens: int | None = None
    ) -> list[list[int]]:
        """The prompts of a completion, one list each. Raises BadRequest, naming the field."""
        self.check_token_ids(request)
        self.check_length(request, max_tokens)
        encoded: list[list[int]] = []
        for prompt in request.prompts:
            if isinstance(prompt, str):
                ids = self.encode_text(prompt, max_tokens=max_tokens)
            else:
                ids = list(prompt)
            self.check_prompt_ids(ids)
            encoded.append(ids)
        return encoded

    def encode_text(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """A plain text; control tokens in it count. What stands around a text is there once."""
        ids = list(self._encode(text, "", max_tokens, "prompt"))
        if not add_special_tokens:
            return ids
        prefix, suffix = list(self.codec.prefix_ids), list(self.codec.suffix_ids)
        if prefix and ids[: len(prefix)] != prefix:
            ids = prefix + ids
        if suffix and ids[-len(suffix) :] != suffix:
            ids = ids + suffix
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids, as transformers gives it. Raises BadRequest for an id out of range."""
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise BadRequest(self._out_of_range(token_id), param="tokens")
        return self.codec.decode(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token in the middle of a text."""
        return self.codec.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The same as text; U+FFFD stands for a part of a character."""
        return self.codec.token_bytes(token_id).decode("utf-8", "replace")

    def check_token_ids(self, request: GenerationRequest) -> None:
        """Raises BadRequest for an id outside the vocabulary in `logit_bias`, `stop_token_ids`."""
        for token_id in request.token_biases:
            if token_id >= self.vocab_size:
                raise BadRequest(self._out_of_range(token_id), param="logit_bias")
        for token_id in request.stop_token_ids:
            if token_id >= self.vocab_size:
                raise BadRequest(self._out_of_range(token_id), param="stop_token_ids")

    def check_prompt_ids(self, ids: Sequence[int]) -> None:
        """Raises BadRequest for an empty prompt and for ids outside the vocabulary."""
        if not ids:
            raise BadRequest("The prompt is empty.", param="prompt")
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self.vocab_size:
                raise BadRequest(self._out_of_range(token_id), param="prompt")

    def render_chat(self, request: ChatCompletionRequest) -> str:
        """The prompt's text, as a person would read it. Raises BadRequest."""
        return self._render(request).plain

    def _render(self, request: ChatCompletionRequest) -> RenderedChat:
        if self._renderer is None:
            raise BadRequest(
                "This model has no chat template; use /v1/completions.", param="messages"
            )
        return self._renderer.render(request)

    def _encode(
        self, text: str, sentinel: str, max_tokens: int | None, param: str
    ) -> Sequence[int]:
        """Encode a text in which whole control tokens count and broken ones are plain text."""
        self._check_length(len(text), max_tokens, param)
        if not self.is_segment_safe:
            clean = text.replace(sentinel, "") if sentinel else text
            if self._controls.count(clean) == self._controls.count(text):
                return self.codec.encode_whole(clean)
        return self._encode_by_segments(text, sentinel)

    def _encode_by_segments(self, text: str, sentinel: str) -> array[int]:
        ids = array("I")
        self._append(ids, self._controls.split(text), sentinel)
        return ids

    def _encode_from_known(self, rendered: RenderedChat, known: KnownPrefix | None) -> EncodedChat:
        """What is behind the known beginning is encoded; a longer one is then known."""
        text, sentinel = rendered.text, rendered.sentinel
        start = len(known.text) if known else 0
        segments = self._controls.split(text, start)
        ids = known.ids[:] if known else array("I")
        cut = self._cut(segments)
        self._append(ids, segments[:cut], sentinel)
        if cut:
            known = KnownPrefix(text[: segments[cut - 1].end], sentinel, ids[:], known)
            self._known.add(known)
        self._append(ids, segments[cut:], sentinel)
        return EncodedChat(ids, known)

    def _cut(self, segments: Sequence[Segment]) -> int:
        """How many of the segments belong to a beginning worth to be known; 0: none."""
        num_behind = 0
        for index in range(len(segments) - 1, -1, -1):
            if segments[index].control_id is None:
                continue
            num_behind += 1
            if num_behind >= _TOKENS_BEHIND and self._controls.ends_cleanly(segments[index]):
                return index + 1
        return 0

    def _append(self, ids: array[int], segments: Sequence[Segment], sentinel: str) -> None:
        for segment in segments:
            if segment.control_id is not None:
                ids.append(segment.control_id)
            else:
                ids.extend(self._encode_piece(segment.text, sentinel))

    def _encode_piece(self, text: str, sentinel: str) -> array[int]:
        clean = text.replace(sentinel, "") if sentinel else text
        ids = self._cache.get(clean)
        if ids is None:
            ids = array("I", self.codec.encode(clean))
            self._cache.put(clean, ids)
        if len(clean) == len(text) or self._controls.ids.isdisjoint(ids):
            return ids
        # This vocabulary finds the token in plain text too: keep its two halves apart.
        return array("I", [i for p in text.split(sentinel) for i in self.codec.encode(p)])

    def check_length(
        self, request: ChatCompletionRequest | CompletionRequest, max_tokens: int | None
    ) -> None:
        """Refuse what is far too long before any work on it. Raises ContextLengthExceeded."""
        if max_tokens is None:
            return
        if isinstance(request, CompletionRequest):
            for prompt in request.prompts:
                if isinstance(prompt, str):
                    self._check_length(len(prompt), max_tokens, "prompt")
                elif len(prompt) > max_tokens:
                    raise ContextLengthExceeded(
                        f"The prompt has {len(prompt)} tokens, more than the {max_tokens} that the "
                        "model's context holds.",
                        param="prompt",
                    )
            return
        # A template may drop some of the messages, not most.
        contents = [
            len(m.content)
            if isinstance(m.content, str)
            else sum(len(p.text) for p in m.content or ())
            for m in request.messages
        ]
        self._check_length(sum(contents), max_tokens, "messages", _MAX_DROPPED)

    def _check_length(
        self, num_chars: int, max_tokens: int | None, param: str, allowance: int = 1
    ) -> None:
        """Refuse what has too many tokens even if each were as long as the longest there is."""
        if max_tokens is None or num_chars <= 4 * max_tokens:
            return
        longest = self.codec.longest_token_bytes()
        if longest and num_chars > allowance * longest * max_tokens:
            raise ContextLengthExceeded(
                f"The prompt of {num_chars} characters has more than {max_tokens} tokens, which is "
                "what the model's context holds.",
                param=param,
            )

    def _out_of_range(self, token_id: int) -> str:
        return f"Token id {token_id} is outside the vocabulary, 0 to {self.vocab_size - 1}."

    def _probe_segments(self) -> bool:
        a, b, c, d = _PROBE_TEXTS
        texts = [f"{a}{t.content}{b}{t.content}{t.content}{c}" for t in self._controls]
        texts += [f"{t.content}{d}{t.content}" for t in self._controls]
        whole = self.codec.probe_whole(texts)
        return all(
            self._encode_by_segments(text, "").tolist() == ids
            for text, ids in zip(texts, whole, strict=True)
        )


def _make_codec(files: TokenizerFiles) -> Codec:
    if files.digest == byte_tokenizer_files().digest:
        return ByteCodec()
    return HuggingFaceCodec(files)


def _token_id(codec: Codec, content: str | None) -> int | None:
    for token in codec.added_tokens.values():
        if token.content == content:
            return token.id
    return None


def _eos_token_ids(files: TokenizerFiles, codec: Codec) -> tuple[int, ...]:
    """Of the generation configuration (one or several) and the tokenizer, without repetition."""
    given = files.read_json(GENERATION_CONFIG).get("eos_token_id")
    ids = list(given) if isinstance(given, list) else [given]
    ids.append(_token_id(codec, files.special_tokens().get("eos_token")))
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and i >= 0))
