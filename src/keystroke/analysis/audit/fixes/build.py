"""Builds the edits of a fix from a match and the fix table of its rule.

There is no fix if a required part of the syntax is missing or the behaviour of the fixed code is unknown. The
auditor checks the fixed text again; the tests run the fixed code.
"""

from __future__ import annotations

from collections.abc import Callable

from keystroke.analysis.audit.fixes import (
    c_calls,
    c_statements,
    java,
    paths,
    scripts,
    shell,
    small,
    sql,
    templates,
    wrapping,
)
from keystroke.analysis.audit.fixes.site import FixEdits, FixSite, NoFix, require, required_value
from keystroke.analysis.audit.rules.catalog import FixSpec

Fixer = Callable[[FixSite, FixSpec], FixEdits | None]

_MODULES = (c_calls, c_statements, java, paths, scripts, shell, small, sql, wrapping)
_BY_NAME = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


def find_fixer(name: str) -> Fixer:
    """The fixer that a rule names: "sql.bind_parameters"."""
    module, _, function = name.partition(".")
    fixer: Fixer = getattr(_BY_NAME[module], function)
    return fixer


def build(site: FixSite, spec: FixSpec) -> FixEdits | None:
    """The edits of the parsed text, or None if the fix does not apply."""
    try:
        built = _built(site, spec)
    except NoFix:
        return None
    if built is None or not built.edits:
        return None
    needs = tuple(need for need in (*built.needs, spec.imports) if need)
    return FixEdits(tuple(sorted(built.edits, key=lambda edit: (edit.start, edit.end))), needs)


def _built(site: FixSite, spec: FixSpec) -> FixEdits | None:
    if spec.array >= 0:
        args = site.match.args
        memory = required_value(args[spec.array].memory if spec.array < len(args) else None)
        require(memory.array)
    if spec.only:
        start, end = templates.callee_span(required_value(site.call))
        require(spec.only.search(site.text[start:end]))
    require(not spec.path or spec.path.search(site.path))
    require(not spec.alone or site.is_statement(site.match.node))
    require(not spec.unless or not spec.unless.search(site.enclosing_function(site.match.node).text()))
    return (find_fixer(spec.fixer) if spec.fixer else templates.fill_template)(site, spec)
