"""A local chat model: conversations become tokens, and a redirection keeps every one of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keystroke.agent.chat.local import LocalChatModel
from keystroke.agent.chat.model import AnswerOptions, ModelAnswer
from keystroke.clients.cli.conversation import ChatConversation, ChatTurn
from keystroke.engine.base import Interrupt
from keystroke.engine.echo import EOS, SPECIAL, EchoEngine
from keystroke.engine.generation import Finish, GenerationParams
from keystroke.engine.model import Model
from keystroke.engine.templates import ChatTemplate
from keystroke.engine.tokenizer.byte_tokens import ByteTokenizer
from keystroke.errors import InputError, UnsupportedModel

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPTIONS = AnswerOptions(GenerationParams(max_tokens=200))


def local_model(
    script: Callable[[str], str], template: str | None = TEMPLATE, step_cost: float = 0.0
) -> LocalChatModel:
    tokenizer = ByteTokenizer(SPECIAL, eos=EOS, vocab_size=320)
    chat = ChatTemplate(template) if template else None
    model = Model("echo", EchoEngine(script, step_cost=step_cost), tokenizer, chat)
    return LocalChatModel(model, speculate=False, owns_model=True)


def held(chosen: LocalChatModel) -> str:
    return b"".join(chosen.model.tokenizer.token_bytes(t) for t in chosen.session.tokens).decode()


def redirected(
    chosen: LocalChatModel, conversation: ChatConversation, after: int, line: str
) -> tuple[str, ModelAnswer]:
    answer = chosen.answer(conversation.messages, OPTIONS)
    said = ""
    for count, piece in enumerate(answer, 1):
        said += piece
        if count == after:
            answer.redirect(line)
    return said, answer


def test_a_redirection_keeps_what_was_said_and_opens_the_next_answer() -> None:
    with local_model(lambda prompt: "second" if "instead" in prompt else "first answer") as chosen:
        conversation = ChatConversation(messages=[{"role": "user", "content": "hi"}])
        said, answer = redirected(chosen, conversation, 5, "instead")
        assert said == "firstsecond"
        assert answer.finish is Finish.STOP
        assert held(chosen) == "[user]hi<end>[assistant]first<end>[user]instead<end>[assistant]second<end>"
        assert chosen.model.engine.prefilled < 2 * len(chosen.session.tokens)  # type: ignore[attr-defined]


def test_a_line_that_looks_like_a_control_token_stays_text() -> None:
    with local_model(lambda prompt: "ok" if "no" in prompt else "first") as chosen:
        conversation = ChatConversation(messages=[{"role": "user", "content": "hi"}])
        redirected(chosen, conversation, 2, "<end>no")
        ends = [t for t in chosen.session.tokens if t == SPECIAL["<end>"]]
        assert len(ends) == 4  # two questions, the answer cut short, the answer that ended


def test_the_next_turn_reuses_the_tokens_of_a_redirected_answer() -> None:
    with local_model(lambda prompt: "second" if "instead" in prompt else "first answer") as chosen:
        conversation = ChatConversation(messages=[{"role": "user", "content": "hi"}])
        redirected(chosen, conversation, 5, "instead")
        grown = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": "instead"},
            {"role": "assistant", "content": "second"},
            {"role": "user", "content": "more"},
        ]
        answer = chosen.answer(grown, OPTIONS)
        list(answer)
        report = answer.report()
        assert report.reused_tokens >= report.prompt_tokens - len("[user]more<end>[assistant]") - 1


def test_a_turn_gives_pieces_to_another_thread_and_ends_with_the_conversation_grown() -> None:
    conversation = ChatConversation("Be brief.")
    conversation.add_user_message("hi")
    with local_model(lambda _prompt: "hello") as chosen:
        text, ended = "", False
        with ChatTurn(chosen, conversation, OPTIONS) as turn:
            while not ended:
                piece, ended = turn.read()
                text += piece
    assert text == "hello"
    assert [m["content"] for m in conversation.messages] == ["Be brief.", "hi", "hello"]


def test_an_interrupt_ends_a_turn_within_a_step_and_keeps_what_was_said() -> None:
    conversation = ChatConversation()
    conversation.add_user_message("hi")
    interrupt = Interrupt()
    with local_model(lambda _prompt: "a" * 10_000, step_cost=0.005) as chosen:
        with ChatTurn(chosen, conversation, AnswerOptions(interrupt=interrupt)) as turn:
            text, ended = turn.read()
            interrupt.set()
            taken = chosen.model.engine.steps  # type: ignore[attr-defined]
            while not ended:
                piece, ended = turn.read()
                text += piece
        assert chosen.model.engine.steps <= taken + 1  # type: ignore[attr-defined]
        assert turn.report is not None
        assert turn.report.finish == "interrupted"
        assert conversation.messages[-1]["content"] == text
        assert len(text) < 10_000


def test_a_model_without_a_template_says_what_to_use_instead() -> None:
    with (
        local_model(str, template=None) as chosen,
        pytest.raises(UnsupportedModel, match="keystroke generate"),
    ):
        chosen.answer([{"role": "user", "content": "hi"}], OPTIONS)


def test_an_empty_prompt_is_refused() -> None:
    with local_model(str) as chosen, pytest.raises(InputError, match="empty"):
        chosen.generate("", OPTIONS)
