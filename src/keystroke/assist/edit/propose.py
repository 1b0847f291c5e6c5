"""Drives the steps of an edit with a blocking writer.

An answer becomes a complete proposal or named failures. Model output is parsed and compared, never run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

from keystroke.assist.edit.steps import Exists, edit_steps
from keystroke.assist.edit.task import EditProposal, EditTask
from keystroke.assist.edit.writer import Writer
from keystroke.errors import InputError

MAX_ANSWER = 4 << 20  # characters


def propose_edit(
    task: EditTask,
    writer: Writer,
    *,
    blocks: bool = False,
    retries: int = 1,
    on_text: Callable[[str], None] | None = None,
    exists: Exists = lambda path: False,
) -> EditProposal:
    """Let a model perform a task. `blocks`: it writes search/replace blocks well. `exists` tells which paths
    beyond the task's files exist. Raises InputError for an endless answer, and what the writer raises."""
    steps = edit_steps(task, blocks=blocks, retries=retries, exists=exists)
    try:
        question = next(steps)
        while True:
            stream = writer.write(question.messages, question.prediction or None)
            question = steps.send(_answered(stream, question.end_detector(), on_text))
    except StopIteration as stop:
        proposal = stop.value
        assert isinstance(proposal, EditProposal)
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
        stream.close()  # releases the model's session or connection now
    return "".join(pieces)
