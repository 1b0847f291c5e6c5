"""Pretraining on a GPU lease from the command line; needs only torch, numpy and tokenizers.

`keystroke train stretch` does the same inside the program. At the end, the loss on held-out shards and the
exact matches on cases, by language, go to the run's log.
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
from keystroke_lab.corpus.languages import language_of
from keystroke_lab.corpus.shards import read_shard, shard_paths
from keystroke_lab.pretraining.documents import PLAIN, token_windows
from keystroke_lab.pretraining.leased_run import LeasedRecipe, LeasedRun
from keystroke_lab.pretraining.mixture import MixturePlan
from keystroke_lab.tokenizer.code_tokenizer import load, plain
from keystroke_lab.training.transformer import CodeModel, Shape

if TYPE_CHECKING:
    from keystroke.text.cases import CompletionCase

_WINDOWS = 48  # of a language: enough to see a change of a hundredth of a nat
_CONTEXT = 512  # tokens around a cursor


def heldout_windows(folder: Path, tokenizer: Path, length: int) -> dict[str, NDArray[np.uint16]]:
    """Some windows of each language, the same whatever else is in the folder."""
    words = plain(load(tokenizer))
    found: dict[str, NDArray[np.uint16]] = {}
    for path in shard_paths(folder):
        language = path.name.partition("-")[0]
        if language not in found:
            sources = read_shard(path)
            some = sources[:: max(1, len(sources) // 150)]
            windows = token_windows(some, words, PLAIN, length, 0)[:_WINDOWS]
            if len(windows):
                found[language] = windows
    return found


def exact_matches(
    model: CodeModel, tokenizer: Path, cases: Sequence[CompletionCase], each: int
) -> dict[str, dict[str, Any]]:
    """Exact matches by language: `rest_em`, `line_em`; with the text below `fim_rest_em`, `fim_line_em`."""
    from keystroke.engine.fim import detect_fim
    from keystroke.engine.tokenizer import load_tokenizer
    from keystroke_lab.evaluation.batched import BatchedModel, score
    from keystroke_lab.pretraining.fim import FimCut

    words = load_tokenizer(tokenizer)
    asked = BatchedModel(model, words, detect_fim(words, tokenizer), frozenset({0}), context=_CONTEXT)
    rows: dict[str, dict[str, Any]] = {}
    for language in sorted({language_of(case.path) or "other" for case in cases}):
        mine = [case for case in cases if (language_of(case.path) or "other") == language]
        for name, kind in (("rest_em", FimCut.REST_OF_LINE), ("line_em", FimCut.LINE)):
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
    recipe: LeasedRecipe,
    heldout: Path | None,
    cases: Sequence[Path],
    device: str,
    workers: int,
    start: Path | None,
    each: int = 100,
) -> None:
    """Train and measure; the log has all of it."""
    going = LeasedRun(
        run,
        shape,
        recipe,
        MixturePlan.read(plan),
        tuple(data),
        tokenizer,
        device=device,
        workers=workers,
        start=start,
    )
    try:
        kept = heldout_windows(heldout, tokenizer, recipe.window + 1) if heldout is not None else None
        going.train(seconds=seconds, steps=steps, finish=finish, heldout=kept)
    finally:
        going.close()
    if cases:
        import torch

        from keystroke.text.cases import read_cases

        every = [case for path in cases for case in read_cases(path)]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            rows = exact_matches(going.model.eval(), tokenizer, every, each)
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
    parser = argparse.ArgumentParser(prog="python -m keystroke_lab.pretraining.leased", description=__doc__)
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
    given["shape"], given["recipe"] = Shape.from_json(given["shape"]), LeasedRecipe.from_json(given["recipe"])
    try:
        train(given.pop("plan"), given.pop("data"), given.pop("tokenizer"), given.pop("run"), **given)
    except KeystrokeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
