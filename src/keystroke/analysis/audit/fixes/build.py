"""From a match and a rule's word on its fix to edits.

A fix is built from the rule's data and the syntax at hand; where a piece is missing, or what the fixed
code would do is not known, there is none. The auditor looks at the fixed text once more; that a kind of fix
is right is shown by running it, in the tests.
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
from keystroke.analysis.audit.fixes.site import Repair, Site
from keystroke.analysis.audit.rules.catalog import FixSpec

Fixer = Callable[[Site, FixSpec], Repair | None]

FIXERS: dict[str, Fixer] = {
    "sql-parameters": sql.parameters,
    "shell-quote": shell.quoted,
    "shell-arguments": shell.exec_file,
    "shell-positional": shell.positional,
    "wrap": wrapping.wrapped,
    "wrap-assigned": wrapping.wrapped_assigned,
    "told-nothing": small.told_nothing,
    "checked-again": small.checked_again,
    "anchor": paths.anchored,
    "text-property": scripts.text_property,
    "text-method": scripts.text_method,
    "options": scripts.options,
    "text-values": scripts.text_values,
    "guarded-key": scripts.guarded_key,
    "every-match": scripts.every_match,
    "random-number": scripts.random_number,
    "buffer-from": scripts.buffer_from,
    "last-dropped": scripts.last_dropped,
    "cut-opener": scripts.cut_opener,
    "java-parameters": java.parameters,
    "insert-before": java.inserted,
    "closed-parser": java.closed_parser,
    "exec-words": java.exec_words,
    "temporary": java.temporary,
    "bounded-copy": c_calls.bounded_copy,
    "bounded-print": c_calls.bounded_print,
    "as-text": c_calls.as_text,
    "read-line": c_calls.read_line,
    "scan-width": c_calls.scan_width,
    "zeroed": c_calls.zeroed,
    "room": c_calls.room,
    "checked-pointer": c_statements.checked_pointer,
    "guarded-index": c_statements.guarded_index,
    "guarded-length": c_statements.guarded_length,
    "guarded-division": c_statements.guarded_division,
    "checked-arithmetic": c_statements.checked_arithmetic,
    "initialised": c_statements.initialised,
    "released": c_statements.released,
    "forgotten": c_statements.forgotten,
    "kept-block": c_statements.kept_block,
    "pointed-size": c_statements.pointed_size,
    "matching-release": c_statements.matching_release,
    "removed": c_statements.removed,
    "verified-peer": c_statements.verified_peer,
    "compared": c_statements.compared,
    "static-array": c_statements.static_array,
    "local-target": small.local_target,
    "mask": small.masked,
    "change": small.changed,
    "xpath-variables": small.xpath_variables,
    "assertion": small.assertion,
    "random-source": small.random_source,
    "owned-temporary": small.owned_temporary,
}


def build(site: Site, spec: FixSpec) -> Repair | None:
    """The edits on the parsed text, or None where this fix does not apply."""
    if spec.array >= 0:
        args = site.match.args
        memory = args[spec.array].memory if spec.array < len(args) else None
        if memory is None or not memory.array:
            return None
    if spec.only:
        if site.call is None:
            return None
        start, end = templates.callee_span(site.call)
        if not spec.only.search(site.text[start:end]):
            return None
    if spec.path and not spec.path.search(site.path):
        return None
    if spec.alone and not site.alone(site.match.node):
        return None
    if spec.unless and spec.unless.search(site.function(site.match.node).text()):
        return None
    fixer = FIXERS[spec.fixer] if spec.fixer else templates.filled
    repair = fixer(site, spec)
    if repair is None or not repair.edits:
        return None
    needs = tuple(need for need in (*repair.needs, spec.imports) if need)
    return Repair(tuple(sorted(repair.edits, key=lambda edit: (edit.start, edit.end))), needs)
