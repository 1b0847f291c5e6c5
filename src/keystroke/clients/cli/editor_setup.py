"""Writes the configuration of editors and agents that use Keystroke, and takes it back.

Each writer computes the files it would change and writes nothing itself. A setting that is there already is
never replaced: the writer says what to add by hand instead.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keystroke.config.jsonc import JsoncConflict, add_key

SERVER = "http://127.0.0.1:8012"
_PACKAGE = Path(__file__).resolve().parents[2]
_CHECKOUT = _PACKAGE.parents[1]
# The servers that Helix starts by itself, which a list in languages.toml replaces.
_HELIX_SERVERS = {
    "python": ("ty", "ruff", "jedi", "pylsp"),
    "javascript": ("typescript-language-server",),
    "typescript": ("typescript-language-server",),
    "go": ("gopls", "golangci-lint-lsp"),
    "java": ("jdtls",),
    "c": ("clangd",),
    "cpp": ("clangd",),
}


@dataclass(frozen=True, slots=True)
class UserFolders:
    """Where this user's programs keep their configuration, and how `keystroke` is started."""

    home: Path
    config: Path
    command: str = "keystroke"
    system: str = sys.platform
    plugin: Path | None = None  # the folder of the Neovim plugin

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> UserFolders:
        home = Path(environ.get("HOME") or Path.home())
        config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
        return cls(home, config, _command(), plugin=neovim_plugin())

    def application(self, name: str) -> Path:
        """The configuration folder of an Electron program."""
        if self.system == "darwin":
            return self.home / "Library" / "Application Support" / name
        if self.system == "win32":
            return self.home / "AppData" / "Roaming" / name
        return self.config / name


@dataclass(frozen=True, slots=True)
class EditorChange:
    """What to write, and how to go on. `missing`: what could not be written and must be added by hand."""

    files: Mapping[Path, str]
    hint: str
    missing: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()  # to run, beside the files
    undo: tuple[tuple[str, ...], ...] = ()  # commands that take those back


@dataclass(frozen=True, slots=True)
class EditorWriter:
    """One program. `is_found`: whether this user seems to have it."""

    name: str
    title: str
    programs: tuple[str, ...]
    folder: Callable[[UserFolders], Path]
    plan: Callable[[UserFolders], EditorChange] = field(repr=False)

    def is_found(self, folders: UserFolders) -> bool:
        return any(map(shutil.which, self.programs)) or self.folder(folders).is_dir()


def neovim_plugin() -> Path | None:
    """The folder of the Neovim plugin: inside the package, or in the checkout it runs from."""
    places = (_PACKAGE / "editors" / "neovim", _CHECKOUT / "editors" / "neovim")
    return next((place for place in places if (place / "lua").is_dir()), None)


def _command() -> str:
    """The program as an editor can start it: a path, unless it is on the PATH."""
    if shutil.which("keystroke"):
        return "keystroke"
    beside = Path(sys.executable).with_name("keystroke")
    return str(beside) if beside.exists() else "keystroke"


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _add_keys(
    file: Path, additions: Mapping[tuple[str, ...], Any]
) -> tuple[dict[Path, str], tuple[str, ...]]:
    """The file with each key added; what is there already stays and is reported."""
    text = before = _read_text(file)
    missing: list[str] = []
    for path, value in additions.items():
        try:
            text = add_key(text, path, value)
        except JsoncConflict as error:
            missing.append(f"{file}: {error}; to use Keystroke, set {'.'.join(path)} to {json.dumps(value)}")
    return ({file: text} if text != before else {}), tuple(missing)


def _change_toml(file: Path, change: Callable[[Any], None], hint: str, page: str) -> EditorChange:
    """The file with `change` made to its document. `page` describes what to do by hand where it cannot be
    made."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    before = _read_text(file)
    try:
        document: Any = tomlkit.parse(before)
        change(document)
    except (TOMLKitError, TypeError, AttributeError) as error:
        return EditorChange({}, "", (f"{file} cannot be changed by this program ({error}); see {page}",))
    after = tomlkit.dumps(document)
    return EditorChange({file: after} if after != before else {}, hint)


def _vscode(folders: UserFolders) -> EditorChange:
    files: dict[Path, str] = {}
    missing: tuple[str, ...] = ()
    if folders.command != "keystroke":
        file = folders.application("Code") / "User" / "settings.json"
        files, missing = _add_keys(file, {("keystroke.command",): folders.command})
    package = _extension()
    if package is None:
        return EditorChange(
            files,
            "run `make editors` in a clone, then: code --install-extension dist/keystroke.vsix",
            missing,
        )
    if shutil.which("code") is None:
        return EditorChange(files, f"install the extension from {package} in the view Extensions", missing)
    return EditorChange(
        files,
        "open a file and type; Tab accepts a suggestion",
        missing,
        commands=(("code", "--install-extension", str(package)),),
        undo=(("code", "--uninstall-extension", "keystroke.keystroke"),),
    )


def _extension() -> Path | None:
    """The built VS Code extension: inside the package, or in the checkout it runs from."""
    places = (_PACKAGE / "editors" / "keystroke.vsix", _CHECKOUT / "dist" / "keystroke.vsix")
    return next((place for place in places if place.exists()), None)


def _neovim(folders: UserFolders) -> EditorChange:
    file = folders.config / "nvim" / "plugin" / "keystroke.lua"
    command = json.dumps([folders.command, "lsp"])[1:-1]
    if folders.plugin is None:
        text = (
            "-- Written by `keystroke setup`; `keystroke setup --undo` removes it.\n"
            f"vim.lsp.config('keystroke', {{ cmd = {{ {command} }}, root_markers = {{ '.git' }} }})\n"
            "vim.lsp.enable('keystroke')\n"
            "if vim.lsp.inline_completion then vim.lsp.inline_completion.enable() end\n"
        )
    else:
        text = (
            "-- Written by `keystroke setup`; `keystroke setup --undo` removes it.\n"
            f"vim.opt.runtimepath:prepend({json.dumps(str(folders.plugin))})\n"
            f"require('keystroke').setup({{ cmd = {{ {command} }} }})\n"
        )
    found = _read_text(file)
    if found and not found.startswith("-- Written by `keystroke setup`"):
        return EditorChange({}, "", (f"{file} exists; add to it by hand:\n{text}",))
    return EditorChange(
        {file: text} if found != text else {}, "open a file and type; Tab accepts a suggestion"
    )


def _zed(folders: UserFolders) -> EditorChange:
    file = (
        folders.application("Zed") if folders.system == "win32" else folders.config / "zed"
    ) / "settings.json"
    completions = {
        "api_url": f"{SERVER}/v1/completions",
        "model": "zeta2",
        "prompt_format": "zeta2",
        "max_output_tokens": 256,
    }
    files, missing = _add_keys(
        file,
        {
            ("edit_predictions", "provider"): "open_ai_compatible_api",
            ("edit_predictions", "open_ai_compatible_api"): completions,
            ("agent_servers", "Keystroke"): {"command": folders.command, "args": ["acp"]},
        },
    )
    return EditorChange(files, "start `keystroke serve`, then open a file in Zed and type", missing)


def _helix(folders: UserFolders) -> EditorChange:
    import tomlkit

    def change(document: Any) -> None:
        servers = document.setdefault("language-server", tomlkit.table(is_super_table=True))
        if "keystroke" not in servers:
            servers["keystroke"] = {"command": folders.command, "args": ["lsp"]}
        languages = document.setdefault("language", tomlkit.aot())
        for name, usual in _HELIX_SERVERS.items():
            entry = next((one for one in languages if one.get("name") == name), None)
            if entry is None:
                entry = tomlkit.table()
                entry["name"] = name
                entry["language-servers"] = [*usual, "keystroke"]
                languages.append(entry)
            elif "language-servers" not in entry:
                entry["language-servers"] = [*usual, "keystroke"]
            elif not any(_is_keystroke(one) for one in entry["language-servers"]):
                entry["language-servers"].append("keystroke")

    file = folders.config / "helix" / "languages.toml"
    hint = "open a file; `space a` lists the fixes of a finding"
    return _change_toml(file, change, hint, "docs/editors/helix.md")


def _is_keystroke(server: Any) -> bool:
    return server == "keystroke" or (isinstance(server, dict) and server.get("name") == "keystroke")


def _jetbrains(folders: UserFolders) -> EditorChange:
    agent = {"command": _absolute(folders.command), "args": ["acp"]}
    files, missing = _add_keys(
        folders.home / ".jetbrains" / "acp.json", {("agent_servers", "Keystroke"): agent}
    )
    hint = (
        "choose the agent Keystroke in the AI chat (needs `pip install 'keystroke[acp]'`); for findings "
        f"and fixes install the plugin LSP4IJ and add the server `{_absolute(folders.command)} lsp`"
    )
    return EditorChange(files, hint, missing)


def _absolute(command: str) -> str:
    """An IDE started from a menu does not know the PATH of the shell."""
    return shutil.which(command) or command


def _codex(folders: UserFolders) -> EditorChange:
    import tomlkit

    def change(document: Any) -> None:
        providers = document.setdefault("model_providers", tomlkit.table(is_super_table=True))
        if "keystroke" not in providers:
            providers["keystroke"] = {
                "name": "Keystroke",
                "base_url": f"{SERVER}/v1",
                "wire_api": "responses",
                "supports_websockets": True,
            }

    file = Path(os.environ.get("CODEX_HOME") or folders.home / ".codex") / "config.toml"
    hint = "start `keystroke serve`, then: codex -c model_provider=keystroke -m auto"
    return _change_toml(file, change, hint, "docs/clients.md")


def _claude(folders: UserFolders) -> EditorChange:
    file = folders.home / ".claude" / "keystroke.json"
    values = {
        "ANTHROPIC_BASE_URL": SERVER,
        "ANTHROPIC_AUTH_TOKEN": "local",
        "ANTHROPIC_MODEL": "auto",
        "ANTHROPIC_SMALL_FAST_MODEL": "fast",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    files, missing = _add_keys(file, {("env",): values})
    return EditorChange(files, f"start `keystroke serve`, then: claude --settings {file}", missing)


def _opencode(folders: UserFolders) -> EditorChange:
    folder = folders.config / "opencode"
    file = next(
        (p for p in (folder / "opencode.json", folder / "opencode.jsonc") if p.exists()),
        folder / "opencode.json",
    )
    limit = {"context": 32768, "output": 2048}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Keystroke",
        "options": {"baseURL": f"{SERVER}/v1", "apiKey": "local"},
        "models": {
            name: {"name": name, "tool_call": True, "limit": limit} for name in ("auto", "fast", "deep")
        },
    }
    files, missing = _add_keys(file, {("provider", "keystroke"): provider})
    return EditorChange(files, "start `keystroke serve`, then: opencode -m keystroke/auto", missing)


EDITORS = {
    writer.name: writer
    for writer in (
        EditorWriter("vscode", "VS Code", ("code",), lambda f: f.application("Code"), _vscode),
        EditorWriter("neovim", "Neovim", ("nvim",), lambda f: f.config / "nvim", _neovim),
        EditorWriter("zed", "Zed", ("zed", "zeditor"), lambda f: f.config / "zed", _zed),
        EditorWriter("helix", "Helix", ("hx", "helix"), lambda f: f.config / "helix", _helix),
        EditorWriter(
            "jetbrains", "JetBrains", ("idea", "pycharm"), lambda f: f.application("JetBrains"), _jetbrains
        ),
        EditorWriter("codex", "Codex", ("codex",), lambda f: f.home / ".codex", _codex),
        EditorWriter("claude", "Claude Code", ("claude",), lambda f: f.home / ".claude", _claude),
        EditorWriter("opencode", "opencode", ("opencode",), lambda f: f.config / "opencode", _opencode),
    )
}
