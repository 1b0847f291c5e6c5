"""A model that writes changes: the one named, or the one configured for work that follows instructions.

Law: says plainly when a model is too small for the task or follows no instructions, and how to configure
another; it never chooses a server by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from keystroke.assist.edit import ModelWriter, RemoteWriter, Writer
from keystroke.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from keystroke.clients.cli.invocation import Invocation
    from keystroke.engine.base import Interrupt

SMALL = 3_000_000_000  # parameters; below this, search/replace blocks seldom come out right


@contextmanager
def open_writer(name: str | None, run: Invocation, interrupt: Interrupt) -> Iterator[Writer]:
    """The writer for a named model or the one for instructions. NotFound and ConfigError say how to get
    one."""
    from keystroke.clients.cli.local_speaker import LocalSpeaker
    from keystroke.clients.cli.remote_speaker import RemoteSpeaker
    from keystroke.clients.cli.speaker import open_speaker, params
    from keystroke.engine.roles import Role, advice, instructing, required

    chosen = params(run.settings, max_tokens=None, temperature=None, seed=None)
    with open_speaker(name or required(Role.DEEP, run.settings), run) as speaker:
        if isinstance(speaker, RemoteSpeaker):
            remote = speaker.model.model
            yield RemoteWriter(speaker.model, chosen, interrupt, f"{remote.endpoint.base_url}#{remote.name}")
            return
        if not isinstance(speaker, LocalSpeaker):
            raise UsageError(f"{speaker.name} cannot write edits; choose another model")
        model = speaker.model
        if model.chat is None:
            raise ConfigError(
                f"{model.name} completes code but follows no instructions; {advice(run.settings)}"
            )
        if model.engine.info.parameters < SMALL:
            size = model.engine.info.parameters / 1e9
            hint = "" if model.name in instructing(run.settings) else f". For more, {advice(run.settings)}"
            run.console.note(
                f"{model.name} has {size:.1f} billion parameters, which is little for edits: look "
                f"closely{hint}"
            )
        yield ModelWriter(model, chosen, interrupt)


def knows_blocks(writer: Writer, run: Invocation) -> bool:
    """Whether the model behind a writer writes search/replace blocks: what its card says (`"edits": "blocks"`
    or "regions"), no if it is small, else a probe the first time."""
    from keystroke.assist.edit.probe import writes_blocks
    from keystroke.engine.card import card_value

    if isinstance(writer, ModelWriter):
        model = writer.model
        said = card_value(model.path, "edits") if model.path is not None else None
        if said in ("blocks", "regions"):
            return said == "blocks"
        if model.engine.info.parameters < SMALL:
            return False
    name = getattr(writer, "name", "")
    return bool(name) and writes_blocks(writer, name, run.settings.paths.cache)
