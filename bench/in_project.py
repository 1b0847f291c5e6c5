"""The gain of ghost text from the text of the file and the project, on this machine's CPU.

Regime: the late cases of `bench/completion.py`, each in its own project: the release it was taken from is
fetched (from the package index that pip is set up for) and kept in a folder. Prompts are those of an editor:
the prompt window over the whole file, token healing, greedy, one line. Five rows a model, at the same places:
`place` is how `bench/completion.py` asks (the case's own 1,900 characters, the cursor's half word cut as it
stands); `editor` the same model asked by the live channel; `file` with the n-gram cache of the file above and
below the cursor's line; `project` with the other files of the language, too, nearest first; `stepwise` the
same without drafts from the cache, a token a step: the same text, later. Files that share more than half of
the case's lines are copies or forms of it and are left out of the last two rows. A project is as it was
released: other files may have been written after the line was.

`rest_em`, `line_em`: right to the letter after trailing spaces are dropped, with Wilson's 95 % interval.
`shown`: what the gate lets through, whole lines or a confident beginning of one, and `shown_right` of these.
`step_ms`: a decode step, the cache's part in it included; `steps` all of them; `answer_ms`: from an answer's
first token to its last, the middle one; `shown_ms`: of those shown, to where that was decided, and `ended_ms`
the same ones to their last token. `against`: places that only the row before or only this row has right.
Ceiling: names and comments are free choices.

    python -m bench.in_project [--model M] [--cases N] [--language L ...] [--context N] [--row R ...]
                               [--projects FOLDER] [--minutes N] [--seed N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from bench.completion import CASES, LANGUAGES
from bench.exactness import language
from bench.record import record
from keystroke.analysis.text_index import Lexicon, TextIndex
from keystroke.assist.completion import Extent, LiveCompletion, ShownCompletion
from keystroke.config import load_settings
from keystroke.engine.generation import Generation
from keystroke.engine.load import load_model
from keystroke.engine.mixing import Mixing
from keystroke.engine.model import Model
from keystroke.errors import KeystrokeError
from keystroke.gateway.live.project_text import CHARACTERS, LARGEST, language_family, sort_by_distance
from keystroke.text.cases import CompletionCase, read_cases
from keystroke_lab.corpus.archives import source_files
from keystroke_lab.corpus.languages import SUFFIXES
from keystroke_lab.corpus.package_index import PackageIndex
from keystroke_lab.evaluation.completion import ModelSuggester, Share
from keystroke_lab.pretraining.fim import FimCut

ROWS = ("place", "editor", "file", "project", "stepwise")
KINDS = {FimCut.REST_OF_LINE: "rest_em", FimCut.LINE: "line_em"}
_COPY = 0.5  # of the lines of a case's file


def fetch_projects(cases: Iterable[CompletionCase], folder: Path) -> int:
    """Bring the projects of the cases into `folder`, one file each; how many are there."""
    wanted = {(case.project, case.version) for case in cases}
    folder.mkdir(parents=True, exist_ok=True)
    missing = [pair for pair in sorted(wanted) if not _stored_path(folder, *pair).exists()]
    if missing:
        index = PackageIndex()
        with ThreadPoolExecutor(8) as pool:
            for number, _ in enumerate(pool.map(lambda pair: _fetch(index, folder, *pair), missing)):
                print(f"\rprojects: {number + 1} of {len(missing)}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        index.close()
    return sum(_stored_path(folder, *pair).exists() for pair in wanted)


def _stored_path(folder: Path, project: str, version: str) -> Path:
    return folder / f"{project}@{version}.json"


def _fetch(index: PackageIndex, folder: Path, name: str, version: str) -> None:
    try:
        project = index.project(name)
        release = next((r for r in project.releases if r.version == version), None) if project else None
        if release is None:
            return  # not from this index, or gone from it
        download = release.download
        files = {
            path.partition("/")[2] if download.sdist else path: content.decode()
            for path, content, _ in source_files(
                index.fetch(download), download.filename, frozenset(SUFFIXES)
            )
            if _decodes(content)
        }
    except KeystrokeError as error:
        print(f"\n{name}: {error}", file=sys.stderr)
        return
    _stored_path(folder, name, version).write_text(json.dumps(files))


def _decodes(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class CaseLocation:
    """A case in its file, and the project around it."""

    case: CompletionCase
    before: str
    after: str
    others: dict[str, str]


@lru_cache(maxsize=2)
def _project(file: Path) -> dict[str, str]:
    return dict(json.loads(file.read_text()))


def locate(case: CompletionCase, folder: Path) -> CaseLocation | None:
    """None where the project, or the place in it, is not there."""
    kept = _stored_path(folder, case.project, case.version)
    files = _project(kept) if kept.exists() else {}
    text = files.get(case.path, "").replace("\r\n", "\n")
    at = text.find(case.prefix + case.middle + case.suffix)
    if at < 0:
        return None
    cursor = at + len(case.prefix)
    return CaseLocation(case, text[:cursor], text[cursor + len(case.middle) :], files)


def index_around(place: CaseLocation) -> TextIndex:
    """The index that the gateway would make, without copies of the file itself."""
    case, lexicon = place.case, Lexicon()
    own, family = _lines(place.before + place.after), language_family(case.path)
    texts: list[tuple[str, Any]] = []
    left = CHARACTERS
    for name in sort_by_distance(case.path, [n for n in place.others if language_family(n) == family]):
        text = place.others[name]
        if name == case.path or len(text) > LARGEST or len(own & _lines(text)) > _COPY * len(own):
            continue
        left -= len(text)
        if left < 0:
            break
        texts.append((name, lexicon.lex(text, keep=False)))
    return TextIndex.build(lexicon, texts[::-1])


@lru_cache(maxsize=4096)
def _lines(text: str) -> frozenset[str]:
    return frozenset(line.strip() for line in text.split("\n") if len(line.strip()) > 8)


@dataclass(slots=True)
class ProjectScores:
    right: dict[str, list[bool]] = field(default_factory=lambda: {key: [] for key in KINDS.values()})
    shown: int = 0
    shown_right: int = 0
    steps: int = 0
    seconds: list[float] = field(default_factory=list)  # of each answer
    decided: list[tuple[float, float]] = field(default_factory=list)  # of those shown: when, and their end

    @property
    def all(self) -> list[bool]:
        return [one for hits in self.right.values() for one in hits]

    def summary(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for key, hits in self.right.items():
            if hits:
                told |= Share(sum(hits), len(hits)).row(key)
        if self.steps:  # asked by the live channel
            told |= Share(self.shown, len(self.all)).row("shown")
            told |= Share(self.shown_right, self.shown).row("shown_right")
            told["steps"] = self.steps
            told["step_ms"] = round(1e3 * sum(self.seconds) / self.steps, 2)
            told["answer_ms"] = round(1e3 * median(self.seconds), 1)
        if self.decided:
            shown, ended = zip(*self.decided, strict=True)
            told["shown_ms"], told["ended_ms"] = (round(1e3 * median(times), 1) for times in (shown, ended))
        return told


class PlaceRequest:
    """One model at one place after another."""

    def __init__(self, model: Model, context: int) -> None:
        self._model, self._context = model, context
        self._plain = ModelSuggester(model, context)
        self._session = model.engine.session()
        self._settings = load_settings({}, Path.cwd()).assist

    def ask(self, name: str, place: CaseLocation, row: ProjectScores) -> None:
        case = place.case
        wanted = case.middle.rstrip()
        if name == "place":
            said = self._plain.line(case.prefix, case.suffix).text.rstrip()
        else:
            said = self._live(name, place, row)
        row.right[KINDS[FimCut(case.kind)]].append(said == wanted)

    def _live(self, name: str, place: CaseLocation, row: ProjectScores) -> str:
        """The live channel's own question; what the gate makes of the answer is counted."""
        case = place.case
        settings = replace(self._settings, project_text=name != "editor")
        completion = LiveCompletion(
            self._model, settings, path=case.path, language=language(case), budget=self._context
        )
        if name in ("project", "stepwise"):
            completion.project = index_around(place)
        text, cursor = place.before + place.after, len(place.before)
        stream = completion.begin(text, cursor, Extent.REST)
        generation = Generation(
            self._model,
            self._session,
            stream.prompt.tokens,
            stream.params(),
            mixing=Mixing(stream.predictor, drafts=name != "stepwise"),
        )
        began, decided, answer = 0.0, 0.0, None
        for chunk in generation:
            if not began:  # the first step is not counted: the prompt is read in it
                began = time.perf_counter()
            stream.feed(chunk)
            if answer is None and (answer := completion.answer(text, cursor, stream)) is not None:
                decided = time.perf_counter() - began
            if stream.done:  # as the gateway stops there
                break
        row.seconds.append(time.perf_counter() - began)
        row.steps += max(0, generation.stats.steps - 1)
        if isinstance(answer, ShownCompletion):
            row.shown += 1
            row.decided.append((decided, row.seconds[-1]))
            whole = answer.text.rstrip() == case.middle.rstrip()
            row.shown_right += whole or (answer.partial and case.middle.startswith(answer.text))
        return stream.text.rstrip()


def compare_rows(first: Sequence[bool], second: Sequence[bool]) -> dict[str, int]:
    pairs = list(zip(first, second, strict=True))
    return {
        "only_before": sum(a and not b for a, b in pairs),
        "only_now": sum(b and not a for a, b in pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="embedded", help="a model by name or path")
    parser.add_argument("--cases", type=int, default=60, help="of each kind and language; 0 is all")
    parser.add_argument("--language", action="append", help="only these languages")
    parser.add_argument("--context", type=int, default=512, help="tokens of prompt")
    parser.add_argument("--row", action="append", choices=ROWS, help="only these rows")
    parser.add_argument("--projects", type=Path, help="where fetched projects are kept")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop asking after so long")
    parser.add_argument("--seed", type=int, default=1, help="which cases are asked first")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    settings = load_settings({}, Path.cwd())
    folder = given.projects or settings.paths.cache / "bench-projects"
    chosen = _chosen(given.cases, given.language, given.seed)
    there = fetch_projects(chosen, folder)
    rows = given.row or list(ROWS)
    model = load_model(given.model, settings)
    asked, results, missing = PlaceRequest(model, given.context), _Results(), 0
    until = time.monotonic() + 60 * given.minutes
    for number, case in enumerate(chosen):
        if time.monotonic() > until:
            break
        if (place := locate(case, folder)) is None:
            missing += 1
            continue
        for name in rows:
            asked.ask(name, place, results.of(language(case), name))
        print(f"\rplaces: {number + 1} of {len(chosen)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    model.engine.close()
    return _report(given, results, rows, there, missing)


def _chosen(each: int, languages: Sequence[str] | None, seed: int) -> list[CompletionCase]:
    """`each` cases of each kind and language, in an order that may be stopped anywhere."""
    pool = [case for case in [*read_cases(CASES), *read_cases(LANGUAGES)] if case.kind in set(KINDS)]
    random.Random(seed).shuffle(pool)
    taken: dict[tuple[str, str], list[CompletionCase]] = {}
    for case in pool:
        held = taken.setdefault((case.kind, language(case)), [])
        if (not each or len(held) < each) and (not languages or language(case) in languages):
            held.append(case)
    return [case for case in pool if case in taken[case.kind, language(case)]]


class _Results:
    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], ProjectScores] = {}

    def of(self, spoken: str, name: str) -> ProjectScores:
        return self.rows.setdefault((spoken, name), ProjectScores())

    def together(self, name: str) -> ProjectScores:
        whole = ProjectScores()
        for (_, row_name), row in sorted(self.rows.items()):
            if row_name == name:
                for key, hits in row.right.items():
                    whole.right[key] += hits
                whole.shown += row.shown
                whole.shown_right += row.shown_right
                whole.steps += row.steps
                whole.seconds += row.seconds
                whole.decided += row.decided
        return whole


def _report(given: argparse.Namespace, results: _Results, rows: list[str], there: int, missing: int) -> int:
    languages = sorted({spoken for spoken, _ in results.rows})
    told: dict[str, Any] = {}
    columns = {"rest_em": 9, "line_em": 9, "shown": 8, "shown_right": 13, "step_ms": 9, "answer_ms": 11,
               "shown_ms": 10, "ended_ms": 10}  # fmt: skip
    heads = "".join(f"{column:>{width}}" for column, width in columns.items())
    print(f"{'':<21}{heads}   against the row before")
    for spoken in [*languages, "all"]:
        before: ProjectScores | None = None
        for name in rows:
            row = results.together(name) if spoken == "all" else results.of(spoken, name)
            line = row.summary()
            if before is not None:
                line["against"] = compare_rows(before.all, row.all)
            told.setdefault(spoken, {})[name] = line
            before = row
            cells = ((line.get(column), width) for column, width in columns.items())
            shown = "".join(f"{'-' if cell is None else cell:>{width}}" for cell, width in cells)
            print(f"{spoken:<12}{name:<9}{shown}   {line.get('against', '')}")
    result = {
        "bench": "in_project", "model": given.model, "context": given.context, "projects": there,
        "not_found": missing, "languages": told,
    }  # fmt: skip
    record("in_project", result)
    if given.out:
        given.out.write_text(json.dumps(result) + "\n")
    return 0 if told else 1


if __name__ == "__main__":
    raise SystemExit(main())
