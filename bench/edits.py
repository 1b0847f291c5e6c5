"""Edits by instruction: how many a model gets right, how many of those are minimal, how long they take.

Regime: 128 instructions over small real files in seven languages (bench/data/edits), most of them Python;
one request at a time, greedy, drafts on; a check that runs the edited file decides. Rows, the same model in
each: `auto` is `keystroke edit FILE -m "..."`: the program chooses the region; `lines` the same with the
lines given by a person (the part of the file that the reference changes): the ceiling of any choice;
`whole` the file is written anew; `blocks` search/replace hunks, what `edit` did before. Half of the cases
(`held`) were not used during development. `minimal`: of the right ones, no line changed that no
reference changes, and no unrequested comment or example was added. Ceiling: 1.0; the references
themselves reach it.

`single` is `auto` with one answer only, without candidates: what agreement is worth is the difference.
`codex` and `opencode` are those programs, unchanged, over a gateway with the same model, given the same
instruction and the file's name; what they leave in the folder is judged.
`harder` cases (bench/data/edits/harder) are over whole files and change several places. `damaged`: files that
no longer parse, hold markup or lost half of their lines without being asked; it must be 0. `overhead_s`: the
median time in which the model does not compute.

    python -m bench.edits --model PATH [--engine cuda] [--way auto ...] [--half all|seen|held]
                          [--set all|first|harder] [--sample N] [--seed N] [--minutes N]
                          [--case TEXT ...] [--record ANSWERS] [--save RESULTS] [--rescore RESULTS]

A slow machine is given `--sample` and `--minutes`: no case is begun after that time, and each is done in all
ways before the next. `--record` keeps every answer by its prompt, so that a second run asks only what is new.
`--rescore` decides the results that a run on another machine saved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

from bench.client_rows.programs import PROGRAMS, Program
from bench.edit_cases import InstructionCase, is_damaged, is_right, minimal, read_cases
from bench.record import record
from keystroke.agent.evaluation.docstring_checks import DocstringChecks
from keystroke.agent.sandbox import find_sandbox
from keystroke.analysis.outline import outline, walk_units
from keystroke.analysis.syntax import language_of
from keystroke.assist.edit import (
    EditFailure,
    EditFailureReason,
    EditProposal,
    EditTask,
    ModelWriter,
    Region,
    RewriteQuestion,
    Writer,
    edit_steps,
)
from keystroke.assist.edit.steps import propose_edit
from keystroke.assist.edit.writer import Messages
from keystroke.config import Settings, load_settings
from keystroke.engine.generation import GenerationParams
from keystroke.engine.load import load_model
from keystroke.text.compare import compare

MOST_TOKENS = 4096
CLIENTS = ("codex", "opencode")
WAYS = ("auto", "single", "lines", "whole", "blocks", *CLIENTS)
CLIENT_SECONDS = 900.0  # for one instruction

_CHECKS = DocstringChecks(cache(find_sandbox))
Propose = Callable[[InstructionCase], EditProposal | None]


class Recorder:
    """A writer that remembers every answer by its prompt, on disk, and asks the model only for new ones."""

    def __init__(self, writer: ModelWriter | None, path: Path | None) -> None:
        self._writer, self._path = writer, path
        self._known: dict[str, dict[str, Any]] = {}
        self.seconds = 0.0
        self.tokens = self.asked = 0
        if path is not None and path.exists():
            for line in path.read_text("utf-8").splitlines():
                entry = json.loads(line)
                self._known[entry["key"]] = entry

    @property
    def parallel(self) -> int:
        """One where answers are only read: then candidates are asked for one by one."""
        return self._writer.parallel if self._writer is not None else 1

    def write_all(self, questions: Sequence[RewriteQuestion]) -> list[str]:
        """A batch is never recorded: its time is that of all together."""
        assert self._writer is not None
        began = time.perf_counter()
        answers = self._writer.write_all(questions)
        self.seconds += time.perf_counter() - began
        self.asked += len(questions)
        return answers

    def sample(self, messages: Messages, temperature: float, seed: int) -> Iterator[str]:
        yield from self._write(messages, None, temperature, seed)

    def write(self, messages: Messages, prediction: str | None) -> Iterator[str]:
        yield from self._write(messages, prediction, 0.0, 0)

    def _write(
        self, messages: Messages, prediction: str | None, temperature: float, seed: int
    ) -> Iterator[str]:
        asked: list[Any] = [*messages, [temperature, seed]] if temperature else list(messages)
        key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:32]
        self.asked += 1
        if (known := self._known.get(key)) is not None:
            self.seconds += known["seconds"]
            self.tokens += known["tokens"]
            yield known["answer"]
            return
        if self._writer is None:
            raise LookupError("an answer was not recorded; name a model")
        began = time.perf_counter()
        pieces: list[str] = []
        cut = False
        try:
            stream = (
                self._writer.sample(messages, temperature, seed)
                if temperature
                else self._writer.write(messages, prediction)
            )
            for piece in stream:
                pieces.append(piece)
                yield piece
        except KeyboardInterrupt:
            cut = True  # half an answer is none
            raise
        finally:
            spent = time.perf_counter() - began
            tokens = self._writer.last.stats.tokens if self._writer.last is not None else 0
            self.seconds += spent
            self.tokens += tokens
            if not cut:
                entry = {"key": key, "answer": "".join(pieces), "seconds": spent, "tokens": tokens}
                self._keep(entry, messages)

    def _keep(self, entry: dict[str, Any], messages: Messages) -> None:
        self._known[entry["key"]] = entry
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**entry, "prompt": list(messages)}) + "\n")


def chosen_by_hand(case: InstructionCase) -> Region | None:
    """The smallest part of the one file that the reference changes; None where it changes several files."""
    changed = [path for path, text in case.files.items() if case.references[0][path] != text]
    if len(changed) != 1:
        return None
    text, wanted = case.files[changed[0]], case.references[0][changed[0]]
    spans = compare(text.splitlines(), wanted.splitlines())
    first, last = min(a0 for a0, *_ in spans), max(a1 for _, a1, *_ in spans)
    units = list(walk_units(outline(text, language_of(changed[0]))))
    near = [u for u in units if u.start <= first and max(last, first) <= u.end and not u.members]
    near = near or [u for u in units if u.start <= first and max(last, first) <= u.end]
    # A new definition goes behind the one before it.
    near = near or [u for u in units if u.end <= first][-1:]
    return Region(changed[0], near[0].start, near[0].end) if near else Region(changed[0])


def propose(case: InstructionCase, way: str, writer: Writer) -> EditProposal | None:
    """One case in one way; None where the way cannot be gone."""
    if way == "auto":
        return propose_edit(EditTask(case.files, case.instruction), writer, checks=_CHECKS)
    if way == "single":
        return propose_edit(EditTask(case.files, case.instruction), _Single(writer))
    if way == "blocks":
        return _blocks(EditTask(case.files, case.instruction), writer)
    region = chosen_by_hand(case) if way == "lines" else None
    if way == "whole" and len(case.files) == 1:
        region = Region(next(iter(case.files)))
    return propose_edit(EditTask(case.files, case.instruction, region), writer) if region else None


class _Single:
    """A writer that is asked one question at a time, without candidates."""

    def __init__(self, writer: Writer) -> None:
        self.write = writer.write


def _blocks(task: EditTask, writer: Writer) -> EditProposal:
    """Search/replace blocks alone, asked twice, without the rungs after them."""
    steps = edit_steps(task, blocks=True, retries=1)
    question = next(steps)
    answers: list[str] = []
    try:
        for _ in range(2):
            answers.append("".join(writer.write(question.messages, question.prediction)))
            question = steps.send(answers[-1])
    except StopIteration as stop:
        return cast("EditProposal", stop.value)
    return EditProposal(task.files, answers[-1], answers=tuple(answers))


@contextmanager
def clients(model: Path, ways: Sequence[str], settings: Settings) -> Iterator[dict[str, Propose]]:
    """How each client among `ways` does a case."""
    wanted = [way for way in ways if way in CLIENTS]
    if not wanted:
        yield {}
        return
    from bench.clients import serving  # here: it needs the server's packages

    server = replace(settings.server, port=0, host="127.0.0.1")
    with serving(model, replace(settings, server=server)) as url:
        yield {way: partial(_by_client, PROGRAMS[way](None), url) for way in wanted}


def _by_client(program: Program, url: str, case: InstructionCase) -> EditProposal:
    with tempfile.TemporaryDirectory(prefix="edit-client-") as name:
        folder = Path(name)
        for path, text in case.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, "utf-8")
        prompt = f"In {', '.join(case.files)}: {case.instruction}"
        said = program.do(url, folder, prompt, CLIENT_SECONDS).said
        left = {
            path: (folder / path).read_text("utf-8", "replace") if (folder / path).is_file() else ""
            for path in case.files
        }
    if left == dict(case.files):
        failure = EditFailure(EditFailureReason.UNCHANGED, "", "the client left the files as they were")
        return EditProposal(case.files, "", failures=(failure,), answers=(said[-2000:],))
    return EditProposal(case.files, "", left, answers=(said[-2000:],))


def ran(
    cases: Sequence[InstructionCase],
    ways: Sequence[str],
    writer: Recorder,
    limit: float = math.inf,
    by_client: Mapping[str, Propose] | None = None,
) -> Iterator[dict[str, Any]]:
    """Every case in every way, as many cases as are begun within `limit` seconds: what came out, its cost."""
    started = time.monotonic()
    for number, case in enumerate(cases, 1):
        if time.monotonic() - started > limit:
            return
        for way in ways:
            before = writer.seconds, writer.tokens, writer.asked
            by_program = (by_client or {}).get(way)
            began = time.perf_counter()
            try:
                proposal = propose(case, way, writer) if by_program is None else by_program(case)
            except LookupError as error:  # without a model only recorded answers are read
                proposal = EditProposal(
                    case.files, "", failures=(EditFailure(EditFailureReason.NO_HUNKS, "", str(error)),)
                )
            if proposal is None:
                continue
            seconds = max(time.perf_counter() - began, writer.seconds - before[0])
            texts = {**case.files, **{p: t for p, t in proposal.texts.items() if t is not None}}
            result = {
                "case": case.id,
                "way": way,
                "texts": texts,
                "failures": [f"{f.reason}: {f.message}" for f in proposal.failures],
                "answers": list(proposal.answers),
                "seconds": round(seconds, 3),
                "overhead_s": 0.0  # a client's is not known
                if by_program is not None
                else round(max(0.0, seconds - (writer.seconds - before[0])), 3),
                "agreement": proposal.agreement,
                "tokens": writer.tokens - before[1],
                "asked": writer.asked - before[2],
            }
            said = "; ".join(map(str, proposal.failures)) or "changed"
            print(f"{way} {number}/{len(cases)} {case.id}: {said}, {seconds:.1f} s", file=sys.stderr)
            yield result


def decided(results: Sequence[dict[str, Any]], cases: Mapping[str, InstructionCase]) -> list[dict[str, Any]]:
    """The results with who was right."""

    def judge(result: dict[str, Any]) -> dict[str, Any]:
        case = cases[result["case"]]
        good = not result["failures"] and is_right(case, result["texts"])
        return {
            **result,
            "right": good,
            "minimal": good and minimal(case, result["texts"]),
            "damaged": is_damaged(case, result["texts"]),
        }

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(judge, results))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if row["right"]]
    return {
        "cases": len(rows),
        "right": round(len(good) / len(rows), 4),
        "minimal": round(sum(row["minimal"] for row in good) / len(good), 4) if good else 0.0,
        "damaged": sum(row["damaged"] for row in rows),
        "refused": sum(bool(row["failures"]) for row in rows),
        "seconds_p50": round(statistics.median(row["seconds"] for row in rows), 3),
        "overhead_s": round(statistics.median(row.get("overhead_s", 0.0) for row in rows), 3),
        "questions": round(sum(row["asked"] for row in rows) / len(rows), 2),
        "tokens": round(sum(row["tokens"] for row in rows) / len(rows), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="coder", help="a model that follows instructions, by name or path")
    parser.add_argument("--engine", default="auto", choices=("auto", "onnx", "cuda"))
    parser.add_argument("--precision", default="auto")
    parser.add_argument(
        "--way", action="append", choices=WAYS, help="how the model is asked; may be repeated"
    )
    parser.add_argument("--half", default="all", choices=("all", "seen", "held"))
    parser.add_argument("--set", default="all", choices=("all", "first", "harder"))
    parser.add_argument("--sample", type=int, default=0, help="so many cases, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no case is begun after that time")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name holds this")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--rescore", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    every = read_cases()
    cases = [
        case
        for case in every
        if (given.half == "all" or case.held == (given.half == "held"))
        and (given.set == "all" or case.harder == (given.set == "harder"))
        and (not given.case or any(part in case.id for part in given.case))
    ]
    if given.sample:
        cases = random.Random(given.seed).sample(cases, min(given.sample, len(cases)))
    names = {case.id for case in cases}
    ways = given.way or ["auto"]
    if given.rescore:
        lines = given.rescore.read_text("utf-8").splitlines()
        results = [row for row in map(json.loads, lines) if row["case"] in names]
        ways = list(dict.fromkeys(row["way"] for row in results))
    else:
        results = measured(given, cases, ways)
    results = decided(results, {case.id: case for case in every})
    if given.save:
        given.save.write_text("".join(json.dumps(row) + "\n" for row in results), "utf-8")
    return report_results(results, ways, cases, given)


def measured(
    given: argparse.Namespace, cases: Sequence[InstructionCase], ways: Sequence[str]
) -> list[dict[str, Any]]:
    flags = {"engine.kind": given.engine, "engine.context": 16384}
    if given.precision != "auto":
        flags["model.precision"] = given.precision
    settings = load_settings(flags)
    model = None
    if given.model != "none":
        path = Path(given.model)
        model = load_model(path if path.exists() else given.model, settings)
    writer = ModelWriter(model, GenerationParams(max_tokens=MOST_TOKENS)) if model is not None else None
    try:
        if writer is not None:  # the first answer pays for what every later one finds ready
            "".join(writer.write([{"role": "user", "content": "Say yes."}], None))
        with clients(Path(given.model), ways, settings) as by_client:
            rows = ran(cases, ways, Recorder(writer, given.record), 60 * given.minutes, by_client)
            return list(_saved(rows, given.save))
    finally:
        if model is not None:
            model.engine.close()


def _saved(rows: Iterator[dict[str, Any]], path: Path | None) -> Iterator[dict[str, Any]]:
    """The rows, written as they come: a run that is stopped can be decided by --rescore."""
    if path is not None:
        path.write_text("")
    for row in rows:
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        yield row


def report_results(
    results: Sequence[dict[str, Any]],
    ways: Sequence[str],
    cases: Sequence[InstructionCase],
    given: argparse.Namespace,
) -> int:
    table: dict[str, Any] = {}
    held = {case.id for case in cases if case.held}
    python = {case.id for case in cases if case.language == "python"}
    for way in ways:
        rows = [row for row in results if row["way"] == way]
        if not rows:
            continue
        table[way] = summary(rows)
        harder = {case.id for case in cases if case.harder}
        for name, part in (
            ("held", held),
            ("python", python),
            ("harder", harder),
            ("harder_held", harder & held),
        ):
            some = [row for row in rows if row["case"] in part]
            if some:
                table[way][f"right_{name}"] = summary(some)["right"]
        wrong = [row["case"] for row in rows if not row["right"]]
        more = [row["case"] for row in rows if row["right"] and not row["minimal"]]
        print(f"{way}: wrong {', '.join(wrong) or '-'}; more than need be {', '.join(more) or '-'}")
    columns = list(next(iter(table.values()), {}))
    print(f"{'':10}", *(f"{column:>13}" for column in columns))
    for way, row in table.items():
        print(f"{way:10}", *(f"{row.get(column, '-')!s:>13}" for column in columns))
    first: dict[str, Any] = table.get("auto") or next(iter(table.values()), {})
    keys = {key: first.get(key) for key in ("right", "minimal", "damaged", "seconds_p50", "overhead_s")}
    figures = {"bench": "edits", "model": given.model, "half": given.half, **keys, "ways": table}
    done = len({row["case"] for row in results})
    if given.sample:  # not the figure of the set
        print(json.dumps({**figures, "sample": done, "set": given.set}))
    else:
        record("edits", {**figures, "sample": done, "set": given.set})
    if given.out:
        given.out.write_text(json.dumps(figures) + "\n")
    return 0 if table else 1


if __name__ == "__main__":
    sys.exit(main())
