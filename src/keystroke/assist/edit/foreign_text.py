"""Finds and removes text in a file that belongs to the conversation and not to the file: markup of tool calls
and patches, sentences of prompts, line ends written as two characters.

Only text that a change adds is examined. Text in a string or in the instruction may be intended.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from keystroke.analysis.check.other_languages import LANGUAGES as CHECKED
from keystroke.analysis.check.other_languages import find_syntax_slips
from keystroke.analysis.syntax import error_count, parse_tree, walk

REMINDER = "Now do what was asked:"  # repeated to a small model after a tool's output

_MARKUP = re.compile(
    r"</?tool_call>|</?function_calls?>|<function=[\w.-]+>|</function>|</?parameter(?:=\w+| name=[^>]*)?>|"
    r"</?(?:antml:)?invoke(?: name=[^>]*)?>|<\|[a-z_]+\|>|</?think>|\[/?TOOL_CALLS?\]|"
    r"\*\*\* (?:Begin Patch|End Patch|(?:Add|Update|Delete) File: .*|End of File)|"
    r"<{5,9} SEARCH\b|>{5,9} REPLACE\b|"
    r'\{\s*"name"\s*:\s*"\w+"\s*,\s*"(?:arguments|parameters)"\s*:'
)
_SENTENCES = (
    REMINDER,
    "Rewrite only this part of ",
    "and leave the rest of the file out",
    "That cannot be used: ",
    "Write it again, corrected and complete",
    "You wrote the same code again. Make the change",
    "This is what fails now:",
    "An answer before this one was refused:",
    "The tests are right and this code is wrong",
    "Write the code that the task asks for, without placeholders",
)
_FENCE = re.compile(r"[ \t]*(?:`{3,}|~{3,})[\w+-]*[ \t]*")
_ESCAPED = re.compile(r"\\r\\n|\\n")
_PROSE = (".md", ".markdown", ".rst", ".txt", ".html", ".htm", ".xml", ".svg", ".jinja", ".j2", ".tmpl")


def syntax_error_count(text: str, language: str | None, path: str) -> int:
    """The number of syntax errors in a text; 0 for a language that cannot be parsed."""
    if path.endswith((".py", ".pyi")):
        return int(compile_error(text) is not None)
    if language is None:
        return 0
    return len(find_syntax_slips(text, language)) if language in CHECKED else error_count(text, language)


def compile_error(text: str) -> SyntaxError | None:
    """The error with which Python refuses a text."""
    try:
        compile(text, "text", "exec", dont_inherit=True)
    except SyntaxError as error:
        return error
    except ValueError:  # null bytes
        return SyntaxError("null bytes")
    except (MemoryError, RecursionError):  # raised for extremely nested texts
        return SyntaxError("too long or too deeply nested")
    return None


def remove_foreign_text(old: str, new: str, path: str, language: str | None, instruction: str) -> str:
    """`new` without what can be removed safely: whole lines of markup, fences and prompt sentences, and line
    ends written as two characters where the text parses with real ones."""
    lines = [
        line
        for line in new.splitlines(keepends=True)
        if not (_is_foreign_line(line, path) and line.strip() not in old and line.strip() not in instruction)
    ]
    return _unescape_line_ends(old, "".join(lines), path, language)


def find_foreign_text(old: str, new: str, path: str, language: str | None, instruction: str) -> str | None:
    """One clause that names the text that does not belong in the file; None where nothing is found."""
    for sentence in _SENTENCES:
        if new.count(sentence) > old.count(sentence) and sentence not in instruction:
            return f"it contains the sentence {sentence.strip()!r} of the conversation"
    for found in _find_markup(new, path, language):
        text = found.strip()
        if new.count(text) > old.count(text) and text not in instruction:
            return f"it contains {text[:60]!r}, which is markup of a tool call and not part of the file"
    if _has_escaped_line_ends(old, new, path, language):
        return "its line ends are written as the two characters \\n"
    return None


def _is_foreign_line(line: str, path: str) -> bool:
    text = line.strip()
    bare = text.lstrip("#/*-; ")
    if any(bare.startswith(sentence) for sentence in _SENTENCES):
        return True
    whole = _MARKUP.match(text)
    if whole is not None and (whole.end() == len(text) or not _MARKUP.sub("", text).strip()):
        return True
    return _FENCE.fullmatch(line.rstrip("\r\n")) is not None and bool(text) and not path.endswith(_PROSE)


def _find_markup(new: str, path: str, language: str | None) -> Iterator[str]:
    """The markup in a text. In code it counts outside of strings and comments, elsewhere at the start of a
    line."""
    found = list(_MARKUP.finditer(new))
    if not found:
        return
    if language is None or path.endswith(_PROSE):
        for match in found:
            if not new[new.rfind("\n", 0, match.start()) + 1 : match.start()].strip():
                yield match[0]
        return
    quoted = _quoted_spans(new, language)
    for match in found:
        if not any(start <= match.start() < end for start, end in quoted):
            yield match[0]


def _quoted_spans(text: str, language: str) -> list[tuple[int, int]]:
    return [
        (node.range().start.index, node.range().end.index)
        for node in walk(parse_tree(text, language))
        if re.search(r"string|comment|regex|char|template|heredoc|jsx_text|scalar", node.kind())
    ]


def _has_escaped_line_ends(old: str, new: str, path: str, language: str | None) -> bool:
    """Whether `new` has line ends written as two characters and `old` has none: outside of strings in a text
    that does not parse, or in a text that has lost most of its lines."""
    if _ESCAPED.search(new) is None:
        return False
    if language is not None and not path.endswith(_PROSE):
        if syntax_error_count(new, language, path) <= syntax_error_count(old, language, path):
            return False
        quoted = _quoted_spans(new, language)
        return any(
            not any(start <= found.start() < end for start, end in quoted) for found in _ESCAPED.finditer(new)
        )
    few = new.count("\n") <= max(1, old.count("\n") // 2)
    return few and len(_ESCAPED.findall(new)) > max(2, len(_ESCAPED.findall(old)))


def _unescape_line_ends(old: str, new: str, path: str, language: str | None) -> str:
    """`new` with real line ends in place of `\\n` written as two characters, where that adds no syntax
    error."""
    if not _has_escaped_line_ends(old, new, path, language):
        return new
    known = set(old.split("\n"))
    lines = new.split("\n")
    changed = [line if line in known else _unescape_line(line) for line in lines]
    text = "\n".join(changed)
    if language is None or syntax_error_count(text, language, path) <= syntax_error_count(
        old, language, path
    ):
        return text
    return new


def _unescape_line(line: str) -> str:
    text = _ESCAPED.sub("\n", line).replace("\\t", "\t")
    return text.replace('\\"', '"') if '\\"' in text else text
