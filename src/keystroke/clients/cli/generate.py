"""`keystroke generate`: a prompt goes on, streamed.

Standard output carries the text as it comes; with `--json`, one line for each piece and one for the
end. Ctrl-C keeps what came and leaves with 130.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.invocation import invocation_of
from keystroke.errors import InputError


def generate(
    ctx: typer.Context,
    prompt: Annotated[
        str | None, typer.Argument(help="Text to go on from; standard input if left out.")
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    model: options.Model = None,
    json: options.Json = False,
) -> None:
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.clients.cli.speaker import open_speaker, params
    from keystroke.clients.cli.text_file import read_input

    run = invocation_of(ctx)
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            run.console.note("reading the prompt; end it with Ctrl-D")
        prompt = read_input()
    if not prompt.strip():
        raise InputError("the prompt is empty; write something to go on from")
    chosen = params(run.settings, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop or ())
    as_json = run.wants_json(json)
    with open_speaker(model, run) as speaker, interruptible() as interrupt:
        answer = speaker.generate(prompt, chosen, interrupt)
        for piece in answer:
            if as_json:
                run.console.json({"type": "text", "text": piece})
            else:
                run.console.write(piece)
        report = answer.report()
    if as_json:
        run.console.json({"type": "end", **dataclasses.asdict(report)})
    else:
        run.console.line()
    if interrupt.is_set:
        raise KeyboardInterrupt
