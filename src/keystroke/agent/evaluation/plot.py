"""Draws score against time as SVG.

One point per configuration; those of one model are joined in order of time, on a logarithmic axis. Every
text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from keystroke.agent.evaluation.report import Summary

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 190, 48, 56
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706", "#0891b2")
_TICKS = (1, 2, 5)


def render_plot(summaries: Sequence[Summary], title: str) -> str:
    """An SVG document with a point for every configuration that did a task."""
    shown = [s for s in summaries if s.tasks]
    seconds = [max(s.seconds_mean, 1e-3) for s in shown] or [1.0]
    low, high = math.log10(min(seconds)) - 0.25, math.log10(max(seconds)) + 0.25
    top = min(100.0, 10 * math.ceil((max((s.score for s in shown), default=90) + 5) / 10))
    bottom = max(0.0, 10 * math.floor((min((s.score for s in shown), default=10) - 5) / 10))

    def x(value: float) -> float:
        share = (math.log10(max(value, 1e-3)) - low) / (high - low)
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - bottom) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#111827">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="26" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    step = 10 if top - bottom > 30 else 5
    for score in range(int(bottom), int(top) + 1, step):
        parts.append(_line(_LEFT, y(score), _WIDTH - _RIGHT, y(score)))
        parts.append(_text(_LEFT - 8, y(score) + 4, f"{score} %", "end"))
    for value in _ticks(low, high):
        parts.append(_line(x(value), _TOP, x(value), _HEIGHT - _BOTTOM))
        parts.append(_text(x(value), _HEIGHT - _BOTTOM + 18, f"{value:g} s", "middle"))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(_text(middle, _HEIGHT - 14, "seconds a task (mean, logarithmic)", "middle"))
    models = list(dict.fromkeys(s.model for s in shown))
    for number, model in enumerate(models):
        colour = _COLOURS[number % len(_COLOURS)]
        own = sorted((s for s in shown if s.model == model), key=lambda s: s.seconds_mean)
        if len(own) > 1:
            points = " ".join(f"{x(s.seconds_mean):.1f},{y(s.score):.1f}" for s in own)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for s in own:
            px, py = x(s.seconds_mean), y(s.score)
            parts.append(
                _line(px, y(max(bottom, s.score - s.margin)), px, y(min(top, s.score + s.margin)), colour)
            )
            parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4.5" fill="{colour}"/>')
            parts.append(_text(px + 8, py - 6, f"{s.label} ({s.score:.1f})", "start"))
        beside, below = _WIDTH - _RIGHT + 14, _TOP + 20 * number
        parts.append(f'<rect x="{beside}" y="{below}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(beside + 16, below + 10, model[:24], "start"))
    return "\n".join([*parts, "</svg>\n"])


def _ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(low), math.ceil(high)
    every = [digit * 10.0**power for power in range(first, last + 1) for digit in _TICKS]
    return [value for value in every if low <= math.log10(value) <= high]


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#e5e7eb") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
