"""What the model card shows of a run: its loss as a picture, and completions nobody selected.

Drawn from the run's own log and from a seed. Plain SVG and Markdown; nothing is measured here.
"""

from __future__ import annotations

import difflib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from keystroke.analysis.syntax import language_of
from keystroke.errors import InputError
from keystroke.train.cases import Case
from keystroke.train.edit_cases import EditCase, Judge
from keystroke.train.evaluate import Suggester
from keystroke.train.fim import Cut

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 360, 56, 40, 16
_COLOURS = {"loss": "#4269d0", "heldout": "#ff725c"}
_LABELS = {"loss": "training batch", "heldout": "held-out projects"}


def loss_points(log: Path) -> dict[str, list[tuple[float, float]]]:
    """(millions of tokens, nats per token) of the training batches and of the held-out windows. A run in
    stretches has a row for each held-out language: they count together, each as much as another."""
    points: dict[str, list[tuple[float, float]]] = {"loss": [], "heldout": []}
    languages: dict[float, list[float]] = {}
    try:
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"{log} is not the log of a run ({error})") from error
    for row in rows:
        if row.get("heldout") is True:
            languages.setdefault(row["tokens"] / 1e6, []).append(row["loss"])
            continue
        for key, found in points.items():
            if key in row:
                found.append((row["tokens"] / 1e6, row[key]))
    points["heldout"] += [(at, fmean(losses)) for at, losses in languages.items()]
    return points


def loss_plot(log: Path) -> str:
    """The run's loss as an SVG picture."""
    points = loss_points(log)
    flat = [p for series in points.values() for p in series]
    if not flat:
        raise InputError(f"{log} holds no losses yet")
    right = max(x for x, _ in flat)
    low, high = min(y for _, y in flat), min(6.0, max(y for _, y in flat))
    low, high = int(low * 2) / 2, int(high * 2 + 1) / 2

    def place(x: float, y: float) -> str:
        across = _LEFT + x / right * (_WIDTH - _LEFT - 12)
        down = _TOP + (high - min(y, high)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for i in range(int((high - low) * 2) + 1):
        value = low + i / 2
        x, y = place(0, value).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{_WIDTH - 12}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    for i in range(6):
        x = place(right * i / 5, low).split(",")[0]
        parts.append(f'<text x="{x}" y="{_HEIGHT - 20}" text-anchor="middle">{right * i / 5:.0f}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">million tokens</text>')
    for n, (key, series) in enumerate(points.items()):
        line = " ".join(place(x, y) for x, y in (series * 2 if len(series) == 1 else series))
        look = f'fill="none" stroke="{_COLOURS[key]}" stroke-width="2" stroke-linecap="round"'
        parts.append(f'<polyline points="{line}" {look}/>')
        side, row = _WIDTH - 180, 30 + 18 * n
        parts.append(f'<rect x="{side}" y="{row - 9}" width="12" height="3" fill="{_COLOURS[key]}"/>')
        parts.append(f'<text x="{side + 18}" y="{row - 3}">{_LABELS[key]}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def samples(suggester: Suggester, cases: Sequence[Case], count: int = 20, seed: int = 0) -> str:
    """`count` completions of cases drawn by `seed`, right or wrong, as Markdown."""
    drawn = random.Random(seed).sample(list(cases), min(count, len(cases)))
    out = []
    for number, case in enumerate(drawn, start=1):
        language = language_of(case.path) or ""
        ask = suggester.block if case.kind == Cut.BLOCK else suggester.line
        answer = ask(case.prefix, case.suffix if suggester.fills else None).text.rstrip()
        right = answer == case.middle.rstrip()
        before = "\n".join(case.prefix.split("\n")[-4:])
        kind = case.kind.replace("_", " ")
        out.append(
            f"**{number}. {kind}**, {case.project} {case.version} ({case.licence}), `{case.path}`: "
            f"{'exact' if right else 'not exact'}\n\n"
            f"~~~{language}\n{before}⟦{answer}⟧\n~~~\n"
            + ("" if right else f"\nthe file has\n\n~~~{language}\n{case.middle.rstrip()}\n~~~\n")
        )
    return "\n".join(out)


def edit_samples(judge: Judge, cases: Sequence[EditCase], count: int = 8, seed: int = 0) -> str:
    """`count` next edits of cases drawn by `seed`, right or wrong, as Markdown."""
    drawn = random.Random(seed).sample(list(cases), min(count, len(cases)))
    out = []
    for number, case in enumerate(drawn, start=1):
        chances = judge.chances(case)
        best = max(range(len(chances)), key=chances.__getitem__)
        last = case.history[-1]
        shown = [f"**{number}.** {case.project} ({case.licence}), `{case.path}`; the last change was"]
        shown.append(_difference(last.before.splitlines(), last.after.splitlines()))
        if case.right is None:
            verdict = "nothing was left to do"
        else:
            verdict = "the right place" if best == case.right else "not the place that changed"
        shown.append(f"likeliest place to change: {chances[best]:.2f}, {verdict}.")
        if case.right is not None:
            place = case.places[case.right]
            old = case.lines[place.first : place.last]
            said = judge.rewrite(case, case.right)
            exact = said is not None and tuple(said) == case.answer
            shown.append(f"Asked about the place that changed, it says ({'exact' if exact else 'not exact'})")
            shown.append(_difference(old, said if said is not None else old) or "(no change)")
            if not exact:
                shown += ["the file has", _difference(old, case.answer or ())]
        out.append("\n\n".join(shown))
    return "\n\n".join(out) + "\n"


def _difference(old: Sequence[str], new: Sequence[str]) -> str:
    """Both as a diff without its heads."""
    lines = list(difflib.unified_diff(list(old), list(new), lineterm="", n=1))[2:]
    body = "\n".join(line for line in lines if not line.startswith("@@"))
    return f"~~~diff\n{body}\n~~~" if body else ""
