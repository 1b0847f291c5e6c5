"""How many developers one H200 serves, simulated from measured step times and typed files.

Regime: no engine runs here. A queue with the scheduler's own rules (ghost text before chat before background;
sixteen sessions a step; a better one goes first at the next step; newer work of a buffer takes the place of
older) is stepped with times measured on one H200 with Qwen2.5-Coder-1.5B in bf16 (BENCHMARKS.md): a step over
one row and over sixteen, reading of short and long prompts. Developers type real files (bench/data) with the
rhythm that `bench.keystroke` types them with, pause to read, and now and then ask in chat.

  developers         most developers at work at once for whom ghost text comes within 50 ms (95 of 100) and a
                     chat streams at 1,000 tokens a second (half of all answers)
  bound_by           which of the two, or the memory, gives out first
  kv_developers      developers whose buffer and conversation fit the card's memory at once
  seats              developers employed for that many at work at the busiest moment
  cost               currency units per developer and month, cards alone, at `--gpu-hour`

Ceiling: compute only. Nothing here counts networks, failures or spares; docs/scale.md does that on paper.
What is assumed and not measured is an option with its default in `--help`.

    make bench-scale-sim ARGS="[--seconds N] [--gpu-hour PRICE] [--drafts off] [--table]"
"""

from __future__ import annotations

import argparse
import heapq
import random
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bench.record import record
from keystroke.text.cases import read_cases

# One H200, Qwen2.5-Coder-1.5B bf16, 1k context; "CUDA engine on one H200" in BENCHMARKS.md.
STEP_ONE = 1 / 1133  # seconds, a single session's step with the host included
STEP_SIXTEEN = 16 / 11_438  # sixteen sessions together
BATCH = 16
READ_KEY = 2.26e-3 - STEP_ONE  # reading sixteen typed tokens on 8k, less the step that follows
READ_SHORT = 7.6e-3 - STEP_ONE  # a prompt of up to 1,000 tokens
READ_RATE = 107_100  # tokens a second from there on
ACCEPTED = 0.5  # of drafted tokens in chat about code: 2,206 against 1,120 tok/s with drafts and without
KV_BYTES = 28_672  # a token's keys and values
MEMORY = 141e9 * 0.92 - 3.1e9  # the card, less what is kept free and the weights

GHOST, CHAT, BACKGROUND = 0, 1, 2


@dataclass(slots=True, order=True)
class SimulatedWork:
    rank: int
    arrived: float
    developer: int = field(compare=False)
    read: float = field(compare=False)  # seconds of reading left
    left: float = field(compare=False)  # tokens to write
    size: float = field(compare=False, default=0.0)
    began: float = field(compare=False, default=0.0)
    turn: int = field(compare=False, default=0)
    gone: bool = field(compare=False, default=False)


@dataclass(frozen=True, slots=True)
class Habits:
    """What a developer at work does. Shares and rates are assumptions; the rhythm of keys is measured."""

    typing: float = 0.25  # of the time at work
    computed: float = 0.88  # of the keys, measured: the rest agrees with what is shown
    line: int = 10  # tokens of a suggestion
    chats: float = 12.0  # an hour, agents' turns included
    answer: int = 350  # tokens
    new_input: int = 900  # tokens of a turn that no cache holds
    buffer: int = 2048  # tokens of context that a buffer keeps
    conversation: int = 8192


def step_time(rows: int) -> float:
    """Between what was measured for one row and for sixteen."""
    return STEP_ONE + (STEP_SIXTEEN - STEP_ONE) * (max(rows, 1) - 1) / (BATCH - 1)


def per_step(rows: int) -> float:
    """Tokens that a session gets of a step over so many rows of its own."""
    return (1 - ACCEPTED**rows) / (1 - ACCEPTED)


def keys(rng: random.Random, files: list[str], habits: Habits, seconds: float) -> Iterator[float]:
    """Moments at which one developer's keys ask for ghost text: files typed in bursts, with pauses between
    so that the share of time spent typing comes out."""
    now = -rng.uniform(600.0, 900.0)  # long before: when the clock starts some type and most think
    while now < seconds:
        text = rng.choice(files)
        start = rng.randrange(max(1, len(text) - 200))
        began = now
        for letter in text[start : start + rng.randrange(40, 400)]:
            now += rng.lognormvariate(-1.97, 0.35)
            if letter == " ":
                now += rng.uniform(0.0, 0.25)
            elif letter == "\n":
                now += rng.uniform(0.1, 0.5)
            if rng.random() < habits.computed and 0 <= now < seconds:
                yield now
        now += rng.expovariate(1 / ((now - began) * (1 - habits.typing) / habits.typing))


@dataclass(slots=True)
class SimulationOutcome:
    ghost: list[float] = field(default_factory=list)  # seconds from key to line
    rates: list[float] = field(default_factory=list)  # tokens a second of each chat
    first: list[float] = field(default_factory=list)
    busy: float = 0.0

    @property
    def ghost_p95(self) -> float:
        return sorted(self.ghost)[int(0.95 * len(self.ghost))] if self.ghost else 0.0

    @property
    def chat_rate(self) -> float:
        return median(self.rates) if self.rates else 0.0


def simulate(
    developers: int, files: list[str], habits: Habits, seconds: float, seed: int, drafts: bool
) -> SimulationOutcome:
    """One card under so many developers at work."""
    rng = random.Random(seed)
    arrivals: list[tuple[float, int, int]] = []
    for who in range(developers):
        mine = random.Random(rng.random())
        arrivals += [(at, who, GHOST) for at in keys(mine, files, habits, seconds)]
        at = mine.expovariate(habits.chats / 3600)
        while at < seconds:
            arrivals.append((at, who, CHAT))
            at += mine.expovariate(habits.chats / 3600)
    heapq.heapify(arrivals)
    outcome, now, turn = SimulationOutcome(), 0.0, 0
    running: list[SimulatedWork] = []
    current: dict[int, SimulatedWork] = {}
    while arrivals or running:
        while arrivals and (arrivals[0][0] <= now or not running):
            at, who, kind = heapq.heappop(arrivals)
            now = max(now, at)
            work = _work(at, who, kind, habits, rng)
            if kind == GHOST:
                if (older := current.get(who)) is not None and not older.gone:
                    older.gone = True  # superseded
                current[who] = work
            insort(running, work)
        running = [w for w in running if not w.gone]
        if not running:
            continue
        turn += 1
        running.sort(key=lambda w: (w.rank, w.turn))
        best = running[0]
        if best.read > 0:
            best.turn = turn
            now += best.read
            outcome.busy += best.read
            best.read = 0.0
            continue
        batch = [w for w in running if w.read <= 0][:BATCH]
        rows = max(1, BATCH // len(batch)) if drafts else 1
        spent = step_time(len(batch) * rows)
        now += spent
        outcome.busy += spent
        for work in batch:
            work.turn = turn
            if not work.began:
                work.began = now
                if work.rank == CHAT:
                    outcome.first.append(now - work.arrived)
            # A line of ghost text is short and new: drafts are not counted on for it.
            work.left -= per_step(rows) if work.rank == CHAT else 1.0
            if work.left <= 0:
                work.gone = True
                if work.rank == GHOST:
                    outcome.ghost.append(now - work.arrived)
                elif now > work.began:
                    outcome.rates.append(work.size / (now - work.began))
    return outcome


def _work(at: float, who: int, kind: int, habits: Habits, rng: random.Random) -> SimulatedWork:
    if kind == GHOST:
        return SimulatedWork(GHOST, at, who, READ_KEY, habits.line)
    size = max(20.0, rng.lognormvariate(0.0, 0.6) * habits.answer)
    read = READ_SHORT if habits.new_input <= 1000 else READ_SHORT + (habits.new_input - 1000) / READ_RATE
    return SimulatedWork(CHAT, at, who, read, size, size)


def most(
    files: list[str], habits: Habits, seconds: float, drafts: bool, ghost: float, rate: float
) -> tuple[int, SimulationOutcome, str]:
    """The largest number of developers within both bounds, what it looks like, and what breaks beyond."""

    def holds(count: int) -> tuple[bool, str, SimulationOutcome]:
        seen = simulate(count, files, habits, seconds, count, drafts)
        if seen.ghost_p95 > ghost:
            return False, "ghost text", seen
        if seen.rates and seen.chat_rate < rate:
            return False, "chat", seen
        return True, "", seen

    low, high, why = 8, 16, ""  # fewer do not ask often enough to say anything
    kept = holds(low)[2]
    while True:
        good, why, seen = holds(high)
        if not good:
            break
        low, kept, high = high, seen, high * 2
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        good, reason, seen = holds(middle)
        if good:
            low, kept = middle, seen
        else:
            high, why = middle, reason
    return low, kept, why


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add, plain = parser.add_argument, Habits()
    add("--seconds", type=float, default=240.0, help="simulated time of one trial")
    add("--ghost-ms", type=float, default=50.0)
    add("--chat-rate", type=float, default=1000.0)
    add("--drafts", choices=("on", "off"), default="on")
    add("--typing", type=float, default=plain.typing, help="share of time at work spent typing")
    add("--computed", type=float, default=plain.computed, help="share of keys that ask the engine")
    add("--chats", type=float, default=plain.chats, help="turns an hour")
    add("--at-work", type=float, default=0.5, help="share of all developers at work in the busiest hour")
    add("--gpu-hour", type=float, default=3.50, help="price of one card and hour")
    add("--table", action="store_true", help="how both figures move with the number of developers")
    told = parser.parse_args()
    habits = Habits(typing=told.typing, computed=told.computed, chats=told.chats)
    cases = read_cases(Path(__file__).parent / "data" / "completion.jsonl.xz")
    files = [case.prefix + case.suffix for case in cases]
    files = [text for text in files if len(text) > 400][:200]
    drafts = told.drafts == "on"
    compute, seen, why = most(files, habits, told.seconds, drafts, told.ghost_ms / 1e3, told.chat_rate)
    kv = int(MEMORY / ((habits.buffer + habits.conversation) * KV_BYTES))
    developers = min(compute, kv)
    bound = "memory" if kv < compute else why
    seats = int(developers / told.at_work)
    cost = told.gpu_hour * 24 * 365 / 12 / seats
    if told.table:
        print("| developers at work | ghost text p95 | chat tok/s | first token p50 | card busy |")
        print("|---|---|---|---|---|")
        for share in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5):
            count = max(1, int(compute * share))
            row = simulate(count, files, habits, told.seconds, count, drafts)
            first = median(row.first) * 1e3 if row.first else 0.0
            print(
                f"| {count} | {row.ghost_p95 * 1e3:.1f} ms | {row.chat_rate:,.0f} | {first:.1f} ms "
                f"| {min(1.0, row.busy / told.seconds):.0%} |"
            )
    print(f"{developers} developers at work a card ({bound}); memory holds {kv}, steps serve {compute}")
    figures = {
        "developers": developers,
        "bound_by": bound,
        "compute_developers": compute,
        "kv_developers": kv,
        "ghost_p95_ms": round(seen.ghost_p95 * 1e3, 2),
        "chat_tok_s": round(seen.chat_rate),
        "seats": seats,
        "cost": round(cost, 2),
    }
    record("scale_sim", figures)


if __name__ == "__main__":
    main()
