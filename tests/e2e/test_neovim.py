"""The Neovim plugin in a real Neovim, driven by keys: ghost text, next edit, edit, tasks, status, health.

Takes the `nvim` of the PATH, or the one that `TEST_NVIM` names; skipped where there is none of 0.10 or newer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lsp_support import RunningServer, scripted_model, serving

PLUGIN = Path(__file__).parents[2] / "editors" / "neovim"
KEYSTROKE = Path(sys.executable).with_name("keystroke")
PATIENCE = 60.0  # seconds; a loaded machine is slow, not wrong
CALC = "def add(a, b):\n    return a - b\n\n\ndef sub(a, b):\n    return a + b\n"
RIGHT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
AREA = "def area(width, height):\n    return width * height\n\n\nprint(area(2, 3))\n"


def neovim() -> str | None:
    """A Neovim that is new enough."""
    path = os.environ.get("TEST_NVIM") or shutil.which("nvim")
    if path is None:
        return None
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    found = re.match(r"NVIM v(\d+)\.(\d+)", said)
    return path if found and (int(found[1]), int(found[2])) >= (0, 10) else None


NVIM = neovim()
pytestmark = pytest.mark.skipif(NVIM is None, reason="no Neovim of 0.10 or newer; TEST_NVIM=PATH names one")


def answers(prompt: str) -> str:
    if "[user]" in prompt:
        return "```\ncount = 1\nprint(count)\n```" if "Rename" in prompt else f"{RIGHT}```\n"
    return "\n" if "silent" in prompt else "total + 1\n"


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(
        scripted_model(answers, "small", step_cost=0.002), folder=tmp_path_factory.mktemp("gateway")
    ) as running:
        yield running


class Editor:
    """A Neovim without a terminal; keys go in and Lua answers over its socket."""

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)

    def keys(self, keys: str) -> None:
        self._ask("--remote-send", keys)

    def lua(self, expression: str) -> Any:
        quoted = f"vim.json.encode({{ {expression} }})".replace("'", "''")
        found = json.loads(self._ask("--remote-expr", f"luaeval('{quoted}')"))
        return found[0] if found else None

    def until(self, expression: str, holds: Callable[[Any], bool] = bool) -> Any:
        """Wait until a Lua expression holds; its value."""
        ends = time.monotonic() + PATIENCE
        while not holds(value := self.lua(expression)):
            assert time.monotonic() < ends, f"{expression} stayed {value!r}"
            time.sleep(0.05)
        return value

    def text(self) -> str:
        return str(self.lua("table.concat(vim.api.nvim_buf_get_lines(0, 0, -1, false), '\\n')"))

    def ghost(self, text: str) -> None:
        self.until("require('keystroke.ghost').text()", lambda shown: shown == text)

    def _ask(self, *arguments: str) -> str:
        assert NVIM is not None
        done = subprocess.run(
            [NVIM, "--server", self._socket, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout or done.stderr


@contextmanager
def editing(folder: Path, name: str, text: str, gateway: RunningServer, *options: str) -> Iterator[Editor]:
    assert NVIM is not None
    (folder / name).write_text(text)
    command = json.dumps([str(KEYSTROKE), "lsp", "--gateway", gateway.url])
    (folder / "init.lua").write_text(
        f"vim.opt.runtimepath:prepend({json.dumps(str(PLUGIN))})\n"
        f"vim.o.swapfile = false\nvim.o.statusline = \"%f  %{{v:lua.require'keystroke'.status()}}\"\n"
        f"require('keystroke').setup({{ cmd = vim.json.decode([==[{command}]==]) }})\n"
    )
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("KEYSTROKE_", "NVIM"))}
    clean |= {"XDG_STATE_HOME": str(folder / "state"), "XDG_DATA_HOME": str(folder / "data")}
    socket = folder / "nvim.sock"
    process = subprocess.Popen(
        [
            NVIM,
            "--clean",
            "--headless",
            "-u",
            str(folder / "init.lua"),
            "--listen",
            str(socket),
            *options,
            name,
        ],
        cwd=folder,
        env=clean,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ends = time.monotonic() + PATIENCE
        while not socket.exists():
            assert time.monotonic() < ends
            time.sleep(0.05)
        editor = Editor(socket)
        editor.until("vim.v.vim_did_enter == 1 and require('keystroke').client() ~= nil")
        editor.until("require('keystroke.health').told(require('keystroke').client()).connected == true")
        yield editor
    finally:
        process.terminate()
        process.wait(60)


def test_ghost_text_is_typed_through_and_taken_whole_by_word_and_by_line(
    tmp_path: Path, gateway: RunningServer
) -> None:
    with editing(tmp_path, "sum.py", "total = 0\n", gateway) as editor:
        editor.keys("ototal = ")
        editor.ghost("total + 1")
        editor.keys("to")
        editor.ghost("tal + 1")
        editor.keys("<C-Right>")
        editor.until("vim.api.nvim_get_current_line()", lambda line: line == "total = total")
        editor.ghost(" + 1")
        editor.keys("<Tab>")
        editor.until("vim.api.nvim_get_current_line()", lambda line: line == "total = total + 1")
        editor.keys("<Esc>ototal = ")
        editor.ghost("total + 1")
        editor.keys("<C-Down>")
        editor.until("vim.api.nvim_get_current_line()", lambda line: line == "total = total + 1")
        editor.keys("<Esc>ototal = ")
        editor.ghost("total + 1")
        editor.keys("<C-]>")
        editor.ghost("")
        editor.keys("<Esc>ox<Tab>y<Esc>")  # with nothing to take the key is itself
        editor.until("vim.api.nvim_get_current_line()", lambda line: re.fullmatch(r"x\s+y", line) is not None)


def test_the_status_names_the_model_and_the_reason_of_silence(tmp_path: Path, gateway: RunningServer) -> None:
    with editing(tmp_path, "sum.py", "total = 0\n", gateway) as editor:
        editor.keys("ototal = ")
        editor.until(
            "require('keystroke').status()", lambda said: re.match(r"small .*\d+ ms", said) is not None
        )
        editor.keys("<Esc>osilent = ")
        editor.until("require('keystroke').status()", lambda said: said.endswith(")"))
        editor.keys("<Esc>:KeystrokeToggle<CR>")
        editor.until("require('keystroke').status()", lambda said: said == "off")


def test_the_next_edit_is_gone_to_and_made_with_one_key(tmp_path: Path, gateway: RunningServer) -> None:
    with editing(tmp_path, "area.py", AREA, gateway) as editor:
        editor.keys("/width<CR>cw")
        for letter in "breadth":
            editor.keys(letter)
        editor.keys("<Esc>")
        editor.until("require('keystroke.next_edit').offered() ~= nil")
        editor.keys("<M-n>")
        editor.until("vim.api.nvim_win_get_cursor(0)[1]", lambda line: line == 2)
        editor.keys("<M-n>")
        editor.until(
            "vim.api.nvim_buf_get_lines(0, 1, 2, false)[1]",
            lambda line: line == "    return breadth * height",
        )


def test_a_range_is_edited_by_instruction(tmp_path: Path, gateway: RunningServer) -> None:
    with editing(tmp_path, "count.py", "x = 1\nprint(x)\n", gateway) as editor:
        editor.keys(":1,2KeystrokeEdit Rename x to count<CR>")
        editor.until(
            "table.concat(vim.api.nvim_buf_get_lines(0, 0, -1, false), ';')",
            lambda text: text == "count = 1;print(count)",
        )


def test_a_task_is_listed_taken_and_undone(tmp_path: Path, gateway: RunningServer) -> None:
    with editing(tmp_path, "calc.py", CALC, gateway) as editor:
        editor.keys(":KeystrokeTask make add in calc.py add<CR>")
        tasks = "require('keystroke.tasks')"
        editor.until(f"(({tasks}.known[{tasks}.order[1]] or {{}}).question or {{}}).id ~= nil")
        editor.keys(":KeystrokeTasks<CR>")
        editor.until("vim.bo.filetype", lambda kind: kind == "keystroke-tasks")
        editor.until("vim.fn.search('asking')")
        assert "-    return a - b" in editor.text()
        editor.keys("a1<CR>")  # all
        editor.until(f"{tasks}.known[{tasks}.order[1]].status", lambda status: status == "done")
        assert (tmp_path / "calc.py").read_text() == RIGHT
        editor.until("vim.fn.search('done')")
        editor.keys("u")
        editor.until(f"{tasks}.known[{tasks}.order[1]].status", lambda status: status == "undone")
        assert (tmp_path / "calc.py").read_text() == CALC


def test_health_says_what_works(tmp_path: Path, gateway: RunningServer) -> None:
    with editing(tmp_path, "sum.py", "total = 0\n", gateway) as editor:
        editor.keys("ototal = ")
        editor.ghost("total + 1")
        editor.keys("<Esc>:checkhealth keystroke<CR>")
        report = editor.until(
            "table.concat(vim.api.nvim_buf_get_lines(0, 0, -1, false), '\\n')",
            lambda text: "connected" in text,
        )
        assert "model small" in report
        assert "ERROR" not in report


def test_nothing_is_loaded_before_it_is_wanted() -> None:
    assert NVIM is not None
    asks = "io.write(tostring(package.loaded['keystroke'] == nil), vim.fn.exists(':KeystrokeTask'))"
    command = [NVIM, "--clean", "--headless", "--cmd", f"set runtimepath^={PLUGIN}", f"+lua {asks}", "+qa"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout or done.stderr).strip() == "true2"


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_person_sees_ghost_text_in_a_terminal(tmp_path: Path, gateway: RunningServer) -> None:
    """The same in a terminal; `KEYSTROKE_PICTURES=docs/pictures` keeps what it looks like."""
    with editing(tmp_path, "sum.py", "total = 0\n", gateway):
        """Writes init.lua; its Neovim goes, the one in the terminal stays."""
    room = ["tmux", "-L", f"keystroke-{os.getpid()}", "-f", "/dev/null"]
    clean = {n: v for n, v in os.environ.items() if not n.startswith(("KEYSTROKE_", "NVIM", "TMUX"))}
    command = (
        f"{NVIM} --clean -u init.lua +'set termguicolors background=dark laststatus=2 noshowmode' sum.py"
    )

    def tmux(*arguments: str) -> str:
        done = subprocess.run(
            [*room, *arguments],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout

    def until(text: str) -> None:
        ends = time.monotonic() + PATIENCE
        while text not in (seen := tmux("capture-pane", "-p")):
            assert time.monotonic() < ends, seen
            time.sleep(0.1)

    tmux("new-session", "-d", "-x", "80", "-y", "14", command)
    try:
        until("ready")
        tmux("send-keys", "-l", "ototal = ")
        until("total = total + 1")
        until(" ms")
        colours = tmux("capture-pane", "-e", "-p")
        save(colours, Path(os.environ.get("KEYSTROKE_PICTURES") or tmp_path) / "neovim.svg")
    finally:
        tmux("kill-server")


def save(colours: str, file: Path) -> None:
    """A terminal's screen as a picture."""
    from rich.console import Console
    from rich.text import Text

    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(colours.rstrip("\n")))
        console.save_svg(str(file), title="Neovim with Keystroke")
    assert file.stat().st_size < 200_000
