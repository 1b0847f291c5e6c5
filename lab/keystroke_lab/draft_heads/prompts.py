"""Prompts for the target to answer, made from real code: chat, edits, fill-in, tools, plain text.

The same sources, seed and formats give the same prompts. Words come from the code's own names and
documentation and from `topics`; formats are those of `assist` and of the model's templates.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keystroke.analysis.syntax import language_name
from keystroke.assist.edit import EditTask, Region, edit_steps
from keystroke.engine.fim import FimTemplate
from keystroke.engine.templates import ChatTemplate
from keystroke.engine.tokenizer import Tokenizer
from keystroke_lab.draft_heads import topics
from keystroke_lab.draft_heads.definitions import Definition, definitions
from keystroke_lab.draft_heads.generation import GenerationPrompt
from keystroke_lab.pretraining.documents import SourceText

# What an ask is, and how many of a hundred: new code first, because nothing else can draft that.
SHARES: Mapping[str, int] = {
    "function": 20, "class": 8, "topic": 20, "complete": 8, "fim": 16, "rewrite": 7, "blocks": 4,
    "explain": 4,
    "tests": 5, "translate": 3, "tool": 2, "plain": 3,
}  # fmt: skip
_NEED_CHAT = frozenset(SHARES) - {"fim", "plain"}
_HEATS = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.6, 0.8, 0.8, 1.0)
_ASK = (
    "Write a {language} {what} {name} that does this: {said}",
    "Implement `{name}` in {language}. {said}",
    "Please write {language} code for a {what} called {name}. {said} Only code, no explanation.",
    "I need a {what} `{name}` in {language}. {said} Include error handling.",
    "{said}\n\nWrite this as a {language} {what} named `{name}`.",
    "Complete the task in {language}:\n\n{head}\n\n{said}",
)
_TOPIC = (
    "Write a {language} function that {topic}.",
    "Write a function in {language} that {topic}. Return only the code.",
    "How would I write a {language} function that {topic}?",
    "Implement a function that {topic}, in {language}, with a short example of its use.",
    "{language}: {topic}. Give me a clean implementation with documentation.",
)
_TOPIC_CLASS = (
    "Write a {language} class for {topic}.",
    "Implement {topic} in {language}. Return only the code.",
    "Design {topic} in {language}, with tests.",
    "Create {topic} as a {language} class with documentation.",
)
_EXPLAIN = (
    "Explain what this code does:",
    "What does this do, and what could go wrong?",
    "Review this code:",
)
_TESTS = ("Write unit tests for this code:", "Write tests for the following. Only code.")
_SYSTEMS = (
    None,
    None,
    None,
    "You are a careful programmer. Answer with code.",
    "You are a helpful coding assistant.",
)


@dataclass(frozen=True, slots=True)
class PromptFormats:
    """How the target is spoken to."""

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    fim: FimTemplate | None


def make_prompts(
    sources: Sequence[SourceText], formats: PromptFormats, count: int, *, seed: int = 0, longest: int = 512
) -> Iterator[GenerationPrompt]:
    """About `count` asks of at most `longest` tokens. Sources are gone through in a random order, again where
    they are few."""
    rng = random.Random(seed)
    maker = _Maker(formats, rng, longest)
    kinds = [
        kind
        for kind, share in SHARES.items()
        for _ in range(share)
        if (formats.chat or kind not in _NEED_CHAT) and (formats.fim or kind != "fim")
    ]
    order: list[SourceText] = []
    made = 0
    failed = 0
    while made < count and failed < 50 + 2 * len(sources):
        if not order:
            order = rng.sample(list(sources), len(sources))
        source = order.pop()
        found = list(definitions(source.path, source.text))
        before = made
        for _ in range(3):  # a file gives several asks, of different kinds
            kind = rng.choice(kinds)
            tokens = maker.tokens(kind, source, found)
            if tokens is not None and len(tokens) <= longest:
                yield GenerationPrompt(tokens, kind, rng.choice(_HEATS), rng.getrandbits(48))
                made += 1
        failed = 0 if made > before else failed + 1


class _Maker:
    def __init__(self, formats: PromptFormats, rng: random.Random, longest: int) -> None:
        self._formats, self._dice, self._longest = formats, rng, longest

    def tokens(self, kind: str, source: SourceText, found: Sequence[Definition]) -> list[int] | None:
        """The prompt, or None where this source does not give such an ask."""
        if kind == "topic":
            return self._chat(self._topic())
        if kind == "fim":
            return self._fim(source)
        if kind == "plain":
            return self._formats.tokenizer.encode(self._excerpt(source.text))
        if kind == "tool":
            return self._tool()
        fitting = [
            d for d in found if (kind != "class" or d.is_class) and (kind != "function" or not d.is_class)
        ]
        if not fitting:
            return None
        definition = self._dice.choice(fitting)
        if kind in ("rewrite", "blocks"):
            return self._edit(kind, source, definition)
        text = self._about(kind, definition)
        return None if text is None else self._chat(text)

    def _about(self, kind: str, d: Definition) -> str | None:
        rng, language = self._dice, language_name(d.language)
        what = "class" if d.is_class else "function"
        if kind in ("function", "class"):
            said = d.said or f"Its name says what it is for: {_words(d.name)}."
            return rng.choice(_ASK).format(language=language, what=what, name=d.name, said=said, head=d.head)
        code = f"```{d.language}\n{d.text[:1600]}\n```"
        if kind == "complete":
            lines = d.text.splitlines()
            kept = "\n".join(lines[: max(2, len(lines) // rng.choice((2, 3, 4)))])
            return f"Complete this {language} {what}:\n```{d.language}\n{kept}\n```"
        if kind == "explain":
            return f"{rng.choice(_EXPLAIN)}\n{code}"
        if kind == "tests":
            return f"{rng.choice(_TESTS)}\n{code}"
        other = rng.choice([name for name in topics.LANGUAGES if name != language])
        return f"Translate this {language} code to {other}:\n{code}"

    def _topic(self) -> str:
        rng = self._dice
        language = rng.choice(topics.LANGUAGES)
        if rng.random() < 0.35:
            return rng.choice(_TOPIC_CLASS).format(language=language, topic=rng.choice(topics.CLASSES))
        return rng.choice(_TOPIC).format(language=language, topic=rng.choice(topics.FUNCTIONS))

    def _edit(self, kind: str, source: SourceText, d: Definition) -> list[int] | None:
        instruction = self._dice.choice(topics.EDITS)
        path = source.path.rsplit("/", 1)[-1]
        first = source.text.count("\n", 0, d.start)
        lines = source.text.splitlines(keepends=True)
        count = d.text.count("\n") + 1
        around = self._dice.choice((0, 4, 8))
        shown = "".join(lines[max(0, first - around) : first + count + around])
        inside = min(first, around)
        region = Region(path, inside, inside + count) if kind == "rewrite" else None
        task = EditTask({path: shown}, f"{instruction} ({d.name})", region)
        question = next(edit_steps(task), None)
        return None if question is None else self._render(question.messages)

    def _fim(self, source: SourceText) -> list[int] | None:
        fim, rng, text = self._formats.fim, self._dice, source.text
        assert fim is not None
        lines = text.splitlines(keepends=True)
        if len(lines) < 8:
            return None
        at = rng.randrange(2, len(lines) - 2)
        gone = rng.choice((0, 1, 1, 3, 6, 12))  # lines; 0: the rest of one
        cut = rng.randrange(max(1, len(lines[at]))) if gone == 0 else 0
        before = "".join(lines[max(0, at - rng.choice((12, 25, 40))) : at]) + lines[at][:cut]
        behind = "\n" if gone == 0 else ""
        after = behind + "".join(lines[at + max(1, gone) : at + max(1, gone) + rng.choice((4, 12, 25))])
        return fim.tokens(self._formats.tokenizer, before, after)

    def _excerpt(self, text: str) -> str:
        lines = text.splitlines(keepends=True)
        at = self._dice.randrange(max(1, len(lines) - 10))
        return "".join(lines[at : at + self._dice.choice((5, 15, 30))]) or text[:200]

    def _tool(self) -> list[int] | None:
        rng = self._dice
        name = rng.choice(("read_file", "search", "run_tests", "apply_patch", "list_files", "open_url"))
        argument = {"read_file": "path", "search": "query", "run_tests": "target", "apply_patch": "patch"}
        key = argument.get(name, "where")
        parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
        tool = {
            "name": name,
            "description": f"{name.replace('_', ' ')} of the project",
            "parameters": parameters,
        }
        place = rng.choice(
            ("src/app.py", "lib/index.js", "README.md", "tests", "internal/server.go", "the parser")
        )
        wish = rng.choice(
            ("Look at {}.", "What is in {}?", "Find where {} is used.", "Fix the bug in {}.")
        ).format(place)
        if rng.random() < 0.5:
            example = json.dumps({"file": "path", "line": 1, "problem": "text"})
            return self._chat(f"{wish} Answer with JSON only, like {example}.")
        return self._render([{"role": "user", "content": wish}], [{"type": "function", "function": tool}])

    def _chat(self, text: str) -> list[int] | None:
        system = self._dice.choice(_SYSTEMS)
        messages = [{"role": "system", "content": system}] if system else []
        return self._render([*messages, {"role": "user", "content": text}])

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int] | None:
        chat = self._formats.chat
        assert chat is not None
        if sum(len(str(m["content"])) for m in messages) > 6 * self._longest:
            return None  # far too long: not worth encoding
        return chat.tokens(self._formats.tokenizer, messages, tools=tools)


def _words(name: str) -> str:
    return " ".join(re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name).replace("_", " ").lower().split())
