"""Pretraining until a deadline from the command line; needs only torch, numpy and tokenizers.

`keystroke train pretrain` does the same inside the program.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from keystroke.errors import KeystrokeError
from keystroke_lab.corpus.shards import read_shard
from keystroke_lab.pretraining.deadline_run import DeadlineRecipe, DeadlineRun
from keystroke_lab.pretraining.documents import PLAIN, token_windows
from keystroke_lab.pretraining.window_feed import WindowFeed
from keystroke_lab.tokenizer.code_tokenizer import load, plain
from keystroke_lab.training.transformer import Shape


def pretrain(
    data: Path,
    tokenizer: Path,
    run: Path,
    *,
    heldout: Path | None,
    minutes: float,
    shape: Shape,
    recipe: DeadlineRecipe,
    device: str,
    workers: int,
    start: Path | None = None,
    edits: Path | None = None,
) -> None:
    """Train until the deadline (or for the recipe's steps) and leave the weights in `run`."""
    run.mkdir(parents=True, exist_ok=True)
    if not recipe.steps and not (run / "deadline").exists():
        (run / "deadline").write_text(str(time.time() + 60 * minutes))
    length = shape.context + 1
    feed = WindowFeed(
        data,
        tokenizer,
        length=length,
        workers=workers,
        seed=recipe.seed,
        edits=edits,
        mix=recipe.main.mix,
    )
    try:
        feed.start()
        kept = None
        if heldout is not None:
            every = read_shard(heldout)
            sources = every[:: max(1, len(every) // 150)]
            kept = token_windows(sources, plain(load(tokenizer)), PLAIN, length, 0)[:128]
        trainer = DeadlineRun(
            run, shape, recipe, feed, device=device, compile_model=device == "cuda", start=start
        )
        trainer.train(kept)
    finally:
        feed.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keystroke_lab.pretraining", description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder of corpus pieces; may still be filling"
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True, help="folder of this run")
    parser.add_argument("--edits", type=Path, help="folder of pieces of edits; may still be filling")
    parser.add_argument("--heldout", type=Path, help="a piece that is never trained on")
    parser.add_argument("--start", type=Path, help="weights of an earlier run to begin from")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--shape", default="{}", help="JSON of what differs from the default shape")
    parser.add_argument("--recipe", default="{}", help="JSON of what differs from the default recipe")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    given = parser.parse_args(arguments)
    try:
        pretrain(
            given.data,
            given.tokenizer,
            given.run,
            heldout=given.heldout,
            minutes=given.minutes,
            shape=Shape.from_json(given.shape),
            recipe=DeadlineRecipe.from_json(
                given.recipe, steps=given.steps, batch=given.batch, micro_batch=given.micro_batch
            ),
            device=given.device,
            workers=given.workers,
            start=given.start,
            edits=given.edits,
        )
    except KeystrokeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
