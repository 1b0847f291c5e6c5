"""`keystroke demo`: completes a few snippets with the embedded model and shows the time each takes."""

from __future__ import annotations

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import invocation_of

SNIPPETS = (
    'def greet(name: str) -> str:\n    """Return a friendly greeting."""\n    return ',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        ",
    'import json\n\nwith open("settings.json") as file:\n    settings = ',
)


def demo(ctx: typer.Context, model: options.Model = None, local: options.Local = False) -> None:
    from keystroke.agent.chat.model import AnswerOptions
    from keystroke.clients.cli.console import GREEN
    from keystroke.clients.cli.interruption import interruptible
    from keystroke.clients.cli.open_model import generation_params, open_model

    run = invocation_of(ctx)
    params = generation_params(run.settings, max_tokens=48, temperature=0.0)
    if not _has_compiler():
        run.console.note(
            "there is no C compiler (cc, gcc or clang), so the portable kernels are used: the same text, "
            "but slower; install one and start again for about twice the speed"
        )
    with open_model(model, run) as opened:
        run.console.note(f"{opened.name} completes what stands before the arrow:\n")
        for snippet in SNIPPETS:
            with interruptible() as interrupt:
                text, report = opened.complete(
                    snippet, "", AnswerOptions(params, interrupt=interrupt), lines=0, budget=512
                )
            if interrupt.is_set:
                raise KeyboardInterrupt
            run.console.write(snippet)
            run.console.line(f"→{text}", GREEN)
            cost = f"{report.tokens} tokens in {report.seconds * 1000:.0f} ms"
            run.console.note(f"\n{cost}, {report.tokens_per_second:.0f} a second\n")
    run.console.note("Next: `keystroke setup` (models, your editor)  `keystroke play`  `keystroke --help`")


def _has_compiler() -> bool:
    import platform
    import shutil

    return platform.system() == "Windows" or any(map(shutil.which, ("cc", "gcc", "clang")))
