"""A second opinion on completions: what the small model shows, and the text after a larger model's answer.

Regime: places in files that no model here was trained on, the rest of a line missing; the last character
before it is typed, the small model's answer is timed, and nothing is typed until the larger model has
answered or declined. Ceiling: the larger model must read its context first (a few seconds at most) and then
write a line; on two cores that is seconds for 1.5 billion parameters, on a GPU some ten milliseconds. Run by
`bench/keystroke.py --confirm MODEL`.

  confirmed_p50_ms   key to the larger model's answer: confirmed, lengthened, replaced or offered
  small_em, confirmed_em   share of places whose line is right to the letter, before and after it
  chars_saved_small, chars_saved_both   share of the missing characters that right ghost text brings
  larger_p50_ms, larger_em, chars_saved_larger   the larger one alone at the same places, as many as there is
                     time for (`larger_places`)
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from keystroke.clients.live_connection import LiveClient
from keystroke.protocol import live_messages as live
from keystroke.text import Edit
from keystroke.text.cases import CompletionCase

BEGUN = 0.5  # seconds after which the larger one has begun, if it will
PATIENCE = 60.0


@dataclass(slots=True)
class Figures:
    first_ms: list[float] = field(default_factory=list)
    confirmed_ms: list[float] = field(default_factory=list)
    verdicts: Counter[str] = field(default_factory=Counter)
    characters: int = 0
    exact: list[bool] = field(default_factory=list)
    exact_after: list[bool] = field(default_factory=list)
    saved: int = 0
    saved_after: int = 0

    def note(self, wanted: str, shown: str, final: str) -> None:
        self.characters += len(wanted)
        self.exact.append(shown.rstrip() == wanted)
        self.exact_after.append(final.rstrip() == wanted)
        self.saved += _saved(wanted, shown)
        self.saved_after += _saved(wanted, final)

    def alone(self) -> dict[str, Any]:
        """Of a larger model that answers by itself."""
        places = len(self.exact)
        return {
            "larger_places": places,
            "larger_p50_ms": round(median(self.first_ms), 1) if self.first_ms else None,
            "larger_em": round(sum(self.exact) / places, 4) if places else None,
            "chars_saved_larger": round(self.saved / self.characters, 4) if places else None,
        }

    def summary(self) -> dict[str, Any]:
        places = len(self.exact)
        return {
            "places": places,
            "first_p50_ms": round(median(self.first_ms), 1) if self.first_ms else None,
            "confirmed": len(self.confirmed_ms),
            "confirmed_p50_ms": round(median(self.confirmed_ms), 1) if self.confirmed_ms else None,
            "small_em": round(sum(self.exact) / places, 4) if places else None,
            "confirmed_em": round(sum(self.exact_after) / places, 4) if places else None,
            "chars_saved_small": round(self.saved / self.characters, 4) if places else None,
            "chars_saved_both": round(self.saved_after / self.characters, 4) if places else None,
            "verdicts": dict(self.verdicts.most_common()),
        }


def _saved(wanted: str, text: str) -> int:
    """Characters that a suggestion brings for one key, where it is right."""
    line = text.partition("\n")[0].rstrip()
    return len(line) - 1 if line and wanted.startswith(line) else 0


class TwoMinds:
    """`larger` is the model that has a say; without one the model that answers is alone."""

    def __init__(self, url: str, larger: str | None) -> None:
        self._url, self._larger = url, larger
        self._ready: dict[str, asyncio.Event] = {}
        self._revised: dict[str, tuple[float, live.SuggestionRevised]] = {}
        self._client = LiveClient(url, on_event=self._heard)

    async def measure(self, cases: Sequence[CompletionCase], seconds: float) -> Figures:
        figures = Figures()
        until = time.monotonic() + seconds
        await self._client.start()
        try:
            for number, case in enumerate(cases):
                if time.monotonic() >= until:
                    break
                await self._place(f"case_{number}.py", case, figures)
        finally:
            await self._client.stop()
        return figures

    async def _place(self, name: str, case: CompletionCase, figures: Figures) -> None:
        before, key = case.prefix[:-1], case.prefix[-1:]
        self._ready[name] = asyncio.Event()
        self._client.open(name, before + case.suffix, path=name, language="python", cursor=len(before))
        await self._ready[name].wait()
        began = time.perf_counter()
        self._client.change(name, 1, [Edit(len(before), len(before), key)], len(before) + 1)
        answer = await self._client.complete(name, len(before) + 1)
        figures.first_ms.append((time.perf_counter() - began) * 1e3)
        shown = answer.text if isinstance(answer, live.Suggestion) else ""
        if self._larger is not None:
            await self._silence(name)
        final, verdict = shown, "nothing said"
        if name in self._revised:
            when, event = self._revised[name]
            final, verdict = event.text, event.verdict
            figures.confirmed_ms.append((when - began) * 1e3)
        figures.verdicts[verdict] += 1
        figures.note(case.middle.partition("\n")[0].rstrip(), shown, final)
        self._client.close(name)

    async def _silence(self, name: str) -> None:
        """Until the larger one has spoken, or does nothing any more."""
        deadline = time.monotonic() + PATIENCE
        await asyncio.sleep(BEGUN)
        while name not in self._revised and time.monotonic() < deadline:
            if not await asyncio.to_thread(self._works):
                await asyncio.sleep(0.05)
                return
            await asyncio.sleep(0.02)

    def _works(self) -> bool:
        with urllib.request.urlopen(f"{self._url}/v1/status", timeout=30) as page:
            models = json.load(page)["models"]
        # Any of them: who has the say (it may be an adapter of the one named) is the choice of the gateway.
        return any(m["running"] + m["waiting"] for m in models)

    def _heard(self, event: live.LiveEvent) -> None:
        if isinstance(event, live.Ready) and event.buffer in self._ready:
            self._ready[event.buffer].set()
        elif isinstance(event, live.SuggestionRevised):
            self._revised.setdefault(event.buffer, (time.perf_counter(), event))
