"""A chat template that came with somebody's weights is bounded in time and memory, and others go on."""

from __future__ import annotations

from typing import Any

import pytest

from keystroke.engine import templates
from keystroke.engine.templates import ChatTemplate
from keystroke.errors import InputError, ModelDamaged

USER = [{"role": "user", "content": "hé <b>"}]
HOSTILE = {
    "nested ranges": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set ns=namespace(x='a') %}{% for i in range(36) %}{% set ns.x=ns.x~ns.x %}{% endfor %}"
    "{{ ns.x|length }}",
    "doubling lists": "{% set ns=namespace(x=[1]) %}{% for i in range(36) %}{% set ns.x=ns.x+ns.x %}"
    "{% endfor %}{{ ns.x|length }}",
    "constants": "{{ 'a'|center(10000000000)|length }}",
    "padding": "{{ 'a'.ljust(10000000000)|length }}",
}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 1.5)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_ended_in_one_sentence_and_its_next_call_is_bounded_too(name: str) -> None:
    template = ChatTemplate(HOSTILE[name], foreign=True)  # merely having it costs nothing
    with pytest.raises((ModelDamaged, InputError), match="chat template"):
        template.render(USER)


def test_a_template_renders_in_its_process_what_it_renders_here() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ m | tojson }}{% endfor %}"
        "{{ bos_token }}"
    )
    here, there = ChatTemplate(source, bos="<s>"), ChatTemplate(source, bos="<s>", foreign=True)
    called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [{"a": [1, None, 2.5]}]}
    conversation: list[dict[str, Any]] = [*USER, called]
    assert there.render(conversation) == here.render(conversation)


def test_refusals_and_faults_of_a_template_in_its_process_are_those_it_has_here() -> None:
    for source in ("{{ raise_exception('no system text') }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}"):
        said = []
        for foreign in (False, True):
            with pytest.raises((ModelDamaged, InputError)) as failure:
                ChatTemplate(source, foreign=foreign).render(USER)
            said.append((type(failure.value), str(failure.value)))
        assert said[0] == said[1]


def test_a_process_that_was_ended_is_started_anew() -> None:
    source = (
        "{% for i in range(messages[0].content | int) %}{% for j in range(99999) %}{% endfor %}"
        "{% endfor %}done"
    )
    template = ChatTemplate(source, foreign=True)
    with pytest.raises(ModelDamaged):
        template.render([{"role": "user", "content": "99999"}])
    assert template.render([{"role": "user", "content": "1"}]) == "done"
