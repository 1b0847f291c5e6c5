"""How many developers one GPU and one node serve, simulated from measured step times and typed files.

Regime: no engine runs here. A queue with the scheduler's own rules (ghost text before chat before background;
sixteen sessions a step; a better one goes first at the next step; newer work of a buffer takes the place of
older) is stepped with times of one H200 (`CARDS` says where each comes from). Developers type real files
(bench/data) with the rhythm that `bench.keystroke` types them with, pause to read, and now and then ask in
chat.

  developers         most developers at work at once for whom ghost text comes within 50 ms (95 of 100) and a
                     chat streams at the model's rate (half of all answers): 1,000 tokens a second for the
                     dense 1.5B, 100 for mixtures
  bound_by           which of the two, or the memory, gives out first
  kv_developers      developers whose buffer and conversation fit the card's memory at once
  seats              developers employed for that many at work at the busiest moment
  cost               currency units per developer and month, cards alone, at `--gpu-hour`
  MODEL.*            the same for each mixture alone on a card, and
  split.MODEL.*      a node of `--gpus` cards behind one name: some serve ghost text with the dense 1.5B, the
                     others chat and agents with the mixture, divided so that most developers fit

Ceiling: compute only. Nothing here counts networks or failures; `--nodes` keeps one node as a spare. What is
assumed and not measured is an option with its default in `--help`, or said in `CARDS`.

    make bench-scale-sim ARGS="[--seconds N] [--gpu-hour PRICE] [--gpus N] [--nodes N] [--table]"
"""

from __future__ import annotations

import argparse
import heapq
import random
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.record import record
from keystroke.text.cases import read_cases

BATCH = 16


@dataclass(frozen=True, slots=True)
class SimulatedCard:
    """A model on one H200. Times in seconds."""

    step_one: float  # a single session's step with the host included
    step_sixteen: float  # sixteen sessions together
    read_key: float  # reading sixteen typed tokens on 8k, less the step that follows
    read_short: float  # a prompt of up to 1,000 tokens
    read_rate: float  # tokens a second from there on
    kv_bytes: int  # a token's keys and values
    weights: float  # bytes
    accepted: float = 0.0  # of drafted tokens in chat about code; 0: no drafts
    chat_rate: float = 100.0  # tokens a second that a chat is to have

    @property
    def memory(self) -> float:
        """Bytes for keys and values: the card, less what is kept free and the weights."""
        return 141e9 * 0.92 - self.weights


CARDS = {
    # Measured, bf16, 1k context; "CUDA engine on one H200" in BENCHMARKS.md. 2,206 against 1,120 tok/s with
    # drafts and without.
    "coder-1.5b": SimulatedCard(
        1 / 1133, 16 / 11_438, 2.26e-3 - 1 / 1133, 7.6e-3 - 1 / 1133, 107_100, 28_672, 3.1e9, 0.5, 1000.0
    ),
    # Measured with random weights in the real shape (log/mixtures-gpu.md, 2026-11-17): 703 tok/s, 3,957
    # with 16 sessions, 16 rows of one session 2.51 steps, 32,228 tok/s of prefill. Assumed: a short prompt is
    # read at the rate of a long one; no drafts.
    "qwen3-coder-30b-a3b": SimulatedCard(
        1 / 703, 16 / 3957, 1.51 / 703, 1000 / 32_228, 32_228, 98_304, 18.6e9
    ),
    # Measured with random weights in the real shape (log/mixtures-gpu.md, 2026-11-18): 869 tok/s, 4.96
    # times that with 16 sessions, 36,460 tok/s of prefill. Assumed: as above, and 16 rows of one session cost
    # what they cost there. Half of its layers keep a window of 128 tokens.
    "gpt-oss-20b": SimulatedCard(
        1 / 869, 16 / (869 * 4.96), 1.51 / 869, 1000 / 36_460, 36_460, 24_576, 12.1e9
    ),
}
DENSE = "coder-1.5b"

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


def step_time(card: SimulatedCard, rows: int) -> float:
    """Between what was measured for one row and for sixteen."""
    return card.step_one + (card.step_sixteen - card.step_one) * (max(rows, 1) - 1) / (BATCH - 1)


def per_step(card: SimulatedCard, rows: int) -> float:
    """Tokens that a session gets of a step over so many rows of its own."""
    return (1 - card.accepted**rows) / (1 - card.accepted)


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
    card: SimulatedCard,
    developers: int,
    files: list[str],
    habits: Habits,
    seconds: float,
    seed: int,
    drafts: bool,
) -> SimulationOutcome:
    """One card under so many developers at work."""
    rng = random.Random(seed)
    drafts = drafts and card.accepted > 0
    arrivals: list[tuple[float, int, int]] = []
    for who in range(developers):
        mine = random.Random(rng.random())
        if habits.typing:
            arrivals += [(at, who, GHOST) for at in keys(mine, files, habits, seconds)]
        at = mine.expovariate(habits.chats / 3600) if habits.chats else seconds
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
            work = _work(card, at, who, kind, habits, rng)
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
        spent = step_time(card, len(batch) * rows)
        now += spent
        outcome.busy += spent
        for work in batch:
            work.turn = turn
            if not work.began:
                work.began = now
                if work.rank == CHAT:
                    outcome.first.append(now - work.arrived)
            # A line of ghost text is short and new: drafts are not counted on for it.
            work.left -= per_step(card, rows) if work.rank == CHAT else 1.0
            if work.left <= 0:
                work.gone = True
                if work.rank == GHOST:
                    outcome.ghost.append(now - work.arrived)
                elif now > work.began:
                    outcome.rates.append(work.size / (now - work.began))
    return outcome


def _work(
    card: SimulatedCard, at: float, who: int, kind: int, habits: Habits, rng: random.Random
) -> SimulatedWork:
    if kind == GHOST:
        return SimulatedWork(GHOST, at, who, card.read_key, habits.line)
    size = max(20.0, rng.lognormvariate(0.0, 0.6) * habits.answer)
    read = card.read_short + max(0, habits.new_input - 1000) / card.read_rate
    return SimulatedWork(CHAT, at, who, read, size, size)


def most(
    card: SimulatedCard,
    files: list[str],
    habits: Habits,
    seconds: float,
    drafts: bool,
    ghost: float,
    rate: float,
    limit: int,
) -> tuple[int, SimulationOutcome, str]:
    """The largest number of developers within both bounds, what it looks like, and what breaks beyond; not
    looked for beyond `limit`."""

    def holds(count: int) -> tuple[bool, str, SimulationOutcome]:
        seen = simulate(card, count, files, habits, seconds, count, drafts)
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
        if low >= limit:
            return low, kept, "nothing"
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        good, reason, seen = holds(middle)
        if good:
            low, kept = middle, seen
        else:
            high, why = middle, reason
    return low, kept, why


def split(ghosts: int, chats: int, gpus: int) -> tuple[int, int]:
    """(developers, cards for ghost text) of a node whose cards are divided between both kinds of work."""
    return max((min(n * ghosts, (gpus - n) * chats), n) for n in range(1, gpus))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add, plain = parser.add_argument, Habits()
    add("--seconds", type=float, default=240.0, help="simulated time of one trial")
    add("--ghost-ms", type=float, default=50.0)
    add("--chat-rate", type=float, default=None, help="tokens a second; default: the model's")
    add("--drafts", choices=("on", "off"), default="on")
    add("--typing", type=float, default=plain.typing, help="share of time at work spent typing")
    add("--computed", type=float, default=plain.computed, help="share of keys that ask the engine")
    add("--chats", type=float, default=plain.chats, help="turns an hour")
    add("--at-work", type=float, default=0.5, help="share of all developers at work in the busiest hour")
    add("--gpu-hour", type=float, default=3.50, help="list price of one card and hour; put yours here")
    add("--gpus", type=int, default=8, help="cards of a node")
    add("--nodes", type=int, default=4, help="nodes of a cluster, one of them spare")
    add("--table", action="store_true", help="how both figures move with the number of developers")
    told = parser.parse_args()
    habits = Habits(typing=told.typing, computed=told.computed, chats=told.chats)
    cases = read_cases(Path(__file__).parent / "data" / "completion.jsonl.xz")
    files = [case.prefix + case.suffix for case in cases]
    files = [text for text in files if len(text) > 400][:200]
    drafts = told.drafts == "on"

    def count(card: SimulatedCard, doing: Habits) -> tuple[int, SimulationOutcome, str, int]:
        """Developers on one card: as its steps allow, what they see, what gives out, as its memory allows."""
        rate = told.chat_rate or card.chat_rate
        tokens = (doing.buffer if doing.typing else 0) + (doing.conversation if doing.chats else 0)
        kv = int(card.memory / (tokens * card.kv_bytes))
        compute, seen, why = most(card, files, doing, told.seconds, drafts, told.ghost_ms / 1e3, rate, kv)
        return compute, seen, "memory" if kv < compute else why, kv

    def monthly(developers: int, cards: int) -> float:
        return float(told.gpu_hour) * 24 * 365 / 12 * cards / max(1, int(developers / told.at_work))

    dense = CARDS[DENSE]
    if told.table:
        _print_table(dense, count(dense, habits)[0], files, habits, told.seconds, drafts)
    figures: dict[str, Any] = {}
    shown = ["| model | developers a card | bound by | a node | a cluster | a developer and month |"]
    shown.append("|---|---|---|---|---|---|")
    for name, card in CARDS.items():
        compute, seen, why, kv = count(card, habits)
        developers = min(compute, kv)
        made = {
            "developers": developers,
            "bound_by": why,
            "compute_developers": compute,
            "kv_developers": kv,
            "ghost_p95_ms": round(seen.ghost_p95 * 1e3, 2),
            "chat_tok_s": round(seen.chat_rate),
            "seats": int(developers / told.at_work),
            "cost": round(monthly(developers, 1), 2),
            "node_developers": developers * told.gpus,
            "cluster_developers": developers * told.gpus * (told.nodes - 1),
        }
        figures |= made if name == DENSE else {name: made}
        shown.append(_row(name, developers, why, developers * told.gpus, told.nodes, made["cost"]))
    typing_only = count(dense, replace(habits, chats=0.0))
    ghosts = min(typing_only[0], typing_only[3])
    for name, card in CARDS.items():
        if name == DENSE:
            continue
        compute, _, why, kv = count(card, replace(habits, typing=0.0))
        node, cards = split(ghosts, min(compute, kv), told.gpus)
        if node == cards * ghosts:
            why = "ghost text"
        cost = round(monthly(node, told.gpus), 2)
        both = {"node_developers": node, "ghost_cards": cards, "chat_developers": min(compute, kv)}
        figures.setdefault("split", {})[name] = {**both, "cost": cost}
        label = f"{cards} cards {DENSE} + {told.gpus - cards} {name}"
        shown.append(_row(label, node // told.gpus, why, node, told.nodes, cost))
    print("\n".join(shown))
    record("scale_sim", figures)


def _row(name: str, card: int, why: str, node: int, nodes: int, cost: float) -> str:
    return f"| {name} | {card:,} | {why} | {node:,} | {node * (nodes - 1):,} | {cost:.2f} |"


def _print_table(
    card: SimulatedCard, compute: int, files: list[str], habits: Habits, seconds: float, drafts: bool
) -> None:
    print("| developers at work | ghost text p95 | chat tok/s | first token p50 | card busy |")
    print("|---|---|---|---|---|")
    for share in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5):
        many = max(1, int(compute * share))
        row = simulate(card, many, files, habits, seconds, many, drafts)
        first = median(row.first) * 1e3 if row.first else 0.0
        print(
            f"| {many} | {row.ghost_p95 * 1e3:.1f} ms | {row.chat_rate:,.0f} | {first:.1f} ms "
            f"| {min(1.0, row.busy / seconds):.0%} |"
        )


if __name__ == "__main__":
    main()
