"""Renders a chat for `prompt`: messages to template data, with control tokens in them broken."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from kvoy_contract.chat_template import ChatTemplate
from kvoy_contract.control_tokens import (
    ControlTokens,
    map_strings,
    strings_in,
    unused_sentinels,
)
from kvoy_contract.errors import BadRequest
from kvoy_contract.openai_requests import ChatCompletionRequest, Message


@dataclass(frozen=True, slots=True)
class RenderedChat:
    text: str
    sentinel: str
    """Where this stands in `text`, a control token is broken."""

    @property
    def plain(self) -> str:
        """The text as a person would read it."""
        return self.text.replace(self.sentinel, "")


class ChatRenderer:
    """A model's template together with what its control tokens ask of user text."""

    def __init__(self, template: ChatTemplate, controls: ControlTokens) -> None:
        self._template = template
        self._controls = controls
        self._knows_developer = "developer" in template.source

    def render(self, request: ChatCompletionRequest) -> RenderedChat:
        """Raises BadRequest, naming the field."""
        texts = [self._texts_of(message) for message in request.messages]
        arguments = dict(request.chat_template_kwargs or {})
        sentinel, end_mark = self._sentinels([texts, arguments])
        # A role is one of a few words, which nobody has to be kept from.
        messages = [
            {
                "role": self._role(message.role),
                **self._shield(fields, sentinel, forgeable=message.role != "assistant"),
            }
            for message, fields in zip(request.messages, texts, strict=True)
        ]
        if request.continue_final_message:
            # As transformers does it: the space shows whether the template trims the content.
            _append_text(messages[-1], f"{end_mark} ")
        text = self._template.render(
            messages,
            add_generation_prompt=request.add_generation_prompt,
            arguments=self._shield(arguments, sentinel, forgeable=True),
        )
        if request.continue_final_message:
            text = _cut_at_mark(text, end_mark)
        return RenderedChat(text, sentinel)

    def _texts_of(self, message: Message) -> dict[str, Any]:
        """What the template sees beside the role: fields that were given, the content in the form
        that it takes."""
        content: Any = message.content
        if isinstance(content, list):
            texts = [part.text for part in content]
            parts = [{"type": "text", "text": text} for text in texts]
            content = parts if self._template.takes_parts else "\n".join(texts)
        fields: dict[str, Any] = {"content": content}
        if message.name is not None:
            fields["name"] = message.name
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            fields |= {"reasoning_content": reasoning, "thinking": reasoning}
        return fields

    def _role(self, role: str) -> str:
        """`developer` is OpenAI's newer word for `system`; few templates know it."""
        return "system" if role == "developer" and not self._knows_developer else role

    def _sentinels(self, value: Any) -> tuple[str, str]:
        """(breaks control tokens, marks the end of a message to go on from)."""
        try:
            sentinel, end_mark = unused_sentinels([*strings_in(value), self._template.source], 2)
        except ValueError as error:
            raise BadRequest(
                f"The messages cannot be encoded: {error}.", param="messages"
            ) from None
        return sentinel, end_mark

    def _shield(self, fields: dict[str, Any], sentinel: str, *, forgeable: bool) -> dict[str, Any]:
        shield = partial(self._controls.shield, sentinel=sentinel, forgeable=forgeable)
        return {name: map_strings(value, shield) for name, value in fields.items()}


def _append_text(message: dict[str, Any], text: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + text
    elif content:
        content[-1]["text"] += text


def _cut_at_mark(text: str, mark: str) -> str:
    """Everything before the mark at the end of the last message."""
    end = text.rfind(mark)
    if end < 0:
        raise BadRequest(
            "The chat template drops the end of the last message, so it cannot be continued.",
            param="continue_final_message",
        )
    is_kept = text.startswith(f"{mark} ", end)
    return text[:end] if is_kept else text[:end].rstrip()
