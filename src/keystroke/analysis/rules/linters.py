"""Style settings of a project's formatters and linters: ruff, black, prettier, rustfmt.

Reads settings files as data and runs nothing. A file that is too large or cannot be parsed is ignored.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from keystroke.analysis.rules.settings_file import read_settings

_PYTHON = frozenset({"python"})
_PRETTIER = frozenset({"javascript", "typescript", "tsx", "css", "html", "json", "yaml"})


def linter_style(folder: Path, root: Path | None, language: str | None) -> dict[str, Any]:
    """`line_length`, `quotes` ("single" or "double"), `indent_width` and `tabs`, as far as they are set."""
    if language in _PYTHON:
        return _nearest_settings(folder, root, _python_style)
    if language in _PRETTIER:
        return _nearest_settings(folder, root, _prettier_style)
    if language == "rust":
        return _nearest_settings(folder, root, _rust_style)
    if language == "go":
        return {"tabs": True}
    return {}


def _nearest_settings(folder: Path, root: Path | None, read: Any) -> dict[str, Any]:
    for parent in (folder, *folder.parents):
        found: dict[str, Any] | None = read(parent, root)
        if found is not None:
            return found
        if parent == root:
            break
    return {}


def _python_style(folder: Path, root: Path | None) -> dict[str, Any] | None:
    for name in ("ruff.toml", ".ruff.toml"):
        table = _read_toml(folder / name, root)
        if table:
            return _ruff_settings(table)
    table = _read_toml(folder / "pyproject.toml", root)
    tools = _as_table(table, "tool")
    found: dict[str, Any] = {}
    if isinstance(tools.get("black"), dict):
        black = tools["black"]
        found["line_length"] = black.get("line-length", black.get("line_length", 88))
        if not black.get("skip-string-normalization", False):
            found["quotes"] = "double"
    if isinstance(tools.get("ruff"), dict):
        found.update(_ruff_settings(_as_table(tools, "ruff")))
    return _valid_settings(found) if found else None


def _ruff_settings(table: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "line-length" in table:
        found["line_length"] = table["line-length"]
    if "indent-width" in table:
        found["indent_width"] = table["indent-width"]
    form = _as_table(table, "format")
    if form.get("indent-style") == "tab":
        found["tabs"] = True
    lint = {**table, **_as_table(table, "lint")}
    selected = [*_string_list(lint.get("select")), *_string_list(lint.get("extend-select"))]
    if "quote-style" in form:
        found["quotes"] = form["quote-style"]
    elif "format" in table or any(rule in ("ALL", "Q") or rule.startswith("Q0") for rule in selected):
        found["quotes"] = _as_table(lint, "flake8-quotes").get("inline-quotes", "double")
    return _valid_settings(found)


def _prettier_style(folder: Path, root: Path | None) -> dict[str, Any] | None:
    for name in (".prettierrc", ".prettierrc.json"):
        if (folder / name).is_file():
            return _prettier_settings(_read_json(folder / name, root) or _simple_yaml(folder / name, root))
    package = _read_json(folder / "package.json", root)
    if isinstance(package.get("prettier"), dict):
        return _prettier_settings(package["prettier"])
    return None


def _prettier_settings(table: dict[str, Any]) -> dict[str, Any]:
    return _valid_settings(
        {
            "line_length": table.get("printWidth", 80),
            "indent_width": table.get("tabWidth", 2),
            "tabs": table.get("useTabs") in (True, "true"),
            "quotes": "single" if table.get("singleQuote") in (True, "true") else "double",
        }
    )


def _rust_style(folder: Path, root: Path | None) -> dict[str, Any] | None:
    for name in ("rustfmt.toml", ".rustfmt.toml"):
        table = _read_toml(folder / name, root)
        if table:
            return _valid_settings(
                {
                    "line_length": table.get("max_width", 100),
                    "indent_width": table.get("tab_spaces", 4),
                    "tabs": table.get("hard_tabs") is True,
                }
            )
    return None


def _valid_settings(found: dict[str, Any]) -> dict[str, Any]:
    """The valid values among those of a settings file."""
    kept: dict[str, Any] = {}
    for key, low, high in (("line_length", 20, 1000), ("indent_width", 1, 16)):
        value = found.get(key)
        if isinstance(value, str) and value.isdecimal():
            value = int(value[:6])
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            kept[key] = value
    if found.get("quotes") in ("single", "double"):
        kept["quotes"] = found["quotes"]
    if isinstance(found.get("tabs"), bool):
        kept["tabs"] = found["tabs"]
    return kept


def _read_toml(path: Path, root: Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads(read_settings(path, root))
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}


def _read_json(path: Path, root: Path | None) -> dict[str, Any]:
    try:
        value = json.loads(read_settings(path, root))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _simple_yaml(path: Path, root: Path | None) -> dict[str, Any]:
    """The `key: value` lines of a prettier file in YAML."""
    pairs = re.findall(r"^(\w+)\s*:\s*[\"']?(\w+)[\"']?\s*$", read_settings(path, root), re.MULTILINE)
    return dict(pairs)


def _as_table(value: Any, key: str) -> dict[str, Any]:
    inner = value.get(key) if isinstance(value, dict) else None
    return inner if isinstance(inner, dict) else {}


def _string_list(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
