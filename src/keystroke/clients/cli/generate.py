"""`keystroke generate`: continues a prompt, streaming the text to standard output.

With `--json` it prints one line per piece and one for the end. Ctrl-C stops with exit code 130.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import argument, invocation_of
from keystroke.errors import InputError


def generate(
    ctx: typer.Context,
    prompt: Annotated[str | None, argument("Text to continue. Default: standard input.")] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    model: options.Model = None,
    json: options.Json = False,
    local: options.Local = False,
) -> None:
    from keystroke.agent.chat.model import AnswerOptions
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.clients.cli.open_model import generation_params, open_model
    from keystroke.clients.cli.text_file import read_input

    run = invocation_of(ctx)
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            run.console.note("reading the prompt from standard input; end it with Ctrl-D")
        prompt = read_input()
    if not prompt.strip():
        raise InputError("the prompt is empty; give a text to continue")
    params = generation_params(
        run.settings, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop or ()
    )
    with open_model(model, run) as opened, interruptible() as interrupt:
        with opened.generate(prompt, AnswerOptions(params, interrupt=interrupt)) as answer:
            for piece in answer:
                if run.json:
                    run.console.json({"type": "text", "text": piece})
                else:
                    run.console.write(piece)
        report = answer.report()
    if run.json:
        run.console.json({"type": "end", **dataclasses.asdict(report)})
    else:
        run.console.line()
    if interrupt.is_set:
        raise KeyboardInterrupt
