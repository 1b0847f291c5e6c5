"""The project rules of one file: style and instructions for prompts.

`format_insertion` changes only indentation, line ends, and quotes of strings that stay equal; it never
touches existing text. Instructions of the project (AGENTS.md) are data for prompts and are not executed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from keystroke.analysis.rules.editorconfig import editorconfig_properties
from keystroke.analysis.rules.linters import linter_style
from keystroke.analysis.rules.settings_file import read_settings
from keystroke.analysis.syntax import language_of

INSTRUCTIONS = ("AGENTS.md", "CLAUDE.md", ".github/copilot-instructions.md")
_HEADER = 1500  # characters of a project's instructions that a prompt carries
_MARKS = (".git", "pyproject.toml", "package.json", "Cargo.toml", "go.mod", "AGENTS.md")
_INDENT = re.compile(r"[ \t]+")
_SIMPLE_STRING = re.compile(r"(?<![\w'\"\\])(?P<quote>['\"])(?!\1\1)(?P<body>[^'\"\\\n{}]*)(?P=quote)")


@dataclass(frozen=True, slots=True)
class ProjectRules:
    """A field is None if the project does not set it."""

    root: Path | None = None
    language: str | None = None
    tabs: bool | None = None
    indent_width: int | None = None
    max_line: int | None = None
    quotes: str | None = None  # "single" or "double"
    final_newline: bool | None = None
    trim: bool | None = None
    instructions: str = ""

    def format_insertion(self, inserted: str, line: str = "") -> str:
        """`inserted` in the project's style. `line` is the text left of it: inside a string or a comment
        quotes are not changed."""
        first, newline, others = inserted.partition("\n")
        lines = [first, *([self._indent_line(one) for one in others.split("\n")] if newline else [])]
        if self.trim is not False:
            lines = [one.rstrip() for one in lines[:-1]] + lines[-1:]
        text = "\n".join(lines)
        if self.quotes is not None and _is_outside_text(line):
            text = self._requote(text)
        return text

    def with_final_newline(self, text: str) -> str:
        """A file's text with a final newline, if the project requires one."""
        if self.final_newline and text and not text.endswith("\n"):
            return text + "\n"
        return text

    def prompt_header(self) -> str:
        """A short text for the start of a prompt; equal for all files of a kind, so that it is cached."""
        sentences: list[str] = []
        if self.tabs is not None or self.indent_width:
            sentences.append(
                "Indent with tabs." if self.tabs else f"Indent with {self.indent_width or 4} spaces."
            )
        if self.max_line:
            sentences.append(f"Lines have at most {self.max_line} characters.")
        if self.quotes:
            sentences.append(f"Strings are in {self.quotes} quotes.")
        if self.instructions:
            sentences.append(f"The project's own instructions:\n{self.instructions}")
        return "\n".join(sentences)

    def _indent_line(self, line: str) -> str:
        found = _INDENT.match(line)
        if found is None or self.tabs is None:
            return line
        width = self.indent_width or 4
        if self.tabs:
            columns = len(found[0].expandtabs(width))
            return "\t" * (columns // width) + " " * (columns % width) + line[found.end() :]
        return found[0].expandtabs(width) + line[found.end() :]

    def _requote(self, text: str) -> str:
        wanted = '"' if self.quotes == "double" else "'"
        return _SIMPLE_STRING.sub(lambda m: f"{wanted}{m['body']}{wanted}", text)


def project_rules(
    path: str | Path, root: str | Path | None = None, language: str | None = None
) -> ProjectRules:
    """The rules for `path`, which need not exist. `root` bounds the search and is detected if not given."""
    file = Path(path).absolute()
    top = Path(root).absolute() if root is not None else _root_of(file)
    if top is not None and not file.is_relative_to(top):
        top = None
    language = language or language_of(file.name)
    given = editorconfig_properties(file, top)
    tool = linter_style(file.parent, top, language)
    return ProjectRules(
        root=top,
        language=language,
        tabs=_choose_tabs(given, tool),
        indent_width=_choose_width(given, tool),
        max_line=_parse_number(given.get("max_line_length"), 20, 1000) or tool.get("line_length"),
        quotes=tool.get("quotes") or _parse_quotes(given.get("quote_type")),
        final_newline=_parse_flag(given.get("insert_final_newline")),
        trim=_parse_flag(given.get("trim_trailing_whitespace")),
        instructions=_read_instructions(top),
    )


def _root_of(file: Path) -> Path | None:
    for folder in file.parents:
        if any((folder / mark).exists() for mark in _MARKS):
            return folder
    return None


def _choose_tabs(given: dict[str, str], tool: dict[str, object]) -> bool | None:
    if given.get("indent_style") in ("tab", "space"):
        return given["indent_style"] == "tab"
    tabs = tool.get("tabs")
    return tabs if isinstance(tabs, bool) else None


def _choose_width(given: dict[str, str], tool: dict[str, object]) -> int | None:
    width = given.get("indent_size", "")
    if width == "tab":
        width = given.get("tab_width", "")
    found = _parse_number(width, 1, 16) or tool.get("indent_width")
    return found if isinstance(found, int) else None


def _parse_number(text: str | None, low: int, high: int) -> int | None:
    if text is None or not text.isdecimal() or len(text) > 6:
        return None
    return int(text) if low <= int(text) <= high else None


def _parse_quotes(text: str | None) -> str | None:
    return text if text in ("single", "double") else None


def _parse_flag(text: str | None) -> bool | None:
    return {"true": True, "false": False}.get(text or "")


def _read_instructions(root: Path | None) -> str:
    if root is None:
        return ""
    for name in INSTRUCTIONS:
        kept = read_settings(root / name, root).strip()
        if not kept:
            continue
        return kept if len(kept) <= _HEADER else kept[:_HEADER].rpartition("\n")[0]
    return ""


def _is_outside_text(line: str) -> bool:
    """Whether the end of `line` is outside strings and comments."""
    quote = ""
    for index, sign in enumerate(line):
        if quote:
            if sign == quote and line[index - 1] != "\\":
                quote = ""
        elif sign in "'\"`":
            quote = sign
        elif sign == "#" or line.startswith("//", index):
            return False
    return not quote
