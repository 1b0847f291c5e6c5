"""A run in stretches from the command line of a bare machine: torch, numpy and tokenizers are what it needs.

Flags in, a run folder out. `keystroke train stretch` is the same with the program's own manners. What is
measured at the end, the loss on held-out pieces and the cases completed, by language, goes to the run's log.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from keystroke.errors import KeystrokeError
from keystroke.train.corpus.languages import language_of
from keystroke.train.documents import PLAIN, token_windows
from keystroke.train.mixture import Plan
from keystroke.train.pieces import piece_paths, read_piece
from keystroke.train.stretches import Recipe, StretchRun
from keystroke.train.tokenizer import load, plain
from keystroke.train.transformer import CodeModel, Shape

if TYPE_CHECKING:
    from keystroke.train.cases import Case

_WINDOWS = 48  # of a language: enough to see a change of a hundredth of a nat
_CONTEXT = 512  # tokens around a cursor


def held_out(folder: Path, tokenizer: Path, length: int) -> dict[str, NDArray[np.uint16]]:
    """Some windows of each language, the same whatever else is in the folder."""
    words = plain(load(tokenizer))
    found: dict[str, NDArray[np.uint16]] = {}
    for path in piece_paths(folder):
        language = path.name.partition("-")[0]
        if language not in found:
            sources = read_piece(path)
            some = sources[:: max(1, len(sources) // 150)]
            windows = token_windows(some, words, PLAIN, length, 0)[:_WINDOWS]
            if len(windows):
                found[language] = windows
    return found


def completed(
    model: CodeModel, tokenizer: Path, cases: Sequence[Case], each: int
) -> dict[str, dict[str, Any]]:
    """Exact matches by language: `rest_em`, `line_em`; with the text below `fim_rest_em`, `fim_line_em`."""
    from keystroke.engine.fim import detect_fim
    from keystroke.engine.tokenizer import load_tokenizer
    from keystroke.train.batched import Plain, score
    from keystroke.train.fim import Cut

    words = load_tokenizer(tokenizer)
    asked = Plain(model, words, detect_fim(words, tokenizer), frozenset({0}), context=_CONTEXT)
    rows: dict[str, dict[str, Any]] = {}
    for language in sorted({language_of(case.path) or "other" for case in cases}):
        mine = [case for case in cases if (language_of(case.path) or "other") == language]
        for name, kind in (("rest_em", Cut.REST_OF_LINE), ("line_em", Cut.LINE)):
            some = [case for case in mine if case.kind == kind][:each]
            for prefix, fill in (("", False), ("fim_", True)):
                if some:
                    exact = score(asked, some, fill=fill).exact
                    row = rows.setdefault(language, {})
                    row[prefix + name] = round(exact.hits / exact.of, 4)
                    row[f"{name}_of"] = exact.of
    return rows


def train(
    plan: Path,
    data: Sequence[Path],
    tokenizer: Path,
    run: Path,
    *,
    seconds: float,
    steps: int,
    finish: int,
    shape: Shape,
    recipe: Recipe,
    heldout: Path | None,
    cases: Sequence[Path],
    device: str,
    workers: int,
    start: Path | None,
    each: int = 100,
) -> None:
    """Train and measure; the log has all of it."""
    going = StretchRun(
        run,
        shape,
        recipe,
        Plan.read(plan),
        tuple(data),
        tokenizer,
        device=device,
        workers=workers,
        start=start,
    )
    try:
        kept = held_out(heldout, tokenizer, recipe.window + 1) if heldout is not None else None
        going.train(seconds=seconds, steps=steps, finish=finish, heldout=kept)
    finally:
        going.close()
    if cases:
        import torch

        from keystroke.train.cases import read_cases

        every = [case for path in cases for case in read_cases(path)]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            rows = completed(going.model.eval(), tokenizer, every, each)
        with (run / "log.jsonl").open("a") as stream:
            for language, row in rows.items():
                said = {
                    "step": going.progress.step,
                    "tokens": going.progress.tokens,
                    "language": language,
                    **row,
                }
                stream.write(json.dumps(said) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keystroke.train.lent", description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument(
        "--data", type=Path, action="append", required=True, help="folder of pieces; may be filling"
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder of this run")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--finish", type=int, default=0, help="decay over so many steps and end")
    parser.add_argument("--shape", default="{}", help="JSON of what differs from the default shape")
    parser.add_argument("--recipe", default="{}", help="JSON of what differs from the default recipe")
    parser.add_argument("--heldout", type=Path, help="folder of pieces that are never trained on")
    parser.add_argument(
        "--cases", type=Path, action="append", default=[], help="cases to complete at the end"
    )
    parser.add_argument("--each", type=int, default=100, help="cases of a kind and language")
    parser.add_argument("--start", type=Path, help="weights of an earlier run to begin from")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=13)
    given = vars(parser.parse_args(arguments))
    given["shape"], given["recipe"] = Shape.from_json(given["shape"]), Recipe.from_json(given["recipe"])
    try:
        train(given.pop("plan"), given.pop("data"), given.pop("tokenizer"), given.pop("run"), **given)
    except KeystrokeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
