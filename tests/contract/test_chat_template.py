from typing import Any

import pytest

from kvoy_contract.chat_template import MAX_RANGE_ITEMS, ChatTemplate
from kvoy_contract.errors import BadRequest

HI = {"role": "user", "content": "Hi"}


def render(source: str, *messages: dict[str, Any], **arguments: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(list(messages) or [HI], arguments=arguments)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hi"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
        ('{{ {"b": "<é>", "a": 1} | tojson }}', '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ '=' * 3 }}{{ 2 ** 3 }}", "===8"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_templates_see_what_transformers_shows_them(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_refusal_carries_the_templates_own_words() -> None:
    with pytest.raises(BadRequest, match="no system role here") as refused:
        render("{{ raise_exception('no system role here') }}")

    assert refused.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ undefined_function() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * 'x' }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_a_template_that_fails_or_runs_away_is_a_clients_error(source: str) -> None:
    with pytest.raises(BadRequest) as refused:
        render(source)

    assert refused.value.param == "messages"


def test_what_is_unsafe_stays_so_however_often_it_is_asked_for() -> None:
    source = "{{ messages[0].keys() | length }}{% if pop %}{{ messages[0].pop('role') }}{% endif %}"
    template = ChatTemplate(source, {})

    for _ in range(2):
        assert template.render([HI], arguments={"pop": False}) == "2"
        with pytest.raises(BadRequest, match="unsafe"):
            template.render([HI], arguments={"pop": True})


def test_arguments_reach_the_template_but_replace_nothing_of_it() -> None:
    assert render("{{ tone }}", tone="calm") == "calm"
    for name in ("messages", "bos_token", "range", "raise_exception", "add_generation_prompt"):
        with pytest.raises(BadRequest) as refused:
            render("{{ tone }}", **{name: "x"})
        assert refused.value.param == f"chat_template_kwargs.{name}"


def test_an_argument_cannot_make_a_loop_run_away() -> None:
    source = "{% for i in range(n) %}{% endfor %}done"

    assert render(source, n=MAX_RANGE_ITEMS) == "done"
    with pytest.raises(BadRequest, match="loops more than"):
        render(source, n=MAX_RANGE_ITEMS + 1)


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        ("{{ messages[0].content }}", False),
        ("{{ messages[0]['content'] + '' }}", False),
        ("{% for part in messages[0].content %}{{ part.text }}{% endfor %}", True),
        (
            "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
            "{{ messages[0].content[0].text }}{% endif %}",
            True,
        ),
    ],
)
def test_whether_a_template_takes_parts_is_found_out(source: str, takes_parts: bool) -> None:
    assert ChatTemplate(source, {}).takes_parts == takes_parts


def test_what_is_no_template_is_refused_at_load() -> None:
    with pytest.raises(ValueError, match="cannot be compiled"):
        ChatTemplate("{% if %}", {})
