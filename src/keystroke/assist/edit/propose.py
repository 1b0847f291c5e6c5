"""The one way in: an instruction, some texts, and a model that writes.

Drives the ladder with a blocking writer. An answer becomes a complete proposal or named failures,
nothing between. Model output is data here: it is parsed, matched and compared, never run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from keystroke.assist.edit.ladder import Exists, edit_steps
from keystroke.assist.edit.task import EditTask, Proposal
from keystroke.assist.edit.writer import Writer
from keystroke.errors import InputError

MAX_ANSWER = 4 << 20  # characters; a model that writes more has lost its way


def propose_edit(
    task: EditTask,
    writer: Writer,
    *,
    blocks: bool = False,
    retries: int = 1,
    on_text: Callable[[str], None] | None = None,
    exists: Exists = lambda path: False,
) -> Proposal:
    """Let a model do a task. `blocks`: it is known to write search/replace blocks well. `exists` says which
    paths beyond the task's files are taken. Raises InputError for an endless answer, and what the writer
    raises."""
    steps = edit_steps(task, blocks=blocks, retries=retries, exists=exists)
    try:
        question = next(steps)
        while True:
            stream = writer.write(question.messages, question.prediction or None)
            question = steps.send(_answered(stream, question.watch(), on_text))
    except StopIteration as stop:
        proposal = stop.value
        assert isinstance(proposal, Proposal)
        return proposal


def _answered(
    stream: Iterator[str], ended: Callable[[str], bool], on_text: Callable[[str], None] | None
) -> str:
    pieces: list[str] = []
    size = 0
    for piece in stream:
        pieces.append(piece)
        size += len(piece)
        if on_text is not None:
            on_text(piece)
        if size > MAX_ANSWER:
            raise InputError(f"the model wrote more than {MAX_ANSWER:,} characters; ask for a smaller change")
        if ended(piece):
            break
    if isinstance(stream, Generator):
        stream.close()  # gives the model's session or connection back now, not when memory is collected
    return "".join(pieces)
