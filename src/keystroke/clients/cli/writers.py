"""A model that writes changes: the one named, or the one configured for work that follows instructions.

Says plainly when a model is too small for the task or follows no instructions, and how to configure
another; it never chooses a server by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from keystroke.errors import ConfigError, Interrupted

if TYPE_CHECKING:
    from keystroke.assist.edit import Writer
    from keystroke.assist.edit.writer import Messages
    from keystroke.clients.cli.answering import Speaker
    from keystroke.clients.cli.invocation import Invocation
    from keystroke.engine.base import Interrupt
    from keystroke.engine.generation import GenerationParams

SMALL = 3_000_000_000  # parameters; below this, search/replace blocks seldom come out right


@contextmanager
def open_writer(name: str | None, run: Invocation, interrupt: Interrupt) -> Iterator[Writer]:
    """The writer for a named model or the one for instructions. NotFound and ConfigError say how to get
    one."""
    from keystroke.clients.cli.speaker import open_speaker, params
    from keystroke.engine.roles import Role, advice, instructing, required

    chosen = params(run.settings, max_tokens=None, temperature=None, seed=None)
    with open_speaker(name or required(Role.DEEP, run.settings), run) as speaker:
        facts = speaker.facts
        if not facts.chat:
            raise ConfigError(
                f"{speaker.name} completes code but follows no instructions; {advice(run.settings)}"
            )
        if facts.parameters is not None and facts.parameters < SMALL:
            hint = "" if speaker.name in instructing(run.settings) else f". For more, {advice(run.settings)}"
            run.console.note(
                f"{speaker.name} has {facts.parameters / 1e9:.1f} billion parameters, which is little for "
                f"edits: look closely{hint}"
            )
        yield SpeakerWriter(speaker, chosen, interrupt)


class SpeakerWriter:
    """Writes what any speaker says. `facts` tells whose words they are."""

    def __init__(self, speaker: Speaker, params: GenerationParams, interrupt: Interrupt) -> None:
        self.facts = speaker.facts
        self.name = self.facts.name
        self._speaker, self._params, self._interrupt = speaker, params, interrupt

    def write(self, messages: Messages, prediction: str | None) -> Iterator[str]:
        asked = [dict(message) for message in messages]
        answer = self._speaker.chat(asked, self._params, self._interrupt, prediction)
        yield from answer
        if self._interrupt.is_set:
            raise Interrupted("stopped on request; nothing was changed")


def knows_blocks(writer: Writer, run: Invocation) -> bool:
    """Whether the model behind a writer writes search/replace blocks: what its card says (`"edits": "blocks"`
    or "regions"), no if it is small, else a probe the first time."""
    from keystroke.assist.edit.probe import writes_blocks
    from keystroke.engine.card import card_value

    assert isinstance(writer, SpeakerWriter)
    facts = writer.facts
    said = card_value(Path(facts.path), "edits") if facts.path is not None else None
    if said in ("blocks", "regions"):
        return said == "blocks"
    if facts.parameters is not None and facts.parameters < SMALL:
        return False
    return writes_blocks(writer, writer.name, run.settings.paths.cache)
