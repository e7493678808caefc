"""Large bodies, before they are decoded: millions of small values would hold up everybody else.

To decode a text of 20 MB takes 25 ms, and as many bytes of empty lists two seconds; while either
lasts, an event loop carries nobody's tokens. So what a body has besides its texts and token ids is
bounded. To find out, values are skipped over and not made.
"""

from __future__ import annotations

import msgspec

from kvoy_contract.errors import BadRequest
from kvoy_contract.openai_requests import MAX_MESSAGES, MAX_PROMPTS

MAX_STRUCTURE_BYTES = 512 * 1024
"""Of a body, apart from its texts and token ids."""
_TEXTS_OF_A_MESSAGE = ("content", "reasoning_content", "reasoning")
_SHORTEST_PART = '{"type":"text","text":""},'
_QUOTE, _BRACKET = ord('"'), ord("[")

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


def check_shape(body: bytes) -> None:
    """Raises BadRequest. Whatever else is wrong is left to those who decode the body."""
    if len(body) <= MAX_STRUCTURE_BYTES:
        return
    try:
        fields = _fields_decoder.decode(body)
        enough = len(body) - MAX_STRUCTURE_BYTES
        sizes = {name: len(raw) - _text_bytes(name, raw, enough) for name, raw in fields.items()}
    except (msgspec.DecodeError, RecursionError):
        return
    # What is in no field is white space, or a field that comes twice.
    rest = len(body) - sum(map(len, fields.values()))
    if sum(sizes.values()) + rest <= MAX_STRUCTURE_BYTES:
        return
    message = f"The body has more than {MAX_STRUCTURE_BYTES} bytes besides its texts and token ids"
    largest = max(sizes, key=sizes.__getitem__, default="")
    if rest > sizes.get(largest, 0):
        raise BadRequest(f"{message}: white space, or fields that come twice.")
    raise BadRequest(f"{message}, most of them in `{largest[:200]}`.", param=largest[:200])


def _text_bytes(name: str, raw: msgspec.Raw, enough: int) -> int:
    """Of a field: how much is text or token ids; of messages counted until it is `enough`. Raises
    BadRequest for too many messages or prompts, and msgspec.DecodeError."""
    if name == "tokens":
        return len(raw)
    if name == "prompt":
        if bytes(raw).count(b"[") > MAX_PROMPTS + 1:  # else there cannot be so many lists
            _check_count(name, _list_decoder.decode(raw), MAX_PROMPTS)
        return len(raw)
    if name == "messages" and _begins_with(raw, _BRACKET):
        messages = _list_decoder.decode(raw)
        _check_count(name, messages, MAX_MESSAGES)
        num_bytes = 0
        for message in messages:
            num_bytes += _message_text_bytes(message)
            if num_bytes >= enough:
                break
        return num_bytes
    return 0


def _message_text_bytes(message: msgspec.Raw) -> int:
    fields = _fields_decoder.decode(message)
    num_bytes = sum(_string_bytes(fields.get(name)) for name in _TEXTS_OF_A_MESSAGE)
    content = fields.get("content")
    if content is not None and _begins_with(content, _BRACKET):
        parts = _list_decoder.decode(content)
        if len(parts) <= MAX_STRUCTURE_BYTES // len(_SHORTEST_PART):  # else too many anyway
            texts = [_fields_decoder.decode(part).get("text") for part in parts]
            num_bytes += sum(map(_string_bytes, texts))
    return num_bytes


def _string_bytes(raw: msgspec.Raw | None) -> int:
    return len(raw) if raw is not None and _begins_with(raw, _QUOTE) else 0


def _begins_with(raw: msgspec.Raw, byte: int) -> bool:
    """No white space stands before a value."""
    return memoryview(raw)[0] == byte


def _check_count(name: str, items: list[msgspec.Raw], limit: int) -> None:
    if len(items) > limit:
        raise BadRequest(f"`{name}` has more than {limit} entries.", param=name)
