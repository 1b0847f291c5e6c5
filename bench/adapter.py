"""The gain of an adapter on next edits and fill-in, and its cost on MBPP+, in batches on one device.

Regime: `prepare` makes questions of the 300 moments of `bench/data/edits.jsonl.xz`, of MBPP+ (all tasks, one
greedy answer, the fence already written) and of late Python code to fill in (150 places of each kind, 192
tokens above and 64 below, in both orders). `python -m keystroke_lab.adapters answer` has them answered
where the GPU is, tokens only, by the base and by the adapter at several strengths. `score` reads the answers
here: `place`, `text_em` and `quiet` as `bench/next_edit.py` has them, at the threshold that is quiet in nine
of ten held-out moments; `mbpp` as `bench/agent.py`; `fim_rest_em` and `fim_line_em` suffix first,
`psm_...` prefix first. Ceiling of `text_em`: in 47 % of the moments every word of the answer is shown at all,
in 33.5 % it is and the answer has at most 40 tokens.

    python -m bench.adapter prepare --model coder --mbpp MbppPlus.jsonl --out FOLDER
    python -m keystroke_lab.adapters --model coder.gguf answer --questions FOLDER/questions.npz \\
        --heldout examples-heldout.npz --adapter adapter.safetensors --strength 0 --strength 1 --out FOLDER
    python -m bench.adapter score --model coder --mbpp MbppPlus.jsonl --heldout examples-heldout.npz \\
        --out FOLDER
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.record import record
from keystroke.agent.evaluation.function_sets import function_tasks
from keystroke.agent.evaluation.functions import OPEN, messages, score
from keystroke.agent.evaluation.tasks import FunctionTask
from keystroke.agent.sandbox import Sandbox, SandboxKind, find_sandbox
from keystroke.config import load_settings
from keystroke.engine.locate import resolve
from keystroke.text.cases import CompletionCase, read_cases
from keystroke_lab.adapters.dataset import forms_of
from keystroke_lab.adapters.examples import PromptForms, next_edit_example
from keystroke_lab.draft_heads.texts import TokenText, read_texts, write_texts
from keystroke_lab.evaluation.completion import Share
from keystroke_lab.evaluation.edit_cases import EditCase, read_edit_cases
from keystroke_lab.pretraining.fim import FimCut

DATA = Path(__file__).parent / "data"
FILLED = {"rest": FimCut.REST_OF_LINE, "line": FimCut.LINE}
PLACES, ABOVE, BELOW = 150, 192, 64
QUIET = 0.9  # of held-out moments with nothing left to do: what the threshold is chosen for


def filled_in() -> list[tuple[str, CompletionCase]]:
    """Late Python code, by kind and order."""
    cases = read_cases(DATA / "completion.jsonl.xz")
    return [
        (f"{order}_{name}", case)
        for order in ("spm", "psm")
        for name, kind in FILLED.items()
        for case in [case for case in cases if case.kind == kind][:PLACES]
    ]


def questions(forms: PromptForms, tasks: Sequence[FunctionTask]) -> list[TokenText]:
    """Every question, in an order that `scored` knows."""
    encode = forms.tokenizer.encode
    found = [
        replace(next_edit_example(case, forms.places), kind="next")
        for case in read_edit_cases(DATA / "edits.jsonl.xz")
    ]
    for task in tasks:
        prompt = [*forms.chat(messages(task)), *encode(OPEN)]
        found.append(TokenText(np.array(prompt, np.int32), len(prompt), "mbpp"))
    for kind, case in filled_in():
        above, below = list(encode(case.prefix))[-ABOVE:], list(encode(case.suffix))[:BELOW]
        form = replace(forms.fim, order="spm" if kind.startswith("spm") else "psm")
        prompt = form.assemble(forms.tokenizer, above, below)
        found.append(TokenText(np.array(prompt, np.int32), len(prompt), kind))
    return found


def prepare(forms: PromptForms, tasks: Sequence[FunctionTask], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    made = questions(forms, tasks)
    write_texts(out / "questions.npz", made)
    ends = [forms.end, forms.tokenizer.special("<|endoftext|>")]
    facts = {"numbers": forms.places.marks.numbers, "ends": [end for end in ends if end is not None]}
    (out / "questions.json").write_text(json.dumps(facts) + "\n")
    print(json.dumps({"questions": len(made), "tokens": sum(len(text.tokens) for text in made)}))


def threshold(chances: NDArray[np.float32], examples: Sequence[TokenText], silence: int) -> float:
    """The least chance of the best place at which `QUIET` of the examples without an edit left stay quiet."""
    best = [
        float(row[1:].max())
        for row, text in zip(chances, examples, strict=True)
        if int(text.tokens[text.given]) == silence
    ]
    return round(float(np.quantile(best, QUIET)) if best else 0.65, 3)


def edits_scored(
    forms: PromptForms,
    cases: Sequence[EditCase],
    chances: NDArray[np.float32],
    said: dict[tuple[str, int], list[int]],
    sure: float,
) -> dict[str, Any]:
    counts = dict.fromkeys(("place", "text_em", "offered", "offered_right", "both", "alarms"), 0)
    for i, case in enumerate(cases):
        prompt = forms.places.build(case.history, case.path, case.lines, case.places, case.cursor)
        best = int(chances[i, 1 : len(prompt.places) + 1].argmax())
        offered = (
            float(chances[i, 1 + best]) >= sure and _lines(forms, prompt, said.get(("best", i))) is not None
        )
        counts["offered"] += offered
        if case.right is None:
            counts["alarms"] += offered
            continue
        hit = prompt.places[best] == case.places[case.right]
        written = _lines(forms, prompt, said.get(("right", i)))
        exact = written is not None and written == case.answer
        counts["place"] += hit
        counts["text_em"] += exact
        counts["offered_right"] += hit and offered
        counts["both"] += hit and offered and exact
    n = sum(case.right is not None for case in cases)
    quiet = len(cases) - n
    row: dict[str, Any] = {"sure": sure}
    for key, share in (
        ("place", Share(counts["place"], n)),
        ("text_em", Share(counts["text_em"], n)),
        ("quiet", Share(quiet - counts["alarms"], quiet)),
        ("offered_right", Share(counts["offered_right"], counts["offered"])),
        ("both", Share(counts["both"], n)),
    ):
        row |= share.row(key)
    return row


def _lines(forms: PromptForms, prompt: Any, tokens: Sequence[int] | None) -> tuple[str, ...] | None:
    """What an answer makes of its place; None where that is nothing, or nothing new."""
    if tokens is None:
        return None
    try:
        answer = forms.places.parse(prompt, tokens)
    except ValueError:
        return None
    return None if answer is None or answer.lines == prompt.lines[answer.place] else tuple(answer.lines)


def scored(
    forms: PromptForms,
    tasks: Sequence[FunctionTask],
    folder: Path,
    heldout: Sequence[TokenText],
    sandbox: Sandbox,
) -> dict[str, Any]:
    cases = read_edit_cases(DATA / "edits.jsonl.xz")
    places = filled_in()
    results: dict[str, Any] = {}
    for path in sorted(folder.glob("answers-*.npz")):
        strength = path.stem.removeprefix("answers-")
        said = {(text.kind, text.seed): text.tokens.tolist() for text in read_texts(path)}
        with np.load(path.with_name(f"choices-{strength}.npz")) as held:
            chances, apart = held["cases"], held["heldout"]
        sure = threshold(apart, heldout, forms.places.marks.numbers[0])
        row = edits_scored(forms, cases, chances, said, sure)
        first = len(cases)
        answers = [_text(forms, said["mbpp", first + i]) for i in range(len(tasks))]
        with ThreadPoolExecutor(2) as pool:
            passed = sum(ok for ok, _ in pool.map(functools.partial(score, sandbox), tasks, answers))
        if tasks:
            row |= Share(passed, len(tasks)).row("mbpp")
        first += len(tasks)
        for kind in dict.fromkeys(kind for kind, _ in places):
            hits = [
                _line(forms, said[(kind, first + i)]) == case.middle.rstrip()
                for i, (other, case) in enumerate(places)
                if other == kind
            ]
            order, name = kind.split("_")
            key = f"{'fim' if order == 'spm' else 'psm'}_{name}_em"
            row |= Share(sum(hits), len(hits)).row(key)
        results[strength] = row
    return results


def _text(forms: PromptForms, tokens: Sequence[int]) -> str:
    ends = {forms.end, forms.tokenizer.special("<|endoftext|>")}
    return forms.tokenizer.decode([token for token in tokens if token not in ends])


def _line(forms: PromptForms, tokens: Sequence[int]) -> str:
    return _text(forms, tokens).split("\n")[0].rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("step", choices=("prepare", "score"))
    parser.add_argument("--model", default="coder", help="the base, by name or path")
    parser.add_argument("--mbpp", type=Path, help="MBPP+ as published; left out where it is not given")
    parser.add_argument("--heldout", type=Path, help="held-out examples, for the threshold")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--unconfined", action="store_true", help="run answers without a sandbox")
    given = parser.parse_args()
    forms = forms_of(resolve(given.model, load_settings({}, Path.cwd())))
    tasks = (function_tasks(given.mbpp) or []) if given.mbpp else []
    if given.step == "prepare":
        prepare(forms, tasks, given.out)
        return 0
    sandbox = Sandbox(SandboxKind.NONE) if given.unconfined else find_sandbox()
    if tasks and not sandbox.confines and not given.unconfined:
        sys.exit("no sandbox holds here; on a machine that is thrown away afterwards say --unconfined")
    results = scored(forms, tasks, given.out, read_texts(given.heldout) if given.heldout else [], sandbox)
    columns = (
        "place",
        "text_em",
        "quiet",
        "both",
        "mbpp",
        "fim_rest_em",
        "fim_line_em",
        "psm_rest_em",
        "psm_line_em",
    )
    print("strength", *(f"{column:>12}" for column in columns))
    for strength, row in results.items():
        print(f"{strength:<8}", *(f"{row.get(column, float('nan')):>12.3f}" for column in columns))
    record("adapter", {"bench": "adapter", "strengths": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
