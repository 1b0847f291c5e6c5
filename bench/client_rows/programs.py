"""The programs that do the tasks: coding clients, unchanged and in their usual mode, and vendors' packages.

Each runs in a home of its own. What is not installed is fetched once, from npm or PyPI, into the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import platformdirs

CODEX, CLAUDE, OPENCODE, CONTINUE, AIDER = "0.169.0", "2.1.326", "1.18.33", "1.5.47", "0.86.2"
COPILOT, QWEN = "1.0.102", "0.24.4"
_CACHE = platformdirs.user_cache_path("keystroke-bench", appauthor=False)


@dataclass(frozen=True)
class Ran:
    """How a program ended: within its time, and what it printed last."""

    in_time: bool
    said: str


class Program:
    name: str
    version: str
    api: str  # which it speaks
    title: str

    def __init__(self, place: Path | None = None) -> None:
        self._program = place or self._installed()

    def do(self, url: str, folder: Path, prompt: str, limit: float) -> Ran:
        """Ask for one task in `folder`."""
        home = _CACHE / "homes" / f"{self.name}-{uuid.uuid4().hex[:8]}"
        home.mkdir(parents=True)
        try:
            command, environment = self._command(url, folder, prompt, home)
            # PWD as a shell would set it: opencode takes it for the folder it works in.
            return _run(command, folder, {**os.environ, "PWD": str(folder), **environment}, limit)
        finally:
            shutil.rmtree(home, ignore_errors=True)

    def _installed(self) -> Path:
        raise NotImplementedError

    def _command(self, url: str, folder: Path, prompt: str, home: Path) -> tuple[list[str], dict[str, str]]:
        raise NotImplementedError


class Codex(Program):
    name, version, api = "codex", CODEX, "Responses (WebSocket)"
    title = "Codex CLI"

    def _installed(self) -> Path:
        return _from_npm("codex", f"@openai/codex@{CODEX}")

    def _command(self, url: str, folder: Path, prompt: str, home: Path) -> tuple[list[str], dict[str, str]]:
        catalog = home / "models.json"
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            catalog.write_bytes(answer.read())
        (home / "config.toml").write_text(
            f'model = "fast"\nmodel_provider = "keystroke"\nmodel_catalog_json = "{catalog}"\n'
            'approval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
            'check_for_update_on_startup = false\nweb_search = "disabled"\n'
            "[analytics]\nenabled = false\n[features]\napps = false\nplugins = false\n"
            f'[model_providers.keystroke]\nname = "Keystroke"\nbase_url = "{url}/v1"\nenv_key = "BENCH_KEY"\n'
            'wire_api = "responses"\nsupports_websockets = true\n'
            "stream_idle_timeout_ms = 3600000\n"
        )
        command = [str(self._program), "exec", "--skip-git-repo-check", "--ephemeral", "--json"]
        return [*command, "-C", str(folder), prompt], {"CODEX_HOME": str(home), "BENCH_KEY": "x"}


class Opencode(Program):
    name, version, api = "opencode", OPENCODE, "Chat Completions"
    title = "opencode"

    def _installed(self) -> Path:
        return _from_npm("opencode", f"opencode-ai@{OPENCODE}")

    def _command(self, url: str, folder: Path, prompt: str, home: Path) -> tuple[list[str], dict[str, str]]:
        limit = {"context": 32768, "output": 2048}
        model = {"name": "fast", "tool_call": True, "limit": limit}
        options = {"baseURL": f"{url}/v1", "apiKey": "x", "timeout": 3_600_000}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "Keystroke", "options": options}
        settings = {
            "provider": {"keystroke": {**provider, "models": {"fast": model}}},
            "model": "keystroke/fast",
            "small_model": "keystroke/fast",
            "autoupdate": False,
            "share": "disabled",
        }
        (home / "opencode.json").write_text(json.dumps(settings))
        environment = {
            "HOME": str(home),
            "XDG_DATA_HOME": str(home / "data"),
            "XDG_CONFIG_HOME": str(home / "config"),
            "OPENCODE_CONFIG": str(home / "opencode.json"),
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
        return [str(self._program), "run", "-m", "keystroke/fast", prompt], environment


class ClaudeCode(Program):
    name, version, api = "claude", CLAUDE, "Messages"
    title = "Claude Code"

    def _installed(self) -> Path:
        return _from_npm("claude", f"@anthropic-ai/claude-code@{CLAUDE}")

    def _command(self, url: str, folder: Path, prompt: str, home: Path) -> tuple[list[str], dict[str, str]]:
        environment = {
            "HOME": str(home),
            "CLAUDE_CONFIG_DIR": str(home),
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "local",
            "ANTHROPIC_MODEL": "fast",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "fast",
            "API_TIMEOUT_MS": "3600000",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        return [str(self._program), "-p", prompt, "--permission-mode", "acceptEdits"], environment


class Continue(Program):
    name, version, api = "continue", CONTINUE, "Chat Completions"
    title = "Continue CLI"

    def _installed(self) -> Path:
        return _from_npm("cn", f"@continuedev/cli@{CONTINUE}")

    def _command(self, url: str, folder: Path, prompt: str, home: Path) -> tuple[list[str], dict[str, str]]:
        config = home / "config.yaml"
        config.write_text(
            "name: local\nversion: 1.0.0\nschema: v1\nmodels:\n"
            f"  - {{name: Keystroke, provider: openai, model: fast, apiBase: {url}/v1, apiKey: local}}\n"
        )
        environment = {"HOME": str(home), "CONTINUE_TELEMETRY_ENABLED": "0"}
        return [str(self._program), "--config", str(config), "--auto", "-p", prompt], environment


class Copilot(Program):
    name, version, api = "copilot", COPILOT, "Chat Completions"
    title = "Copilot CLI"

    def _installed(self) -> Path:
        return _from_npm("copilot", f"@github/copilot@{COPILOT}")

    def _command(self, url: str, folder: Path, prompt: str, home: Path) -> tuple[list[str], dict[str, str]]:
        environment = {
            "HOME": str(home),
            "COPILOT_PROVIDER_BASE_URL": f"{url}/v1",
            "COPILOT_PROVIDER_API_KEY": "local",
            "COPILOT_MODEL": "fast",
            "COPILOT_OFFLINE": "true",
        }
        return [str(self._program), "-p", prompt, "--allow-all-tools", "--no-color"], environment


class QwenCode(Program):
    name, version, api = "qwen", QWEN, "Chat Completions"
    title = "Qwen Code"

    def _installed(self) -> Path:
        return _from_npm("qwen", f"@qwen-code/qwen-code@{QWEN}")

    def _command(self, url: str, folder: Path, prompt: str, home: Path) -> tuple[list[str], dict[str, str]]:
        environment = {
            "HOME": str(home),
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "local",
            "OPENAI_MODEL": "fast",
        }
        return [str(self._program), "--auth-type", "openai", "--yolo", "-p", prompt], environment


class Package(Program):
    """A small agent over a vendor's Python package."""

    def _installed(self) -> Path:
        return Path(sys.executable)

    def _command(self, url: str, folder: Path, prompt: str, home: Path) -> tuple[list[str], dict[str, str]]:
        root = Path(__file__).parents[2]
        command = [str(self._program), "-m", "bench.client_rows.packages"]
        return [*command, self.name, url, str(folder), prompt], {"PYTHONPATH": str(root), "HOME": str(home)}


class OpenaiPackage(Package):
    name, version, api = "openai", metadata.version("openai"), "Responses"
    title = "`openai` package"


class AnthropicPackage(Package):
    name, version, api = "anthropic", metadata.version("anthropic"), "Messages"
    title = "`anthropic` package"


class OllamaPackage(Package):
    name, version, api = "ollama", metadata.version("ollama"), "Ollama"
    title = "`ollama` package"


class Aider(Program):
    name, version, api = "aider", AIDER, "Chat Completions"
    title = "aider"

    def _installed(self) -> Path:
        folder = _CACHE / f"aider-{AIDER}"
        program = folder / "bin" / "aider"
        if not program.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            subprocess.run([str(folder / "bin" / "pip"), "install", "-q", f"aider-chat=={AIDER}"], check=True)
        return program

    def _command(self, url: str, folder: Path, prompt: str, home: Path) -> tuple[list[str], dict[str, str]]:
        files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
        command = [str(self._program), "--model", "openai/fast", "--openai-api-base", f"{url}/v1"]
        command += ["--openai-api-key", "x", "--yes-always", "--no-git", "--no-check-update", "--no-pretty"]
        command += ["--no-show-model-warnings", "--analytics-disable", "--no-show-release-notes"]
        command += ["--timeout", "3600", "--message", prompt, *files]
        return command, {"HOME": str(home)}


_ALL = (
    Codex, ClaudeCode, Opencode, Continue, Aider, Copilot, QwenCode,
    OpenaiPackage, AnthropicPackage, OllamaPackage,
)  # fmt: skip
PROGRAMS: dict[str, type[Program]] = {program.name: program for program in _ALL}


def _from_npm(program: str, package: str) -> Path:
    folder = _CACHE / package.replace("/", "-")
    found = folder / "node_modules" / ".bin" / program
    if not found.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit(f"npm is not installed, so {package} cannot be had; give its place instead")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text("{}")
        subprocess.run([npm, "install", "--no-audit", "--no-fund", package], cwd=folder, check=True)
    return found


def _run(command: Sequence[str], folder: Path, environment: dict[str, str], limit: float) -> Ran:
    """In a group of its own, so that what it started ends with it."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
        return Ran(True, said)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return Ran(False, said)
