from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystroke.assist.edit import workspace as module
from keystroke.assist.edit.workspace import FileWrite, Workspace, is_auto_executed
from keystroke.errors import Forbidden, InputError, NotFound
from keystroke.text.encoding import decode, digest


@given(st.binary(max_size=60) | st.text(max_size=30).map(lambda text: text.encode("utf-8", "replace")))
def test_whatever_is_accepted_is_written_back_exactly(data: bytes) -> None:
    for prefix in (b"", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"# coding: latin-1\n"):
        try:
            decoded = decode(prefix + data)
        except InputError:
            continue
        assert decoded.encode(decoded.text) == prefix + data


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        (b"a\r\nb", "a\r\nb", "utf-8"),
        ("é\n".encode("utf-8-sig"), "é\n", "utf-8"),
        ("é😀".encode("utf-16"), "é😀", "utf-16-le"),
        (b"\xfe\xff" + "é".encode("utf-16-be"), "é", "utf-16-be"),
        (b"#!/bin/x\n# -*- coding: latin-1 -*-\n\xe9", "#!/bin/x\n# -*- coding: latin-1 -*-\né", "iso8859-1"),
        (b"# vim: set fileencoding=cp1252 :\n\x80", "# vim: set fileencoding=cp1252 :\n€", "cp1252"),
    ],
)
def test_encodings_are_recognised(data: bytes, text: str, encoding: str) -> None:
    decoded = decode(data)
    assert (decoded.text, decoded.encoding) == (text, encoding)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x7fELF\0\0", "binary"),
        (b"ok\nna\xefve", "not UTF-8 \\(line 2\\)"),
        (b"\xff\xfea", "damaged"),
        (b"# coding: utf-7\n\xff", "not UTF-8"),
    ],
)
def test_what_is_not_text_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        decode(data, "f")


def test_a_character_the_files_encoding_lacks_is_refused() -> None:
    with pytest.raises(InputError, match="iso8859-1, which has no '€'"):
        decode(b"# coding: latin-1\n\xe9").encode("€", "f")


# ── the workspace ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"one\r\n")
    (folder / "b.txt").write_bytes(b"two\n")
    (tmp_path / "secret.txt").write_text("outside")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "path",
    ["../secret.txt", "/etc/passwd", "x/../../secret.txt", "", ".", "~/x", "a\0b", "..\\x",
     ".git/hooks/pre-commit", "sub/.GIT/config", "link/secret.txt", "file-link", "loop"],
)  # fmt: skip
def test_no_path_leaves_the_workspace(root: Path, path: str) -> None:
    (root / "link").symlink_to(root.parent)
    (root / "file-link").symlink_to(root.parent / "secret.txt")
    (root / "loop").symlink_to(root / "loop")
    workspace = Workspace(root)
    with pytest.raises(Forbidden):
        workspace.read(path)
    with pytest.raises(Forbidden):
        workspace.write([FileWrite(path, b"x", None)])
    assert (root.parent / "secret.txt").read_text() == "outside"


@given(
    st.lists(
        st.sampled_from(["..", ".", "a", "out", "in", ".git", "", "~", "b.txt", "\\", "\0", "é"]), max_size=6
    )
)
def test_however_a_path_is_spelled_it_stays_inside_or_is_forbidden(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    root = tmp_path_factory.getbasetemp() / "spelled"
    if not root.exists():
        (root / "a").mkdir(parents=True)
        (root / "out").symlink_to(root.parent)
        (root / "in").symlink_to(root / "a")
        (root / "a" / "out").symlink_to("../..")
    try:
        real = Workspace(root).locate("/".join(parts))
    except Forbidden:
        return
    assert real.is_relative_to(root.resolve())
    assert ".git" not in real.parts[len(root.parts) :]


def test_a_link_inside_the_workspace_is_followed_and_stays_a_link(root: Path) -> None:
    (root / "link").symlink_to("a.txt")
    workspace = Workspace(root)
    source = workspace.read("link")
    workspace.write([FileWrite("link", b"new", source.digest)])
    assert (root / "link").is_symlink()
    assert (root / "a.txt").read_bytes() == b"new"


def test_one_file_under_two_names_is_refused(root: Path) -> None:
    (root / "link").symlink_to("a.txt")
    was = digest(b"one\r\n")
    with pytest.raises(InputError, match="same file under two names"):
        Workspace(root).write([FileWrite("a.txt", b"1", was), FileWrite("link", b"2", was)])


def test_the_mode_of_a_file_is_kept(root: Path) -> None:
    (root / "a.txt").chmod(0o751)
    Workspace(root).write([FileWrite("a.txt", b"x", digest(b"one\r\n"))])
    assert stat.S_IMODE((root / "a.txt").stat().st_mode) == 0o751


def test_a_file_that_changed_since_it_was_read_is_not_written_nor_are_the_others(root: Path) -> None:
    workspace = Workspace(root)
    a, b = workspace.read("a.txt"), workspace.read("b.txt")
    (root / "b.txt").write_bytes(b"changed")
    with pytest.raises(InputError, match=r"b\.txt changed on disk"):
        workspace.write([FileWrite("a.txt", b"x", a.digest), FileWrite("b.txt", b"y", b.digest)])
    assert contents(root) == {"a.txt": b"one\r\n", "b.txt": b"changed"}


def test_a_failure_in_the_middle_restores_what_was_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(root)
    workspace = Workspace(root)
    real = os.replace
    calls: list[Path] = []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    writes = [
        FileWrite("a.txt", b"x", digest(b"one\r\n")),
        FileWrite("b.txt", b"y", digest(b"two\n")),
        FileWrite("sub/deep/c.txt", b"z", None),
    ]
    with pytest.raises(
        InputError, match=r"b\.txt cannot be written: No space left on device; no file was changed"
    ):
        workspace.write(writes)
    assert contents(root) == before
    assert not (root / "sub").exists()


def test_new_files_and_removals_happen_together(root: Path) -> None:
    Workspace(root).write(
        [FileWrite("sub/new.txt", b"n", None, 0o755), FileWrite("b.txt", None, digest(b"two\n"))]
    )
    assert contents(root) == {"a.txt": b"one\r\n", "sub/new.txt": b"n"}
    assert stat.S_IMODE((root / "sub/new.txt").stat().st_mode) == 0o755


def test_a_file_that_appeared_meanwhile_is_not_overwritten(root: Path) -> None:
    with pytest.raises(InputError, match="changed on disk"):
        Workspace(root).write([FileWrite("a.txt", b"n", None)])


def test_a_read_only_file_is_refused(root: Path) -> None:
    (root / "a.txt").chmod(0o444)
    with pytest.raises(Forbidden, match=r"a\.txt is read-only"):
        Workspace(root).write([FileWrite("a.txt", b"x", digest(b"one\r\n"))])


def test_huge_files_folders_and_pipes_are_refused(root: Path) -> None:
    with (root / "huge").open("wb") as file:
        file.truncate(9 << 20)
    os.mkfifo(root / "pipe")
    (root / "folder").mkdir()
    workspace = Workspace(root)
    with pytest.raises(InputError, match="files above 8,388,608 bytes are not edited"):
        workspace.read("huge")
    for name in ("pipe", "folder"):
        with pytest.raises(InputError, match="not a regular file"):
            workspace.read(name)
    with pytest.raises(NotFound, match="does not exist"):
        workspace.read("missing")
    assert workspace.read_bytes("a.txt/below") is None


def test_files_that_may_hold_secrets_are_neither_read_nor_written(root: Path) -> None:
    (root / ".env").write_text("KEY=1")
    (root / "innocent").symlink_to(".env")
    workspace = Workspace(root, exclude=(".env", "*.pem"))
    for name in (".env", "innocent", "x.pem"):
        with pytest.raises(Forbidden, match="may hold secrets"):
            workspace.read(name)


def test_paths_of_the_user_become_workspace_names(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    workspace = Workspace(root)
    assert (
        workspace.name("a.txt") == workspace.name(root / "a.txt") == workspace.name("./x/../a.txt") == "a.txt"
    )
    with pytest.raises(Forbidden, match="outside the workspace"):
        workspace.name("../secret.txt")


@pytest.mark.parametrize(
    ("path", "runs"),
    [
        (".vscode/tasks.json", True),
        ("sub/.VSCode/settings.json", True),
        ("a.code-workspace", True),
        (".github/workflows/ci.yml", True),
        (".envrc", True),
        ("src/vscode/tasks.json", False),
        ("docs/.vscode.md", False),
        (".mcp.json", True),
        (".claude/settings.json", True),
        (".circleci/config.yml", True),
        ("azure-pipelines.yml", True),
        ("Jenkinsfile", True),
        (".github/actions/a/action.yml", True),
        (".npmrc", True),
        (".cargo/config.toml", True),
        ("lefthook.yml", True),
        ("src/sitecustomize.py", True),
        ("keystroke.toml", True),
        ("AGENTS.md", True),
        ("packages/web/CLAUDE.md", True),
        (".github/copilot-instructions.md", True),
        ("conftest.py", True),
        ("src/package/conftest.py", True),
        ("tests/conftest.py", False),
        ("package/tests/unit/conftest.py", False),
        ("src/npmrc", False),
        ("docs/agents.md.txt", False),
        ("src/cargo/config.toml", False),
    ],
)
def test_files_that_run_by_themselves_are_told_from_others(path: str, runs: bool) -> None:
    assert is_auto_executed(path) is runs


def test_two_writers_of_one_workspace_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pauses between its last look and its replacement; the second then fails whole."""
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"old")
    first, put = threading.Event(), module._put_in_place
    second_ended = threading.Event()
    results: dict[str, str] = {}

    def slow_put(target: Path, staged: Path | None) -> None:
        if threading.current_thread().name == "first":
            first.set()
            second_ended.wait(0.5)  # it cannot end while the first writes
        put(target, staged)

    def write(names: tuple[str, ...]) -> None:
        who = threading.current_thread().name
        try:
            writes = [FileWrite(name, who.encode(), digest(b"old")) for name in names]
            Workspace(tmp_path).write(writes, who)
            results[who] = "written"
        except InputError as error:
            results[who] = str(error)

    monkeypatch.setattr(module, "_put_in_place", slow_put)
    one = threading.Thread(target=write, args=(("a.txt",),), name="first")
    other = threading.Thread(target=write, args=(("b.txt", "a.txt"),), name="second")
    one.start()
    first.wait()
    other.start()
    other.join()
    second_ended.set()
    one.join()
    assert results["first"] == "written"
    assert "changed on disk" in results["second"]
    assert ((tmp_path / "a.txt").read_bytes(), (tmp_path / "b.txt").read_bytes()) == (b"first", b"old")


def test_a_failed_write_does_not_take_back_what_somebody_typed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(b"old")
    put = module._put_in_place

    def put_and_type(target: Path, staged: Path | None) -> None:
        put(target, staged)
        target.write_bytes(b"typed")
        (tmp_path / "b.txt").write_bytes(b"typed")

    monkeypatch.setattr(module, "_put_in_place", put_and_type)
    with pytest.raises(InputError, match="changed on disk"):
        Workspace(tmp_path).write([FileWrite(name, b"new", digest(b"old")) for name in ("a.txt", "b.txt")])
    assert ((tmp_path / "a.txt").read_bytes(), (tmp_path / "b.txt").read_bytes()) == (b"typed", b"typed")
