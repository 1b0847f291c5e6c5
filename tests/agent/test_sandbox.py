"""What a command in the sandbox can do, and how each of its ways to misbehave ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from keystroke.agent.sandbox import (
    CommandLimits,
    ExitReason,
    Sandbox,
    SandboxKind,
    SandboxPolicy,
    credential_paths,
    find_sandbox,
    is_effective,
    probe,
)
from keystroke.agent.sandbox.environment import command_environment, paths_excluding, secret_files
from keystroke.agent.sandbox.policy import OutputBuffer
from keystroke.agent.sandbox.processes import process_tree
from keystroke.engine.base import Interrupt
from keystroke.errors import InputError, UsageError

HOLDING = [kind for kind in SandboxKind if kind is not SandboxKind.NONE and is_effective(Sandbox(kind))]
PYTHON = (sys.executable, "-I", "-S", "-c")
QUICK = CommandLimits(seconds=60, processes=100)
needs_sandbox = pytest.mark.skipif(not HOLDING, reason="no sandbox holds on this machine")


@pytest.fixture(params=HOLDING, ids=str)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return Sandbox(request.param)


@pytest.fixture
def place(tmp_path: Path) -> SandboxPolicy:
    root = tmp_path / "workspace"
    root.mkdir()
    return SandboxPolicy(root)


def python(text: str, *arguments: object) -> list[str]:
    return [*PYTHON, text, *map(str, arguments)]


def test_a_command_writes_the_workspace_and_its_exit_code_comes_back(
    sandbox: Sandbox, place: SandboxPolicy
) -> None:
    ended = sandbox.run(["sh", "-c", "echo said; echo text > made; exit 7"], place, QUICK)
    assert (ended.code, ended.output, ended.exit_reason) == (7, "said\n", ExitReason.EXITED)
    assert not ended.ok
    assert (place.root / "made").read_text() == "text\n"


def test_a_signal_is_told_as_a_signal(sandbox: Sandbox, place: SandboxPolicy) -> None:
    assert sandbox.run(["sh", "-c", "kill -9 $$"], place, QUICK).code == -9


def test_nothing_outside_the_workspace_is_written(
    sandbox: Sandbox, place: SandboxPolicy, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    (place.root / "link").symlink_to(tmp_path)
    script = f"echo x > {outside}; echo x > link/outside; echo x > ../outside; rm -rf {tmp_path}/kept; true"
    (tmp_path / "kept").write_text("mine")
    sandbox.run(["sh", "-c", script], place, QUICK)
    assert not outside.exists()
    assert (tmp_path / "kept").read_text() == "mine"


@pytest.mark.parametrize("network", [False, True])
def test_a_program_on_loopback_is_out_of_reach_with_and_without_network(
    sandbox: Sandbox, place: SandboxPolicy, network: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        direct = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 2)"
        proxied = (
            "import os, sys, urllib.request\n"
            "os.environ['no_proxy'] = os.environ['NO_PROXY'] = ''\n"
            "for host in ('127.0.0.1', 'localhost', '[::1]', '0.0.0.0', '[::ffff:127.0.0.1]', '127.1'):\n"
            "    try: print('REACHED', urllib.request.urlopen(f'http://{host}:{sys.argv[1]}/', timeout=2))\n"
            "    except Exception as error: print(error)\n"
        )
        policy = SandboxPolicy(place.root, network=network)
        port = listener.getsockname()[1]
        assert not sandbox.run(python(direct, port), policy, QUICK).ok
        assert "REACHED" not in sandbox.run(python(proxied, port), policy, QUICK).output
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_with_network_a_command_reaches_other_machines_through_the_proxy(
    sandbox: Sandbox, place: SandboxPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own proxy stands for the world: what it is asked for comes from the command."""
    with socket.create_server(("127.0.0.1", 0)) as world:
        monkeypatch.setenv("http_proxy", f"http://me:word@127.0.0.1:{world.getsockname()[1]}")
        for name in ("HTTP_PROXY", "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        asked: list[bytes] = []

        def answer() -> None:
            with world.accept()[0] as client:
                asked.append(client.recv(10_000))
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nthere")

        threading.Thread(target=answer, daemon=True).start()
        fetch = python(
            "import urllib.request; print(urllib.request.urlopen('http://192.0.2.7/file', timeout=20).read())"
        )
        ended = sandbox.run(fetch, SandboxPolicy(place.root, network=True), QUICK)
    assert "b'there'" in ended.output, ended.output
    assert asked[0].startswith(b"GET http://192.0.2.7/file HTTP/1.1\r\n")
    assert b"Proxy-Authorization: Basic bWU6d29yZA==" in asked[0]
    assert b"me:word" not in ended.output.encode()


def test_without_network_there_is_no_proxy(sandbox: Sandbox, place: SandboxPolicy) -> None:
    assert "proxy" not in sandbox.run(["env"], place, QUICK).output.lower()


def test_a_command_may_talk_to_itself(sandbox: Sandbox, place: SandboxPolicy) -> None:
    if not sandbox.kind.can_mount:
        pytest.skip("this sandbox shares the machine's network, so commands get no sockets")
    serve = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\nserver.accept()[0].sendall(b'x')\n"
        "assert client.recv(1) == b'x'\nlocal = socket.socket(socket.AF_UNIX)\nlocal.bind('socket')\n"
    )
    ended = sandbox.run(python(serve), place, QUICK)
    assert ended.ok, ended.output


def test_modes_and_times_change_inside_the_workspace(sandbox: Sandbox, place: SandboxPolicy) -> None:
    change = (
        "import os\nopen('file', 'w').close()\nos.mkdir('folder')\nos.symlink('file', 'link')\n"
        "os.chmod('file', 0o741)\nos.chmod(os.getcwd() + '/folder', 0o711)\nos.utime('file', (5, 6))\n"
        "os.utime('link', (7, 8), follow_symlinks=False)\nos.chown('file', os.getuid(), -1)\n"
        "os.lchown('link', -1, -1)\nfd = os.open('folder', os.O_RDONLY)\nos.utime('.', (1, 2), dir_fd=fd)\n"
        "os.fchmod(fd, 0o750)\nopen('/proc/self/fd/%d' % fd + '/inner', 'w').close()\n"
        "os.chmod('/proc/self/fd/%d/inner' % fd, 0o640)\n"
        "try: os.chmod('missing', 0o600)\nexcept FileNotFoundError: print('missing')\n"
    )
    ended = sandbox.run(python(change), place, QUICK)
    assert (ended.code, ended.output) == (0, "missing\n")
    file, link, folder = (place.root / name for name in ("file", "link", "folder"))
    assert file.stat().st_mode & 0o777 == 0o741
    assert folder.stat().st_mode & 0o777 == 0o750
    assert (folder / "inner").stat().st_mode & 0o777 == 0o640
    assert (file.stat().st_mtime, link.lstat().st_mtime) == (6, 8)


def test_an_interpreter_below_an_emptied_folder_is_lent(
    sandbox: Sandbox, place: SandboxPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation below /tmp works in the same sandbox as any other."""
    tools = tmp_path / "installation" / "bin"
    tools.mkdir(parents=True)
    (tools.parent / "data").write_text("there")
    (tools / "our-tool").write_text('#!/bin/sh\ncat "$(dirname "$0")/../data"\n')
    (tools / "our-tool").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    ended = sandbox.run(["sh", "-c", "our-tool; echo x > ../installation/data"], place, QUICK)
    assert ended.output.startswith("there")
    assert (tools.parent / "data").read_text() == "there"


def test_a_home_is_hidden_and_its_toolchains_are_lent(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for name in (
        ".config/git/credentials", ".cache/huggingface/token", ".codex/auth.json", ".vault-token", ".env",
        ".bash_history", "notes/diary", ".cargo/credentials.toml", ".anything/new",
    ):  # fmt: skip
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("hush")
    (home / ".cargo" / "bin").mkdir()
    (home / ".cargo" / "bin" / "tool").write_text("lent")
    workspace = home / "project"
    workspace.mkdir()
    (workspace / "file").write_text("mine")
    script = "grep -rs hush ~ ; cat ~/.cargo/bin/tool file; echo x > ~/.cargo/bin/tool; true"
    policy = SandboxPolicy(workspace, hidden=credential_paths())
    ended = sandbox.run(["sh", "-c", script], policy, QUICK)
    assert "hush" not in ended.output
    assert "lentmine" in ended.output
    assert (home / ".cargo" / "bin" / "tool").read_text() == "lent"


def test_udp_is_closed_too(sandbox: Sandbox, place: SandboxPolicy) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.settimeout(0.3)
        send = "import socket, sys; socket.socket(2, 2).sendto(b'x', ('127.0.0.1', int(sys.argv[1])))"
        sandbox.run(python(send, listener.getsockname()[1]), place, QUICK)
        with pytest.raises(TimeoutError):
            listener.recv(1)


def test_what_is_hidden_is_not_read(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "workspace").mkdir()
    folder, file = tmp_path / "keys", tmp_path / "token"
    folder.mkdir()
    (folder / "private").write_text("hush")
    file.write_text("hush")
    place = SandboxPolicy(tmp_path / "workspace", hidden=(folder, file))
    ended = sandbox.run(["sh", "-c", f"cat {folder}/private {file}; true"], place, QUICK)
    assert "hush" not in ended.output


def test_the_programs_own_folders_are_hidden_from_every_command(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    secrets = []
    for variable, name in (
        ("XDG_STATE_HOME", "state"),
        ("XDG_CONFIG_HOME", "config"),
        ("XDG_DATA_HOME", "data"),
        ("XDG_CACHE_HOME", "cache"),
        ("KEYSTROKE_PATHS_STATE", "elsewhere"),
    ):
        folder = tmp_path / name
        monkeypatch.setenv(variable, str(folder))
        secrets.append((folder if name == "elsewhere" else folder / "keystroke") / "gateways" / "token")
        secrets[-1].parent.mkdir(parents=True)
        secrets[-1].write_text("hush")
    (tmp_path / "data" / "keystroke" / "models").mkdir()  # a folder inside a hidden one
    (tmp_path / "workspace").mkdir()
    policy = SandboxPolicy(tmp_path / "workspace", network=True)
    ended = sandbox.run(["sh", "-c", f"cat {' '.join(map(str, secrets))}; echo ended"], policy, QUICK)
    assert "hush" not in ended.output
    assert "ended" in ended.output


def test_a_folder_beside_thousands_of_others_can_be_hidden(sandbox: Sandbox, tmp_path: Path) -> None:
    for number in range(1500):
        (tmp_path / f"{number:04}-{'x' * 120}").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("hush")
    (tmp_path / "workspace").mkdir()
    policy = SandboxPolicy(tmp_path / "workspace", hidden=(tmp_path / "secret",))
    ended = sandbox.run(["sh", "-c", f"cat {tmp_path}/secret/key; echo ended"], policy, QUICK)
    assert "hush" not in ended.output
    assert "ended" in ended.output


def test_a_workspace_inside_a_folder_of_the_program_stays_usable(
    sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "keystroke" / "workspace"
    root.mkdir(parents=True)
    assert sandbox.run(["sh", "-c", "echo text > made"], SandboxPolicy(root), QUICK).ok
    assert (root / "made").read_text() == "text\n"


def test_a_folder_is_seen_where_the_user_has_it(sandbox: Sandbox, tmp_path: Path) -> None:
    if not sandbox.kind.can_mount:
        pytest.skip("this sandbox cannot mount")
    copy, shown, installed = tmp_path / "copy", tmp_path / "project", tmp_path / "project" / "env"
    copy.mkdir()
    installed.mkdir(parents=True)
    (installed / "tool").write_text("there")
    (copy / "file").write_text("of the copy")
    (shown / "file").write_text("of the user")
    place = SandboxPolicy(copy, shown, {installed: installed})
    ended = sandbox.run(["sh", "-c", "pwd; cat file env/tool; echo x > env/tool; rm file"], place, QUICK)
    assert ended.output.startswith(f"{shown}\nof the copythere")
    assert (installed / "tool").read_text() == "there"
    assert (shown / "file").read_text() == "of the user"
    assert not (copy / "file").exists()


def test_the_environment_carries_no_keys(
    sandbox: Sandbox, place: SandboxPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hush")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    ended = sandbox.run(["env"], place, QUICK, env={"GIVEN": "1"})
    assert "hush" not in ended.output
    assert "SSH_AUTH_SOCK" not in ended.output
    assert "GIVEN=1" in ended.output
    assert "PATH=" in ended.output


def test_a_command_that_never_ends_is_stopped(sandbox: Sandbox, place: SandboxPolicy) -> None:
    limits = CommandLimits(seconds=0.6)
    ended = sandbox.run(["sleep", "1000"], place, limits)
    assert ended.exit_reason is ExitReason.TIMEOUT
    assert "within 0.6 seconds" in ended.describe(limits)


def test_a_gigabyte_of_output_is_cut_and_stopped(sandbox: Sandbox, place: SandboxPolicy) -> None:
    flood = python("import os\nblock = b'x' * 65536\nfor _ in range(16384): os.write(1, block)")
    ended = sandbox.run(flood, place, CommandLimits(seconds=60))
    assert ended.exit_reason is ExitReason.OUTPUT
    assert len(ended.output) < 70_000
    assert "bytes left out" in ended.output


def test_processes_that_multiply_are_stopped(sandbox: Sandbox, place: SandboxPolicy) -> None:
    """A bomb that ends by itself, should nothing else end it: 2**9 processes, asleep."""
    bomb = python("import os, time\nfor _ in range(9): os.fork()\ntime.sleep(30)")
    ended = sandbox.run(bomb, place, CommandLimits(seconds=60, processes=60))
    assert ended.exit_reason is ExitReason.PROCESSES or "BlockingIOError" in ended.output


def test_memory_of_all_processes_together_is_limited(sandbox: Sandbox, place: SandboxPolicy) -> None:
    hoard = python(
        "import os, time\nfor _ in range(3): os.fork()\nhoard = bytearray(60 << 20)\ntime.sleep(30)"
    )
    ended = sandbox.run(hoard, place, CommandLimits(seconds=60, memory=256 << 20))
    assert ended.exit_reason is ExitReason.MEMORY


def test_memory_of_one_process_is_limited(sandbox: Sandbox, place: SandboxPolicy) -> None:
    ended = sandbox.run(python("bytearray(1 << 30)"), place, CommandLimits(seconds=60, memory=256 << 20))
    assert not ended.ok


def test_a_file_without_end_is_cut(sandbox: Sandbox, place: SandboxPolicy) -> None:
    write = python("f = open('big', 'wb')\nfor _ in range(64): f.write(bytes(1 << 20))")
    assert not sandbox.run(write, place, CommandLimits(seconds=60, file=4 << 20)).ok
    assert (place.root / "big").stat().st_size <= 4 << 20


def test_what_a_command_leaves_behind_is_ended(sandbox: Sandbox, place: SandboxPolicy) -> None:
    script = "(setsid sh -c 'sleep 7.1; echo late > late' &) ; sleep 0.2; echo bye"
    ended = sandbox.run(["sh", "-c", script], place, QUICK)
    assert ended.output == "bye\n"
    assert not [p for p in process_tree(os.getpid()) if b"sleep\x007.1" in _command_line(p.pid)]


def test_an_interrupt_ends_the_whole_tree(sandbox: Sandbox, place: SandboxPolicy) -> None:
    interrupt = Interrupt()
    script = "sleep 8.25 & sleep 8.25 & echo ready; wait"
    heard = threading.Event()

    def stop() -> None:
        heard.wait(60)
        interrupt.set()

    threading.Thread(target=stop, daemon=True).start()
    ended = sandbox.run(["sh", "-c", script], place, QUICK, interrupt, on_output=lambda text: heard.set())
    assert ended.exit_reason is ExitReason.INTERRUPTED
    assert not [p for p in process_tree(os.getpid()) if b"sleep\x008.25" in _command_line(p.pid)]


def processes_naming(path: Path) -> list[str]:
    """Living processes with this path among their arguments."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes()  # empty of one that has ended
        except OSError:
            continue
        if os.fsencode(path) in arguments and folder.name != str(os.getpid()):
            found.append(arguments.replace(b"\0", b" ").decode(errors="replace")[:100])
    return found


def test_an_interrupt_in_the_first_moments_leaves_nothing(sandbox: Sandbox, place: SandboxPolicy) -> None:
    for number in range(20):
        interrupt = Interrupt()
        timer = threading.Timer(number / 1000, interrupt.set)
        timer.start()
        assert sandbox.run(["sleep", "600"], place, QUICK, interrupt).exit_reason is ExitReason.INTERRUPTED
        timer.join()
        assert processes_naming(place.root) == []


_KILLED = """
import os, signal, sys, time
from pathlib import Path
from keystroke.agent.sandbox import Sandbox, SandboxKind, SandboxPolicy
sandbox, policy = Sandbox(SandboxKind(sys.argv[1])), SandboxPolicy(Path(sys.argv[2]))
for number in range(60):
    child = os.fork()
    if not child:
        sandbox.run(["sleep", "600"], policy)
        os._exit(0)
    time.sleep(number / 1000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_a_program_killed_in_the_first_moments_of_a_command_leaves_nothing(
    sandbox: Sandbox, place: SandboxPolicy
) -> None:
    """No code of the program runs after that, so the command ends by itself, whatever has been started."""
    paths = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, "-c", _KILLED, sandbox.kind, str(place.root)],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )
    until = time.monotonic() + 60
    while processes_naming(place.root) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_naming(place.root) == []


def test_a_command_can_trace_no_process_of_its_sandbox(sandbox: Sandbox, place: SandboxPolicy) -> None:
    """It could make system calls through one without a filter, and stop the one that ends it."""
    script = """
import ctypes, os
ptrace = ctypes.CDLL(None).ptrace
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if pid != os.getpid() and ptrace(16, pid, 0, 0) == 0:
        print("traced", pid)
"""
    ended = sandbox.run(python(script), place, QUICK)
    assert (ended.output, ended.code) == ("", 0)


def test_a_command_may_delete_the_whole_workspace_and_nothing_else(
    sandbox: Sandbox, place: SandboxPolicy, tmp_path: Path
) -> None:
    (place.root / "file").write_text("text")
    (tmp_path / "beside").write_text("text")
    sandbox.run(["sh", "-c", "rm -rf .[!.]* * ..?* ../beside; true"], place, QUICK)
    assert not (place.root / "file").exists()
    assert (tmp_path / "beside").exists()


def test_a_command_that_is_not_there_says_so(sandbox: Sandbox, place: SandboxPolicy) -> None:
    ended = sandbox.run(["no-such-command-here"], place, QUICK)
    assert ended.code in (126, 127)
    assert "no-such-command-here" in ended.output


def test_power_over_the_system_is_given_up(sandbox: Sandbox, place: SandboxPolicy) -> None:
    script = "mount -o remount,rw / ; unshare -Ur mount -o remount,rw / ; echo x > /keystroke-test; true"
    sandbox.run(["sh", "-c", script], place, QUICK)
    assert not Path("/keystroke-test").exists()


# ── where nothing holds ───────────────────────────────────────────────────────────────────────


def test_without_a_sandbox_limits_still_hold(place: SandboxPolicy) -> None:
    bare = Sandbox(SandboxKind.NONE)
    assert not bare.confines
    assert bare.run(["sleep", "100"], place, CommandLimits(seconds=0.5)).exit_reason is ExitReason.TIMEOUT
    assert bare.run(["sh", "-c", "echo $TMPDIR; exit 3"], place, QUICK).code == 3


def test_a_tool_that_is_present_and_broken_counts_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not is_effective(Sandbox(SandboxKind.BUBBLEWRAP))


def test_a_tool_that_confines_nothing_counts_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_door = tmp_path / "bwrap"
    open_door.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n')
    open_door.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert not is_effective(Sandbox(SandboxKind.BUBBLEWRAP))


@needs_sandbox
def test_the_best_that_holds_is_found() -> None:
    find_sandbox.cache_clear()
    assert find_sandbox().kind is HOLDING[0]


def test_one_can_be_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    find_sandbox.cache_clear()
    try:
        monkeypatch.setenv(probe.FORCE, "none")
        assert find_sandbox().kind is SandboxKind.NONE
        find_sandbox.cache_clear()
        monkeypatch.setenv(probe.FORCE, "moat")
        with pytest.raises(UsageError, match="must be one of"):
            find_sandbox()
    finally:
        find_sandbox.cache_clear()


def test_nonsense_is_refused_before_anything_runs(place: SandboxPolicy) -> None:
    bare = Sandbox(SandboxKind.NONE)
    with pytest.raises(UsageError, match="no command"):
        bare.run([], place)
    with pytest.raises(InputError, match="NUL"):
        bare.run(["echo", "a\0b"], place)
    with pytest.raises(InputError, match="does not exist"):
        bare.run(["true"], SandboxPolicy(place.root / "missing"))


# ── parts ─────────────────────────────────────────────────────────────────────────────────────


def test_long_output_keeps_its_head_and_its_tail() -> None:
    kept = OutputBuffer(100)
    for number in range(1000):
        kept.add(f"{number}\n".encode())
    text = kept.text()
    assert text.startswith("0\n1\n")
    assert text.endswith("998\n999\n")
    assert "bytes left out" in text


def test_paths_around_the_hidden_cover_all_the_rest(tmp_path: Path) -> None:
    for name in ("a/secret", "a/open", "b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "c").symlink_to(tmp_path / "a")
    covered = paths_excluding([tmp_path / "a" / "secret"], tmp_path)
    assert covered == [tmp_path / "a" / "open", tmp_path / "b"]
    assert paths_excluding([], tmp_path) == [tmp_path]


def test_secret_files_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / ".env").write_text("")
    (tmp_path / "env.py").write_text("")
    assert secret_files(tmp_path, (".env", "*.pem")) == (tmp_path / "deep" / ".env",)


def test_only_harmless_names_reach_a_command(tmp_path: Path) -> None:
    made = command_environment(
        tmp_path, {"PATH": "/bin", "LC_ALL": "C", "AWS_SECRET": "x", "DATABASE_URL": "y"}
    )
    assert made["PATH"] == "/bin"
    assert made["LC_ALL"] == "C"
    assert not {"AWS_SECRET", "DATABASE_URL"} & set(made)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
