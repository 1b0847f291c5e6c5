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
from keystroke.analysis.audit.fixes.site import FixEdits, FixSite, NoFix, needed, require
from keystroke.analysis.audit.rules.catalog import FixSpec

Fixer = Callable[[FixSite, FixSpec], FixEdits | None]

FIXERS: dict[str, Fixer] = {
    "sql-parameters": sql.bind_parameters,
    "shell-quote": shell.quote_values,
    "shell-arguments": shell.use_exec_file,
    "shell-positional": shell.use_positional_arguments,
    "wrap": wrapping.wrap_values,
    "wrap-assigned": wrapping.wrap_assigned_value,
    "hide-error": small.hide_error,
    "enable-check": small.enable_check,
    "anchor-names": paths.anchor_names,
    "text-property": scripts.use_text_property,
    "text-method": scripts.use_text_method,
    "options": scripts.set_options,
    "convert-to-text": scripts.convert_to_text,
    "guard-key": scripts.guard_key,
    "replace-every-match": scripts.replace_every_match,
    "random-number": scripts.use_secure_random,
    "buffer-from": scripts.use_buffer_factory,
    "drop-last-argument": scripts.drop_last_argument,
    "add-noopener": scripts.add_noopener,
    "java-parameters": java.bind_parameters,
    "insert-before": java.insert_before,
    "disable-external-entities": java.disable_external_entities,
    "exec-words": java.exec_word_list,
    "private-temporary-file": java.use_private_temporary_file,
    "bounded-copy": c_calls.bound_copy,
    "bounded-print": c_calls.bound_print,
    "as-text": c_calls.print_as_text,
    "read-line": c_calls.use_fgets,
    "scan-width": c_calls.add_scan_width,
    "use-calloc": c_calls.use_calloc,
    "enlarge-buffer": c_calls.enlarge_buffer,
    "checked-pointer": c_statements.check_pointer,
    "guarded-index": c_statements.guard_index,
    "guarded-length": c_statements.guard_length,
    "guarded-division": c_statements.guard_division,
    "checked-arithmetic": c_statements.check_arithmetic,
    "initialised": c_statements.initialise,
    "release-before-end": c_statements.release_before_end,
    "set-to-null": c_statements.set_to_null,
    "free-on-failed-realloc": c_statements.free_on_failed_realloc,
    "use-pointed-size": c_statements.use_pointed_size,
    "matching-release": c_statements.match_release,
    "remove-statement": c_statements.remove_statement,
    "verified-peer": c_statements.verify_peer,
    "use-comparison": c_statements.use_comparison,
    "static-array": c_statements.make_static,
    "restrict-redirect": small.restrict_redirect,
    "mask-mode": small.mask_mode,
    "correct-settings": small.correct_settings,
    "xpath-variables": small.bind_xpath_variables,
    "assertion": small.raise_assertion,
    "random-source": small.use_system_random,
    "owned-temporary": small.use_named_temporary_file,
}


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
        memory = needed(args[spec.array].memory if spec.array < len(args) else None)
        require(memory.array)
    if spec.only:
        start, end = templates.callee_span(needed(site.call))
        require(spec.only.search(site.text[start:end]))
    require(not spec.path or spec.path.search(site.path))
    require(not spec.alone or site.is_statement(site.match.node))
    require(not spec.unless or not spec.unless.search(site.enclosing_function(site.match.node).text()))
    return (FIXERS[spec.fixer] if spec.fixer else templates.fill_template)(site, spec)
