"""Exactness against milliseconds, as an SVG: one point and interval per model, time on a log scale.

Written without a plotting library, so a figure can be made wherever a benchmark runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 56
_LETTER, _LINE = 7.5, 16.0  # how wide a letter of a label is at most, and how high a line
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d")


@dataclass(frozen=True, slots=True)
class Point:
    label: str
    ms: float
    share: float
    low: float
    high: float


def plot(points: Sequence[Point], title: str) -> str:
    """The whole document. Points without a time or with none of it are left out by the caller."""
    times = [point.ms for point in points] or [1.0]
    least, most = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times) * 1.001))
    most = max(most, least + 1)
    top = min(1.0, max([0.1, *(math.ceil(point.high * 10) / 10 for point in points)]))

    def x(ms: float) -> float:
        return LEFT + (math.log10(ms) - least) / (most - least) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - share / top * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13" role="img" aria-label="{escape(title, quote=True)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="16" fill="#111827">{escape(title)}</text>',
    ]
    for decade in range(least, most + 1):
        at = x(10.0**decade)
        parts.append(
            f'<line x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{HEIGHT - BOTTOM}" stroke="#e5e7eb"/>'
        )
        parts.append(
            f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle" fill="#374151">'
            f"{10.0**decade:g} ms</text>"
        )
    for step in range(round(top * 10) + 1):
        at = y(step / 10)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" stroke="#e5e7eb"/>')
        parts.append(
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#374151">{step * 10} %</text>'
        )
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 12}" text-anchor="middle" fill="#374151">'
        "median time of an answer, nothing warm</text>"
    )
    written: list[tuple[float, float, float]] = []  # left and right edge of a label, and its line
    for number, point in enumerate(points):
        colour, at = _COLOURS[number % len(_COLOURS)], x(point.ms)
        parts.append(
            f'<line x1="{at:.1f}" y1="{y(point.low):.1f}" x2="{at:.1f}" y2="{y(min(point.high, top)):.1f}" '
            f'stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<circle cx="{at:.1f}" cy="{y(point.share):.1f}" r="5" fill="{colour}"/>')
        anchor, shift = ("end", -10) if at > WIDTH * 0.7 else ("start", 10)
        wide, line = len(point.label) * _LETTER, y(point.share) - 8
        left = at + shift - (wide if anchor == "end" else 0)
        while any(
            left < end and start < left + wide and abs(line - at_line) < _LINE
            for start, end, at_line in written
        ):
            line += _LINE
        written.append((left, left + wide, line))
        parts.append(
            f'<text x="{at + shift:.1f}" y="{line:.1f}" text-anchor="{anchor}" '
            f'fill="{colour}">{escape(point.label)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
