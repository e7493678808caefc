"""Renders a model's own chat template, as transformers does, in a sandbox with limits.

The template comes with the model, the messages from anybody: a template's refusal, or any error in
it, is the client's error and names `messages`. Loops over `range`, repeated text and the output's
length are bounded, so that no argument of a request makes a template run away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvoy_contract.errors import BadRequest

MAX_RANGE_ITEMS = 100_000
"""Of all `range` loops in one rendering together."""
MAX_REPEATED_CHARS = 1 << 20
MAX_EXTRA_CHARS = 1 << 20
MAX_EXPANSION = 4
"""A rendering may be so many times as long as its messages, and MAX_EXTRA_CHARS more."""

_MAX_KEPT_ANSWERS = 256
"""A template may build names of attributes from what it is given."""

_PROBE = "kvoy-probe"
_RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "range",
        "raise_exception",
        "strftime_now",
        "namespace",
        "dict",
        "cycler",
        "joiner",
        "lipsum",
    }
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training; its body is rendered as is."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on the operators that make much out of little."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._is_safe: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """The sandbox goes by type and name alone, and takes two microseconds to: a loop over
        messages asks for the same of each, so its answers are kept."""
        asked = (type(obj), attr)
        answer = self._is_safe.get(asked)
        if answer is None:
            answer = super().is_safe_attribute(obj, attr, value)
            if len(self._is_safe) < _MAX_KEPT_ANSWERS:
                self._is_safe[asked] = answer
        return answer

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for items, count in ((left, right), (right, left)):
                is_repetition = isinstance(items, str | list | tuple) and isinstance(count, int)
                if is_repetition and len(items) * count > MAX_REPEATED_CHARS:
                    raise SecurityError("the chat template repeats too much text")
        elif abs(left) > 2**32 or abs(right) > 64:
            raise SecurityError("the chat template computes too great a power")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """One compiled template. Rendering is safe in several threads at once."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ValueError when `source` is no template."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals.pop("lipsum", None)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template cannot be compiled: {error}") from error
        # Each rendering copies them, and a chain of mappings copies slowly.
        self._template.globals = dict(self._template.globals)
        self.takes_parts = self._probe_parts()
        """Whether it renders a content that is a list of parts; else they are joined before."""

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises BadRequest with the template's own words when it refuses."""
        for name in arguments or ():
            if name in _RESERVED or name in self._special_tokens:
                raise BadRequest(
                    f"`chat_template_kwargs` cannot set `{name[:80]}`.",
                    param=f"chat_template_kwargs.{name[:80]}",
                )
        variables = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(arguments or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "range": _bounded_range(),
        }
        try:
            return self._generate(variables)
        except jinja2.TemplateError as error:
            raise BadRequest(
                f"The chat template refused the messages: {error}", param="messages"
            ) from None
        # A template is a program from outside: any failure of its code is about this input.
        except Exception as error:
            raise BadRequest(
                f"The chat template failed on the messages: {error}", param="messages"
            ) from None

    def _generate(self, variables: dict[str, Any]) -> str:
        template = self._template
        pieces: list[str] = []
        num_chars, max_chars = 0, MAX_EXTRA_CHARS
        # What `Template.generate` runs, without its layers.
        for piece in template.root_render_func(template.new_context(variables)):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_chars:
                max_chars = MAX_EXTRA_CHARS + MAX_EXPANSION * _count_chars(variables)
                if num_chars > max_chars:
                    raise SecurityError("the prompt grows beyond any use")
        return "".join(pieces)

    def _probe_parts(self) -> bool:
        parts = [{"type": "text", "text": _PROBE}]
        try:
            rendered = self.render([{"role": "user", "content": parts}])
        except BadRequest:
            return False
        return _PROBE in rendered and "'type'" not in rendered and '"type"' not in rendered


def _bounded_range() -> Callable[..., range]:
    left = MAX_RANGE_ITEMS

    def bounded(*arguments: int) -> range:
        nonlocal left
        items = range(*arguments)
        left -= min(len(items), MAX_RANGE_ITEMS + 1)
        if left < 0:
            raise SecurityError(f"the chat template loops more than {MAX_RANGE_ITEMS} times")
        return items

    return bounded


def _count_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _count_chars(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(_count_chars, value))
    return 8


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: Jinja's own escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
