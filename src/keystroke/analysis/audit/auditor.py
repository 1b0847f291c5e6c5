"""Audits a text once, or incrementally while it is edited.

A text is audited unit by unit. The result of a unit depends only on its text and on what its names mean
outside it (imports, constants, fields), so it is reused while both are unchanged. The audit of an edited text
equals the audit of the same text from scratch.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ast_grep_py import SgRoot

from keystroke.analysis.audit.detectors import Detectors, MemoryDetectors
from keystroke.analysis.audit.finding import Finding
from keystroke.analysis.audit.fixes.build import build
from keystroke.analysis.audit.fixes.evidence import missing_evidence
from keystroke.analysis.audit.fixes.imports import bound_name, imported
from keystroke.analysis.audit.fixes.placement import UnitFix, with_fixes
from keystroke.analysis.audit.fixes.site import FixEdits, FixSite
from keystroke.analysis.audit.flow.base import Env, ExhaustedError
from keystroke.analysis.audit.flow.data_flow import MAX_INLINED, DataFlow
from keystroke.analysis.audit.flow.knowledge import family_of, load_knowledge
from keystroke.analysis.audit.flow.memo import StatementMemo
from keystroke.analysis.audit.flow.values import Memory, Value
from keystroke.analysis.audit.go_numbers import GoDetectors
from keystroke.analysis.audit.memory.control import thread_and_signal_functions
from keystroke.analysis.audit.memory.pointers import PointerFlow
from keystroke.analysis.audit.project import ProjectFacts
from keystroke.analysis.audit.rules.catalog import LANGUAGES, FixSpec
from keystroke.analysis.audit.rules.match import RuleMatch, RuleMatcher, index_of
from keystroke.analysis.audit.rules.triggers import FLOW, SILENT, WORD, triggers_of, words_of
from keystroke.analysis.audit.rules.wrappers import hidden_builtins, shell_wrappers
from keystroke.analysis.audit.source import ir
from keystroke.analysis.audit.source.lower import Lowering
from keystroke.analysis.audit.source.lower.c import CLowering
from keystroke.analysis.audit.source.lower.go import GoLowering
from keystroke.analysis.audit.source.lower.java import JavaLowering
from keystroke.analysis.audit.source.lower.javascript import ScriptLowering
from keystroke.analysis.audit.source.lower.python import PythonLowering
from keystroke.analysis.audit.source.suppress import suppress
from keystroke.analysis.audit.source.units import FileOutline, SourceUnit, outline_of, resplit, split
from keystroke.errors import InputError, Interrupted, NotFound
from keystroke.text import Edit, apply_edits

MAX_TEXT = 4_000_000  # characters; beyond this a file is data, not source
MAX_LINE = 20_000  # a longer line is minified or generated
# Languages in which a call is evaluated with the body of the called function. In the others a key in a helper
# would audit all its callers again; in C this is done for functions with few callers.
INLINED_LANGUAGES = ("java", "javascript", "typescript", "tsx", "go")
# Languages whose functions are walked statement by statement from remembered effects.
REMEMBERED = ("python", "javascript", "typescript", "tsx")
MAX_CALLERS = 3  # C functions with more callers are not evaluated at their calls
MAX_PROVED_ALONE = 6  # fixes of one unit; more are proved together
MAX_KEPT_RESULTS = 400  # results of units no longer in the text, kept for undo
_LOWERINGS: dict[str, type[Lowering]] = {
    "python": PythonLowering,
    "javascript": ScriptLowering,
    "c": CLowering,
    "go": GoLowering,
    "java": JavaLowering,
}


@dataclass(frozen=True, slots=True)
class _Found:
    """A finding and its fixes, relative to the unit."""

    finding: Finding
    offers: tuple[UnitFix, ...]


@dataclass(frozen=True, slots=True)
class _Result:
    found: tuple[_Found, ...]
    names: frozenset[str]
    called: dict[str, str]  # functions of the file that its walk looked up, with their texts; "" for none
    apart: bool  # whether the file defined no functions to look up
    reach: frozenset[str]  # names whose meaning outside the unit matters: its own and those of `called`


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A fix that was built for the match with this number, and is not proved yet."""

    number: int
    match: RuleMatch
    spec: FixSpec
    site: FixSite
    fix: FixEdits


class Auditor:
    """Audits texts of one language."""

    def __init__(
        self,
        language: str,
        *,
        honour_others: bool = False,
        helpers: Mapping[str, str] | None = None,
        project: ProjectFacts | None = None,
    ) -> None:
        """`helpers` maps functions of the project to what a call of each runs; see rules/wrappers.py.

        `project`: evidence for safe fixes, without which some are only suggested, and macros of headers.
        """
        self.project = project
        _check_language(language)
        self.language = language
        self.honour_others = honour_others
        self.helpers = dict(helpers or {})

    def audit(self, text: str) -> tuple[Finding, ...]:
        live = LiveAudit(
            self.language,
            text,
            honour_others=self.honour_others,
            remember=False,
            helpers=self.helpers,
            project=self.project,
        )
        return live.findings


class LiveAudit:
    """The audit of one buffer, updated by each edit."""

    def __init__(
        self,
        language: str,
        text: str = "",
        *,
        honour_others: bool = False,
        remember: bool = True,
        helpers: Mapping[str, str] | None = None,
        project: ProjectFacts | None = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        _check_language(language)
        self._helpers = dict(helpers or {})
        self._project = project
        self.language = language
        self.honour_others = honour_others
        self.abandoned = abandoned  # called between units; True stops the audit
        self._remember = remember  # keeps the effects of statements for the next edit
        self._lowering = _LOWERINGS[family_of(language)]()
        self._index = index_of(language)
        self._triggers = triggers_of(language)
        self._knowledge = load_knowledge(language)
        self._results: OrderedDict[tuple[str, str], _Result] = OrderedDict()
        self._context: Env = {}
        self._constants = ""  # string constants of the file
        self._imports: frozenset[str] = frozenset()  # imported paths
        self._memo = StatementMemo()
        self._outline_memo = StatementMemo()
        self._outline = FileOutline("", (0,), (0,))
        self._special: dict[str, str] = {}
        self._outline_found: tuple[_Found, ...] = ()
        self._units: list[SourceUnit] = []
        self._functions: dict[str, str] = {}
        self._alone: dict[str, frozenset[str]] = {}
        self._lowered: dict[str, ir.Function | None] = {}
        self._lookups: dict[str, str] = {}  # functions looked up by the audit of the current unit
        self._words: dict[str, frozenset[str]] = {}
        self.text = ""
        self.findings: tuple[Finding, ...] = ()
        self.replace(text)

    def replace(self, text: str) -> tuple[Finding, ...]:
        """Replaces the whole text; results of unchanged units are reused."""
        check_text(text)
        self.text = text
        self._units = split(text, self.language)
        return self._refresh()

    def edit(self, start: int, end: int, replacement: str) -> tuple[Finding, ...]:
        """Replaces `[start, end)` and audits what changed."""
        if not 0 <= start <= end <= len(self.text):
            raise InputError(
                f"an edit of {start} to {end} does not lie in a text of {len(self.text)} characters"
            )
        text = self.text[:start] + replacement + self.text[end:]
        check_text(text)
        self.text = text
        self._units = resplit(text, self.language, self._units, start, end, len(replacement) - (end - start))
        return self._refresh()

    # One pass over the units

    def _refresh(self) -> tuple[Finding, ...]:
        text = self.text
        outline = outline_of(text, self._units, self.language)
        self._functions = {}  # the outline depends on its own text alone
        special = self._special_functions()
        if outline.text != self._outline.text or special != self._special:
            self._special = special
            self._read_outline(outline)
        self._outline = outline
        if self.language in INLINED_LANGUAGES:
            defined = self._defined_functions()
            self._functions = {name: body for name, body in defined.items() if len(body) <= MAX_INLINED}
        elif self.language in ("c", "cpp"):
            self._functions = self._with_few_callers(self._defined_functions())
        placed: list[tuple[_Found, int]] = []
        for unit in self._units:
            if unit.skipped:
                continue
            if self.abandoned():
                raise Interrupted("Nobody waits for this audit any more.")
            source = text[unit.start : unit.end]
            key = (source, unit.before)
            result = self._results.get(key)
            if result is None or not self._is_current(result):
                result = self._audit_unit(source, unit)
                self._results[key] = result
            else:
                self._results.move_to_end(key)
            placed.extend((found, unit.start) for found in result.found)
        while len(self._results) > len(self._units) + MAX_KEPT_RESULTS:
            self._results.popitem(last=False)
        findings = [self._place(found, at) for found, at in placed]
        findings += [
            item for found in self._outline_found if (item := self._place_outline(found, outline)) is not None
        ]
        findings.sort(key=lambda item: (item.start, item.end, item.rule))
        self.findings = suppress(text, findings, self.honour_others)
        return self.findings

    def _special_functions(self) -> dict[str, str]:
        """Functions that pass a parameter to a shell, run as threads, handle signals or hide a builtin."""
        if self.language in ("c", "cpp"):
            return thread_and_signal_functions(self.text)
        if self.language != "python":
            return {}
        wrappers = shell_wrappers(self.text[unit.start : unit.end] for unit in self._units)
        return {**self._helpers, **hidden_builtins(self.text), **wrappers}

    def _read_outline(self, outline: FileOutline) -> None:
        before, imports = self._context, self._imports
        self._lookups = {}
        macros = self._header_macros(outline.text)
        matches, env, _ = self._walk(outline.text, macros, 0)
        env = {**macros, **env}
        self._imports = imported(outline.text, self.language).union(
            value.path for value in env.values() if value.path
        )
        if imports != self._imports:  # fixes depend on the imports
            for key in [key for key, result in self._results.items() if result.found]:
                del self._results[key]
        # A function may run at any time, so allocations at file level say nothing about it.
        env = {
            name: replace(value, memory=_lasting(value.memory)) if value.memory is not None else value
            for name, value in env.items()
            if not name.startswith("#")
        }
        for name, kind in self._special.items():
            env[name] = env[f"self.{name}"] = Value(path=kind)
        self._context = env
        self._constants = "\n".join(
            value.const for value in env.values() if isinstance(value.const, str) and len(value.const) < 400
        )
        changed = {
            name
            for name in before.keys() | env.keys()
            if (old := before.get(name)) is not (new := env.get(name)) and old != new
        }
        if changed:
            self._memo.forget(changed)
            self._alone.clear()
            for key in [key for key, result in self._results.items() if result.reach & changed]:
                del self._results[key]
        self._outline_found = self._with_fixes(matches, outline.text, {}, 0)

    def _header_macros(self, outline: str) -> Env:
        """What the macros of the project's own headers stand for."""
        if self._project is None or self.language not in ("c", "cpp"):
            return {}
        macros = self._project.macros(outline)
        return self._walk("".join(f"#define {name} {value}\n" for name, value in macros.items()), {}, 0)[1]

    def _audit_unit(self, source: str, unit: SourceUnit) -> _Result:
        names, calls = words_of(source)
        needed = FLOW
        self._lookups = {}
        if self.language not in ("c", "cpp"):
            needed = self._triggers.required_analysis(
                source, names, calls, self._context, not self._functions
            )
        if needed == SILENT:  # no rule can match
            return self._result((), names)
        whole = unit.before + source + unit.after
        shift = len(unit.before)
        words = "\n".join((unit.before, unit.after, *names))
        matches, _, _ = self._walk(whole, self._context, shift, needed == FLOW, words)
        found = self._with_fixes(matches, whole, self._context, shift)
        return self._result(found, names)

    def _result(self, found: tuple[_Found, ...], names: frozenset[str]) -> _Result:
        called = self._lookups
        reach = names.union(*map(self._names, called.values()))
        return _Result(found, names, called, not self._functions, reach)

    def _is_current(self, result: _Result) -> bool:
        """Whether the functions that an audit depended on are unchanged."""
        table = self._functions
        return result.apart == (not table) and all(
            table.get(name, "") == text for name, text in result.called.items()
        )

    def _function_text(self, name: str) -> str:
        return self._functions.get(name, "")

    def _with_few_callers(self, table: dict[str, str]) -> dict[str, str]:
        """The functions with at most MAX_CALLERS callers."""
        counts: Counter[str] = Counter()
        for unit in self._units:
            source = self.text[unit.start : unit.end]
            result = self._results.get((source, unit.before))
            counts.update((result.names if result is not None else self._names(source)) & table.keys())
        # The definition itself counts as one.
        return {name: source for name, source in table.items() if 1 < counts[name] <= MAX_CALLERS + 1}

    def _reported_alone(self, name: str) -> frozenset[str]:
        """The rules that a function breaks by itself; they are reported there and not at its calls."""
        source = self._lookups[name] = self._functions.get(name, "")
        if source not in self._alone:
            if len(self._alone) > MAX_KEPT_RESULTS:
                self._alone.clear()
            table, self._functions = self._functions, {}
            lookups, self._lookups = self._lookups, {}
            lowering, self._lowering = self._lowering, _LOWERINGS[family_of(self.language)]()
            try:
                matches, _, _ = self._walk(source, self._context, 0)
            finally:
                self._functions, self._lowering, self._lookups = table, lowering, lookups
            self._alone[source] = frozenset(match.rule.id for match in matches)
        return self._alone[source]

    def _defined_functions(self) -> dict[str, str]:
        """Functions that exactly one unit defines, with the text of the unit as it is parsed."""
        found: dict[str, str] = {}
        twice: set[str] = set()
        for unit in self._units:
            if unit.skipped:
                continue
            source = self.text[unit.start : unit.end]
            match = _DEFINES.search(source)
            if match is not None:
                name = match[1] or match[2]
                if name in found:
                    twice.add(name)
                found[name] = unit.before + source + unit.after
        return {name: source for name, source in found.items() if name not in twice}

    def _names(self, text: str) -> frozenset[str]:
        if text not in self._words:
            if len(self._words) > MAX_KEPT_RESULTS:
                self._words.clear()
            self._words[text] = frozenset(WORD.findall(text))
        return self._words[text]

    def _function(self, name: str) -> ir.Function | None:
        """The lowered function of the file with this name."""
        source = self._functions.get(name)
        if source is None:
            return None
        if source not in self._lowered:
            if len(self._lowered) > MAX_KEPT_RESULTS:
                self._lowered.clear()
            # A separate lowering: self._lowering may be in the middle of another unit.
            self._lowered[source] = _first_function(
                _LOWERINGS[family_of(self.language)]().stmt(_parse(source, self.language)), name
            )
        return self._lowered[source]

    def _walk(
        self, source: str, env: Env, shift: int, data: bool = True, words: str = ""
    ) -> tuple[list[RuleMatch], Env, Any]:
        root = _parse(source, self.language)
        memory = self.language in ("c", "cpp")
        matcher_class = MemoryDetectors if memory else GoDetectors if self.language == "go" else Detectors
        matcher: RuleMatcher = matcher_class(self.language, self._index)
        flow = (PointerFlow if memory else DataFlow)(self.language, self._knowledge, matcher, env)
        matcher.flow = flow
        constants = self._constants if env else ""
        matcher.set_text(source + constants, words and words + constants)
        if self._remember and self.language in REMEMBERED and (env is self._context or not env):
            flow.memo = self._memo if env else self._outline_memo
            flow.error_spans = [
                (span.start.index, span.end.index)
                for span in (node.range() for node in root.find_all(kind="ERROR"))
            ]
        if self.language != "python":
            flow.find_function, flow.function_text = self._function, self._function_text
            flow.lookups = self._lookups
        if isinstance(flow, PointerFlow):
            flow.rules_broken_by = self._reported_alone
        try:
            if data:
                flow.run(self._lowering.stmt(root))
        except (ExhaustedError, RecursionError):
            flow.silent = 0  # generated code: keep what was found so far
        finally:
            self._lowering.depth = 0
        flow.silent = 0
        matcher.match_patterns(root)
        matcher.scan_text(root, source)
        matches = [match for match in matcher.matches.values() if match.start >= shift]
        return _distinct(matches), flow.env, root

    # Fixes

    def _with_fixes(self, matches: list[RuleMatch], source: str, env: Env, shift: int) -> tuple[_Found, ...]:
        imports = self._imports
        if any(match.rule.fixes for match in matches):
            imports = imports | imported(source, self.language)
        offers: list[list[UnitFix]] = [[] for _ in matches]
        rounds: list[list[_Attempt]] = []  # the first attempt of each match, the second of each match, ...
        for number, match in enumerate(matches):
            built = self._attempts(number, match, source, imports, shift)
            for at, attempt in enumerate(built):
                if at == len(rounds):
                    rounds.append([])
                rounds[at].append(attempt)
        for attempts in rounds:
            # Of several ways to make the same fix the first that is proved is offered.
            wanted = [
                item
                for item in attempts
                if not any(offer.title == item.spec.title for offer in offers[item.number])
            ]
            for item in self._keep_proved(wanted, matches, source, env):
                edits = tuple(
                    Edit(edit.start - shift, edit.end - shift, edit.text) for edit in item.fix.edits
                )
                changes = missing_evidence(item.site, item.spec)
                offers[item.number].append(UnitFix(item.spec.title, edits, item.fix.needs, changes))
        out: list[_Found] = []
        for match, made in zip(matches, offers, strict=True):
            span = (match.start - shift, match.end - shift)
            about = (match.rule.id, match.cwe, match.severity, match.message)
            finding = Finding(*about, *span, match.origin, also=match.rule.also)
            out.append(_Found(finding, tuple(made)))
        return _without_echoes(out, source[shift:])

    def _attempts(
        self, number: int, match: RuleMatch, source: str, imports: frozenset[str], shift: int
    ) -> Iterator[_Attempt]:
        """The fixes that can be built for a match, in the order of its rule."""
        for spec in match.rule.fixes if match.node is not None else ():
            self._lowering.depth = 0
            site = FixSite(match, self.language, source, imports, self._lowering.expr, self._project)
            fix = build(site, spec)
            if fix is not None and fix.edits[0].start >= shift:
                yield _Attempt(number, match, spec, site, fix)

    def _keep_proved(
        self, attempts: list[_Attempt], matches: list[RuleMatch], source: str, env: Env
    ) -> Iterator[_Attempt]:
        """The fixes after which their rule no longer matches and the text parses no worse.

        Each of a few is proved by an audit of the text with this fix alone. Many are proved together, so that
        the work does not grow with their number times the length of the text.
        """
        if not attempts:
            return
        errors = _errors(_parse(source, self.language))
        alone = len(attempts) <= MAX_PROVED_ALONE
        groups = [[item] for item in attempts] if alone else _without_overlaps(attempts)
        while groups:
            group = groups.pop(0)
            edits = tuple(sorted({edit for item in group for edit in item.fix.edits}, key=_edit_order))
            needs = tuple(dict.fromkeys(need for item in group for need in item.fix.needs))
            try:
                fixed = apply_edits(source, edits)
            except InputError:
                continue
            known = dict(env) if needs else env  # the same environment: effects are remembered
            for need in needs:
                name = bound_name(need, self.language)
                if name:
                    known[name] = Value(path=_bound_path(need, self.language))
            left, _, root = self._walk(fixed, known, 0)
            if _errors(root) <= errors:
                places = _Places(edits)
                yield from (item for item in group if _is_fixed(item, matches, left, places))
            elif len(group) > 1:
                half = len(group) // 2
                groups = [group[:half], group[half:], *groups]

    def _place(self, found: _Found, at: int) -> Finding:
        offers = [offer.move_by(at) for offer in found.offers]
        return with_fixes(found.finding.move_by(at), offers, self.text, self.language, self._context)

    def _place_outline(self, found: _Found, outline: FileOutline) -> Finding | None:
        finding = found.finding
        start = outline.origin(finding.start)
        end = outline.origin(max(finding.end - 1, finding.start)) + 1
        offers = [offer.from_outline(outline, self.text) for offer in found.offers]
        return with_fixes(
            replace(finding, start=start, end=max(end, start)),
            [offer for offer in offers if offer is not None],
            self.text,
            self.language,
            self._context,
        )


def _bound_path(need: str, language: str) -> str:
    """The path that the name bound by an import stands for."""
    if language != "python":
        return need
    words = need.split()
    if words[0] == "import":
        return words[1]
    return f"{words[1]}.{words[3]}"


_DEFINES = re.compile(r"\bfunc(?:tion)?\s+(?:\([^)]*\)\s*)?(\w+)|^[^({=]*?(\w+)\s*\(")


def _lasting(memory: Memory | None) -> Memory | None:
    """What is known of a global's memory whenever a function runs: the size of an array."""
    if memory is None or not memory.array:
        return None if memory is None or memory.block or memory.kind == "unset" else memory
    return replace(memory, block=0, length=None, kind="static", fresh=False)


def _first_function(stmts: list[ir.Stmt], name: str) -> ir.Function | None:
    for stmt in stmts:
        if isinstance(stmt, ir.FunctionStmt) and stmt.function.name == name:
            return stmt.function
        inside = (
            stmt.body
            if isinstance(stmt, ir.ClassStmt)
            else stmt.statements()
            if isinstance(stmt, ir.LazyStmt)
            else []
        )
        found = _first_function(inside, name)
        if found is not None:
            return found
    return None


def _check_language(language: str) -> None:
    if language not in LANGUAGES:
        raise NotFound(f"cannot audit {language!r}; known languages: {', '.join(LANGUAGES)}")


def check_text(text: str) -> None:
    """Raises InputError for text that is not source code."""
    if len(text) > MAX_TEXT:
        raise InputError(f"the text has {len(text)} characters; the audit reads at most {MAX_TEXT}")
    if "\0" in text:
        raise InputError("the text holds NUL characters: it is binary, not source")


_SURROGATE = re.compile("[\ud800-\udfff]")


def _parse(source: str, language: str) -> ir.Syntax:
    try:
        return SgRoot(source, language).root()
    except UnicodeEncodeError:  # bytes that were not UTF-8: one placeholder each keeps the offsets
        return SgRoot(_SURROGATE.sub("?", source), language).root()


_NEW_SCOPE = re.compile(r"=>|\bfunction\b|\blambda\b|\bdef\b|;\s*\n|\)\s*\{\s*\n|\b(?:else|try|do)\s*\{\s*\n")


def _without_echoes(found: list[_Found], source: str) -> tuple[_Found, ...]:
    """Each weakness once: of a match inside another of its rule, the one that can be fixed, or the inner.

    A match inside a function that is an argument of the outer one is a weakness of its own.
    """
    dropped: set[int] = set()
    around: dict[str, list[_Found]] = {}  # by rule, the matches that contain the present one, outermost first
    for inner in sorted(found, key=lambda item: (item.finding.start, -item.finding.end)):
        open_ones = around.setdefault(inner.finding.rule, [])
        while open_ones and open_ones[-1].finding.end < inner.finding.end:
            open_ones.pop()
        outer = open_ones[-1] if open_ones else None
        if outer is not None and not _NEW_SCOPE.search(source, outer.finding.start, inner.finding.start):
            dropped.add(id(inner if outer.offers and not inner.offers else outer))
        open_ones.append(inner)
    return tuple(item for item in found if id(item) not in dropped)


def _errors(root: ir.Syntax) -> int:
    return len(root.find_all(kind="ERROR"))


def _edit_order(edit: Edit) -> tuple[int, int]:
    return edit.start, edit.end


def _without_overlaps(attempts: list[_Attempt]) -> list[list[_Attempt]]:
    """The fixes in groups whose edits do not overlap; equal edits may share a group."""
    groups: list[list[_Attempt]] = []
    taken: list[tuple[set[Edit], int]] = []  # the edits of each group and the end of the last
    for item in sorted(attempts, key=lambda item: item.fix.edits[0].start):
        edits, start = set(item.fix.edits), item.fix.edits[0].start
        at = next((at for at, (known, end) in enumerate(taken) if edits <= known or start > end), len(groups))
        if at == len(groups):
            groups.append([])
            taken.append((set(), 0))
        known, end = taken[at]
        known |= edits
        taken[at] = known, max(end, item.fix.edits[-1].end)
        groups[at].append(item)
    return groups


class _Places:
    """Where the positions of a text are after edits."""

    def __init__(self, edits: tuple[Edit, ...]) -> None:
        self._ends: list[int] = []
        self._moved: list[int] = [0]
        for edit in edits:
            self._ends.append(edit.end)
            self._moved.append(self._moved[-1] + edit.delta)

    def after(self, at: int) -> int:
        return at + self._moved[bisect_right(self._ends, at)]


def _is_fixed(item: _Attempt, matches: list[RuleMatch], left: list[RuleMatch], places: _Places) -> bool:
    """Whether fewer matches of the same weakness remain where the fix was made."""
    match, edits = item.match, item.fix.edits
    start, end = min(match.start, edits[0].start), max(match.end, edits[-1].end)
    moved = places.after(start - 1) + 1  # an insertion at the start belongs to the fix
    own = any(edit.end == match.end for edit in edits)  # another fix may insert at the end of the match
    last = places.after(match.end) if own else places.after(match.end - 1) + 1
    return _count(left, match, moved, places.after(end), last) < _count(matches, match, start, end, match.end)


def _count(matches: list[RuleMatch], about: RuleMatch, start: int, end: int, last: int) -> int:
    """How many matches of the same weakness overlap a span and end at `last` or later."""
    return sum(
        match.rule.id == about.rule.id
        and match.cwe == about.cwe
        and match.start < end
        and match.end > start
        and match.end >= last
        for match in matches
    )


def _distinct(matches: list[RuleMatch]) -> list[RuleMatch]:
    """One match per CWE and start: the most severe, then the first by rule id."""
    best: dict[tuple[int, int], RuleMatch] = {}
    for match in matches:
        key = (match.start, match.cwe)
        known = best.get(key)
        if known is None or (-match.severity.rank, match.rule.id) < (-known.severity.rank, known.rule.id):
            best[key] = match
    return sorted(best.values(), key=lambda match: (match.start, match.end, match.rule.id))
