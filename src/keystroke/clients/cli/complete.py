"""`keystroke complete`: completes code at a cursor.

Only the completion is written to standard output; with `--apply` it is written into the file atomically
instead. A completion that an editor would not show is withheld, unless `--all` is given.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import argument, invocation_of, option
from keystroke.errors import InputError, Interrupted, UsageError


def complete(
    ctx: typer.Context,
    place: Annotated[
        str, argument("Where the cursor is; - reads standard input.", metavar="FILE[:LINE[:COLUMN]]")
    ],
    suffix: Annotated[str, option("Text after the cursor, when reading standard input.")] = "",
    lines: Annotated[int, option("Complete at most this many lines; 0 means a block.", min=0)] = 0,
    apply: Annotated[bool, option("--apply", "Write the completion into the file.")] = False,
    context: Annotated[int, option("Tokens around the cursor that the model sees.", min=16)] = 1024,
    max_tokens: Annotated[int, option("Maximum length of the completion in tokens.", min=1)] = 128,
    everything: Annotated[
        bool, option("--all", "Show the completion even if the model is not sure.")
    ] = False,
    model: options.Model = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    json: options.Json = False,
    local: options.Local = False,
) -> None:
    from keystroke.agent.chat.model import AnswerOptions
    from keystroke.analysis.syntax import language_of
    from keystroke.assist.completion.gate import THRESHOLDS
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.clients.cli.open_model import generation_params, open_model
    from keystroke.clients.cli.text_file import FilePosition, TextFile, read_input

    run = invocation_of(ctx)
    source = None
    offset = 0
    where = FilePosition.parse(place)
    if place == "-":
        if apply:
            raise UsageError("--apply needs a file; standard input cannot be written back")
        before, after = read_input().replace("\r\n", "\n"), suffix
    else:
        if suffix:
            raise UsageError("--suffix goes with standard input; a file has its own text after the cursor")
        source = TextFile.read(where.path)
        offset = source.offset(where)
        before, after = source.text[:offset], source.text[offset:]
    if not before.strip() and not after.strip():
        raise InputError(
            f"{'standard input' if place == '-' else where.path} is empty; write a line to complete first"
        )
    params = generation_params(run.settings, max_tokens=max_tokens, temperature=temperature, seed=seed)
    with open_model(model, run) as opened, interruptible() as interrupt:
        if source is not None:
            opened.check_language(language_of(str(where.path)))
        answer_options = AnswerOptions(params, interrupt=interrupt)
        text, report = opened.complete(before, after, answer_options, lines=lines, budget=context)
    if interrupt.is_set:
        raise Interrupted("stopped; nothing was written") if apply else KeyboardInterrupt
    confidence = report.confidence
    sure = confidence is None or confidence >= THRESHOLDS[run.settings.assist.eagerness]
    shown = bool(text) and (sure or everything)
    if apply and source is not None and shown:
        source.insert(offset, text)
        run.console.note(f"{where.path}: {len(text)} characters added")
    if run.json:
        answer = {"completion": text, "applied": apply and shown, "sure": sure}
        run.console.json({**answer, **dataclasses.asdict(report)})
        return
    if not apply and (shown or not text):
        run.console.line(text)
    if not text:
        run.console.note("the model has no completion here")
    elif not sure and not everything:
        run.console.note(
            f"not sure ({_percent(confidence)}), so nothing is {'written' if apply else 'shown'}; "
            f"--all {'writes' if apply else 'shows'} it"
        )
    elif confidence is not None and not apply:
        run.console.note(f"{_percent(confidence)} sure")


def _percent(confidence: float | None) -> str:
    return f"{(confidence or 0.0) * 100:.0f} %"
