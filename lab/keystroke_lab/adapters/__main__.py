"""Trains and evaluates an adapter on a machine with only torch, numpy and tokenizers.

Reads and writes token files. `train` trains for a number of seconds, `answer` lets the base answer prepared
questions with and without the adapter, `scale` writes it stronger or weaker. `bench/adapter.py` prepares the
questions and scores the answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keystroke.engine.adapter import AdapterFile, read_adapter, write_adapter
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.errors import KeystrokeError
from keystroke_lab.adapters.evaluation import generate, predict_edits
from keystroke_lab.adapters.lora import with_strength
from keystroke_lab.adapters.training import AdapterRecipe, train_adapter
from keystroke_lab.draft_heads.target import TargetModel
from keystroke_lab.draft_heads.texts import TokenText, read_texts, write_texts

LONGEST = {"next": 384, "mbpp": 512}  # tokens of an answer, by kind of question
_LONGEST = 64


def answer(
    target: TargetModel,
    adapter: AdapterFile | None,
    questions: Sequence[TokenText],
    heldout: Sequence[TokenText],
    out: Path,
    *,
    strengths: Sequence[float],
    numbers: Sequence[int],
    ends: frozenset[int],
    most: int = max(LONGEST.values()),
) -> None:
    """Have `questions` answered once for each strength (0: the base alone). Questions of the kind `next` are
    examples, whose first answer token chooses a place; of `heldout` ones only that choice is asked. Writes
    `answers-S.npz` (texts; the seed says which question) and `choices-S.npz` into `out`."""
    room = {kind: min(most, LONGEST.get(kind, _LONGEST)) for kind in {"next", *(t.kind for t in questions)}}
    cases = [(i, text) for i, text in enumerate(questions) if text.kind == "next"]
    for strength in strengths:
        began = time.monotonic()
        with with_strength(target, adapter, strength):
            found = predict_edits(
                target, [text for _, text in cases], numbers, longest=room["next"], ends=ends
            )
            apart = predict_edits(target, heldout, numbers, longest=room["next"], ends=ends, write=False)
            said = []
            for kind, tokens in (("right", found.right), ("best", found.best)):
                said += [
                    TokenText(t, 0, kind, strength, i)
                    for (i, _), t in zip(cases, tokens, strict=True)
                    if len(t)
                ]
            for kind in sorted({text.kind for text in questions} - {"next"}):
                some = [(i, text) for i, text in enumerate(questions) if text.kind == kind]
                prompts = [text.tokens[: text.given].tolist() for _, text in some]
                answers = generate(target, prompts, longest=room[kind], ends=ends)
                said += [TokenText(t, 0, kind, strength, i) for (i, _), t in zip(some, answers, strict=True)]
        out.mkdir(parents=True, exist_ok=True)
        write_texts(out / f"answers-{strength:g}.npz", said)
        np.savez_compressed(out / f"choices-{strength:g}.npz", cases=found.chances, heldout=apart.chances)
        _tell({"strength": strength, "seconds": round(time.monotonic() - began, 1)})


def scale(adapter: Path, strength: float, out: Path) -> int:
    """Write an adapter that does `strength` times as much; its size in bytes."""
    held = read_adapter(adapter)
    facts = {**held.facts, "strength": f"{held.strength * strength:g}"}
    return write_adapter(out, replace(held.shape, scale=strength), held.pairs, facts)


def _tell(row: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def load(model: Path, device: str, length: int) -> TargetModel:
    place = torch.device(device)
    with open_checkpoint(model) as checkpoint:
        dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
        return TargetModel.load(checkpoint, place, dtype, length)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keystroke_lab.adapters", description=__doc__)
    parser.add_argument("--model", type=Path, help="the base: a GGUF file or a folder")
    parser.add_argument("--device", default="cuda")
    steps = parser.add_subparsers(dest="step", required=True)
    train = steps.add_parser("train")
    train.add_argument("--examples", "--lessons", type=Path, action="append", required=True)
    train.add_argument("--run", type=Path, required=True)
    train.add_argument("--facts", type=Path, required=True, help="the manifest that was written with them")
    train.add_argument("--seconds", type=float, default=600.0)
    train.add_argument("--passes", type=float, default=2.0)
    train.add_argument("--rank", type=int, default=16)
    train.add_argument("--rate", type=float, default=AdapterRecipe().rate)
    train.add_argument("--keep", type=float, default=AdapterRecipe().keep)
    train.add_argument("--batch", type=int, default=AdapterRecipe().batch)
    train.add_argument("--begin", type=Path, help="an adapter to continue from, with other examples")
    train.add_argument("--plain", action="store_true", help="do not compile")
    asked = steps.add_parser("answer")
    asked.add_argument("--adapter", type=Path)
    asked.add_argument("--questions", type=Path, required=True)
    asked.add_argument("--heldout", type=Path, help="held-out examples, for the threshold")
    asked.add_argument("--strength", type=float, action="append", help="may be repeated; 0 is the base")
    asked.add_argument("--most", type=int, default=max(LONGEST.values()), help="tokens of an answer")
    asked.add_argument("--out", type=Path, required=True)
    scaled = steps.add_parser("scale")
    scaled.add_argument("--adapter", type=Path, required=True)
    scaled.add_argument("--strength", type=float, required=True)
    scaled.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    try:
        if given.step == "scale":
            _tell({"bytes": scale(given.adapter, given.strength, given.out)})
            return 0
        if given.model is None:
            parser.error("--model names the base")
        if given.step == "train":
            recipe = AdapterRecipe(
                passes=given.passes, seconds=given.seconds, rate=given.rate, keep=given.keep,
                batch=given.batch, checkpoint_seconds=60.0,
            )  # fmt: skip
            learned = json.loads(given.facts.read_text())["learned"]
            made = train_adapter(
                given.model, given.examples, given.run, recipe, given.rank, given.device, learned,
                begin=given.begin, compiled=False if given.plain else None,
            )  # fmt: skip
            _tell(made)
            return 0
        questions = read_texts(given.questions)
        heldout = read_texts(given.heldout) if given.heldout else []
        longest = max(len(text.tokens) for text in (*questions, *heldout)) + max(LONGEST.values())
        facts = json.loads(given.questions.with_suffix(".json").read_text())
        answer(
            load(given.model, given.device, longest),
            read_adapter(given.adapter) if given.adapter else None,
            questions,
            heldout,
            given.out,
            strengths=given.strength or [1.0],
            numbers=facts["numbers"],
            ends=frozenset(facts["ends"]),
            most=given.most,
        )
    except KeystrokeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
