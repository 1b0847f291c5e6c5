"""`keystroke setup` on five simulated machines, with editors in a home of their own."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from cli_home import Home, home  # noqa: F401

from keystroke.clients.cli.editor_setup import EDITORS, UserFolders
from keystroke.clients.cli.setup import SetupPlan, make_plan
from keystroke.config.jsonc import JsoncConflict, add_key
from keystroke.engine import builtin
from keystroke.engine.machine import Machine, NvidiaGpu

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from tiny_model import write_tiny_model

GB = 1_000_000_000
PLAIN = Machine(
    system="Linux",
    processor="Intel Core i5",
    architecture="x86_64",
    cores=4,
    memory_bytes=8 * GB,
    disk_bytes=500 * GB,
    bandwidth=25e9,
)
MACHINES = {
    "8 GB": PLAIN,
    "32 GB": replace(PLAIN, processor="AMD Ryzen 9", cores=16, memory_bytes=34 * GB, bandwidth=60e9),
    "24 GB GPU": replace(
        PLAIN,
        cores=16,
        memory_bytes=64 * GB,
        gpu=NvidiaGpu("NVIDIA GeForce RTX 4090", 24564 << 20),
        engines=("cuda", "onnx"),
    ),
    "16 GB GPU": replace(
        PLAIN,
        cores=8,
        memory_bytes=32 * GB,
        gpu=NvidiaGpu("NVIDIA GeForce RTX 4080", 16376 << 20),
        engines=("cuda", "onnx"),
    ),
    "H200": replace(
        PLAIN,
        cores=64,
        memory_bytes=500 * GB,
        gpu=NvidiaGpu("NVIDIA H200", 143771 << 20),
        engines=("cuda", "onnx"),
    ),
    "Mac": replace(
        PLAIN,
        system="Darwin",
        architecture="arm64",
        processor="Apple M3",
        cores=8,
        memory_bytes=17 * GB,
        bandwidth=80e9,
        engines=("mlx", "onnx"),
    ),
}


def planned(name: str) -> SetupPlan:
    return make_plan(MACHINES[name], frozenset())


class TestRecommendation:
    def test_a_small_machine_gets_the_small_coder_and_is_told_what_to_expect(self) -> None:
        plan = planned("8 GB")
        assert (plan.fast, plan.deep) == ("embedded", "coder")
        assert plan.downloads == ("coder",)
        assert any("edit --lines A-B" in note for note in plan.notes)

    def test_memory_makes_a_mixture_the_choice_and_not_a_dense_27b_model(self) -> None:
        plan = planned("32 GB")
        assert (plan.fast, plan.deep) == ("embedded", "qwen3-coder")
        assert plan.deep_fit is not None
        assert plan.deep_fit.engine == "onnx"
        assert 15 < (plan.deep_fit.speed or 0) < 40

    def test_a_gpu_of_24_gb_gets_a_mixture_and_the_coder_while_typing(self) -> None:
        plan = planned("24 GB GPU")
        assert plan.fast == "coder"
        assert plan.deep == "qwen3-coder"
        assert set(plan.downloads) == {plan.fast, plan.deep}
        assert plan.notes == ()

    def test_a_gpu_of_16_gb_gets_the_mixture_that_fits(self) -> None:
        plan = planned("16 GB GPU")
        assert plan.deep == "gpt-oss-20b"
        assert plan.deep_fit is not None
        assert plan.deep_fit.engine == "cuda"

    def test_an_h200_gets_the_best_one_that_an_engine_runs(self) -> None:
        plan = planned("H200")
        assert plan.deep_fit is not None
        assert plan.deep_fit.model.rank >= builtin.BUILT_IN["qwen3-coder"].rank
        assert (plan.deep_fit.speed or 0) > 300

    def test_a_mac_gets_a_small_mixture_on_its_gpu(self) -> None:
        plan = planned("Mac")
        assert (plan.fast, plan.deep) == ("embedded", "mellum2")
        assert plan.deep_fit is not None
        assert plan.deep_fit.engine == "mlx"

    def test_a_mac_without_its_engine_is_told_what_to_install(self) -> None:
        plan = make_plan(replace(MACHINES["Mac"], engines=("onnx",)), frozenset())
        assert plan.deep_fit is not None
        assert plan.deep_fit.engine == "onnx"
        assert any("pip install mlx" in note for note in plan.notes)

    def test_a_busy_machine_is_not_told_to_download_less_than_it_has(self) -> None:
        busy = replace(PLAIN, bandwidth=3e9)
        assert make_plan(busy, frozenset()).deep == "coder-small"
        assert make_plan(busy, frozenset({"coder"})).deep == "coder"

    def test_a_gpu_without_its_engine_is_told_what_to_install(self) -> None:
        bare = replace(MACHINES["H200"], engines=("onnx",))
        assert any("keystroke[cuda]" in note for note in make_plan(bare, frozenset()).notes)

    def test_what_is_installed_is_not_downloaded_again(self) -> None:
        assert make_plan(PLAIN, frozenset({"coder"})).downloads == ()

    def test_own_choices_count_if_they_fit(self) -> None:
        assert make_plan(PLAIN, frozenset(), deep="coder-small").deep == "coder-small"
        assert make_plan(PLAIN, frozenset(), deep="none").deep is None
        with pytest.raises(Exception, match="qwen3-coder needs"):
            make_plan(PLAIN, frozenset(), deep="qwen3-coder")
        with pytest.raises(Exception, match="no gpt-9 in the catalogue"):
            make_plan(PLAIN, frozenset(), deep="gpt-9")


@pytest.fixture
def machine(home: Home, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home on the small machine, whose catalogue has one tiny model with the name of the coder."""
    folder = write_tiny_model(home.root / "hub" / "coder")
    monkeypatch.setattr("keystroke.clients.cli.setup.look_up_machine", lambda *_args, **_more: PLAIN)

    def add(library: object, model: builtin.BuiltInModel, progress: object) -> object:
        from keystroke.engine.library import ModelLibrary
        from keystroke.engine.traits import traits_of

        assert isinstance(library, ModelLibrary)
        return library.add(folder, model.name, traits=traits_of(folder))

    monkeypatch.setattr("keystroke.engine.fetch.install.add_builtin", add)
    home.environment |= {"HOME": str(home.root), "XDG_CONFIG_HOME": str(home.root / "config")}
    return home


class TestCommand:
    def test_without_a_terminal_and_without_yes_it_only_shows(self, machine: Home) -> None:
        done = machine.keystroke("setup")
        assert "Qwen2.5-Coder-1.5B-Instruct" in done.stdout
        assert "1.1 GB to download" in done.stdout
        assert "nothing was changed; use --yes" in done.stderr
        shown = json.loads(machine.keystroke("setup", "--json").stdout)
        assert shown["deep"]["model"] == "coder"
        assert shown["deep"]["download"] == builtin.CODER.size
        assert not (machine.root / "state" / "setup.json").exists()

    def test_it_installs_configures_and_takes_everything_back(self, machine: Home) -> None:
        nvim = machine.root / "config" / "nvim"
        nvim.mkdir(parents=True)
        codex = machine.root / ".codex" / "config.toml"
        codex.parent.mkdir()
        codex.write_text('# mine\nmodel = "o5"\n')
        done = machine.keystroke(
            "setup", "--yes", "--no-measure", "--editor", "neovim", "--editor", "codex", "--json"
        )
        result = json.loads(done.stdout)
        assert result["installed"] == ["coder"]
        assert result["roles"]["deep"] == "coder"
        assert set(result["editors"]) == {"Neovim", "Codex"}
        lua = nvim / "plugin" / "keystroke.lua"
        assert "require('keystroke').setup" in lua.read_text()
        written = codex.read_text()
        assert written.startswith('# mine\nmodel = "o5"\n')
        assert tomllib.loads(written)["model_providers"]["keystroke"]["wire_api"] == "responses"
        again = json.loads(
            machine.keystroke("setup", "--yes", "--no-measure", "--editor", "codex", "--json").stdout
        )
        assert again["installed"] == []
        undone = machine.keystroke("setup", "--undo", "--yes")
        assert "removed the model coder" in undone.stderr
        assert not lua.exists()
        assert codex.read_text() == '# mine\nmodel = "o5"\n'
        assert "nothing to undo" in machine.keystroke("setup", "--undo").stderr

    def test_a_file_changed_since_is_left_alone_and_named(self, machine: Home) -> None:
        machine.keystroke("setup", "--yes", "--no-measure", "--deep", "none", "--editor", "opencode")
        file = machine.root / "config" / "opencode" / "opencode.json"
        file.write_text(file.read_text() + "\n")
        undone = machine.keystroke("setup", "--undo", "--yes")
        assert f"{file} was changed since" in undone.stderr
        assert file.exists()

    def test_folders_that_setup_made_go_and_those_of_the_user_stay(self, machine: Home) -> None:
        mine = machine.root / ".codex"
        mine.mkdir()
        editors = ("--editor", "codex", "--editor", "neovim", "--editor", "opencode")
        machine.keystroke("setup", "--yes", "--no-measure", "--deep", "none", *editors)
        assert (mine / "config.toml").exists()
        machine.keystroke("setup", "--undo", "--yes")
        assert list(mine.iterdir()) == []
        assert not (machine.root / "config").exists()

    def test_the_removal_of_everything_takes_it_back_too(self, machine: Home) -> None:
        machine.keystroke("setup", "--yes", "--no-measure", "--deep", "none", "--editor", "opencode")
        file = machine.root / "config" / "opencode" / "opencode.json"
        assert file.exists()
        assert f"deleted {file}" in machine.keystroke("cache", "--clear", "--everything", "--yes").stderr
        assert not file.exists()

    def test_undo_is_offered_only_where_something_was_done(self, machine: Home) -> None:
        nothing = machine.keystroke("setup", "--yes", "--no-measure", "--deep", "none")
        assert "--undo" not in nothing.stdout
        some = machine.keystroke("setup", "--yes", "--no-measure", "--deep", "none", "--editor", "opencode")
        assert "--undo" in some.stdout

    def test_an_unknown_editor_is_one_sentence(self, machine: Home) -> None:
        assert "choose from vscode, neovim" in machine.refused("setup", "--editor", "ed")

    def test_a_chosen_fast_model_is_written_and_the_earlier_setting_comes_back(self, machine: Home) -> None:
        machine.configure('[model]\ndefault = "smollm2"\n')
        machine.keystroke("setup", "--yes", "--no-measure", "--fast", "embedded", "--deep", "none")
        assert 'default = "embedded"' in (machine.root / "keystroke.toml").read_text()
        machine.keystroke("setup", "--undo", "--yes")
        assert 'default = "smollm2"' in (machine.root / "keystroke.toml").read_text()


class TestEditors:
    @pytest.fixture
    def folders(self, tmp_path: Path) -> UserFolders:
        return UserFolders(tmp_path, tmp_path / "config", "/opt/keystroke", "linux", tmp_path / "plugin")

    @pytest.mark.parametrize("name", [name for name in EDITORS if name != "vscode"])
    def test_writing_twice_changes_nothing_the_second_time(self, folders: UserFolders, name: str) -> None:
        change = EDITORS[name].plan(folders)
        assert change.files
        assert change.hint
        for path, text in change.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if path.suffix == ".json":
                json.loads(text)
            elif path.suffix == ".toml":
                tomllib.loads(text)
        again = EDITORS[name].plan(folders)
        assert not again.files
        assert not again.missing

    def test_vscode_is_told_where_the_program_is(self, folders: UserFolders) -> None:
        ((path, text),) = EDITORS["vscode"].plan(folders).files.items()
        assert path == folders.config / "Code" / "User" / "settings.json"
        assert json.loads(text) == {"keystroke.command": "/opt/keystroke"}

    def test_an_existing_provider_is_not_replaced(self, folders: UserFolders) -> None:
        file = folders.config / "zed" / "settings.json"
        file.parent.mkdir(parents=True)
        file.write_text('{\n  // mine\n  "edit_predictions": {"provider": "copilot"},\n}\n')
        change = EDITORS["zed"].plan(folders)
        assert "edit_predictions.provider is set already" in change.missing[0]
        (text,) = change.files.values()
        assert '"provider": "copilot"' in text
        assert "// mine" in text
        assert '"Keystroke"' in text

    def test_helix_keeps_the_servers_a_language_has(self, folders: UserFolders) -> None:
        file = folders.config / "helix" / "languages.toml"
        file.parent.mkdir(parents=True)
        file.write_text('[[language]]\nname = "python"  # mine\nlanguage-servers = ["pyright"]\n')
        ((_, text),) = EDITORS["helix"].plan(folders).files.items()
        read = tomllib.loads(text)
        assert read["language-server"]["keystroke"]["args"] == ["lsp"]
        assert read["language"][0]["language-servers"] == ["pyright", "keystroke"]
        assert "# mine" in text

    def test_claude_code_keeps_its_own_settings(self, folders: UserFolders) -> None:
        change = EDITORS["claude"].plan(folders)
        assert list(change.files) == [folders.home / ".claude" / "keystroke.json"]
        assert "claude --settings" in change.hint


class TestJsonWithComments:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{}",
            "// }\n{ /* } */ }\n",
            '{\n  // hi\n  "a": 1, // x\n}\n',
            '{"a": {"b": [1, 2, {"c": "}"}]}, "x": {}}',
            '{\n  "x": {\n    "other": {"y": "\\"z"}\n  }\n}\n',
        ],
    )
    def test_a_key_is_added_once_and_all_else_stays(self, text: str) -> None:
        after = add_key(text, ["x", "mine"], {"deep": [1, "two"]})
        assert add_key(after, ["x", "mine"], {"deep": [1, "two"]}) == after
        kept = [line.strip() for line in text.splitlines() if line.strip() not in ("", "{", "}", "{}")]
        for line in kept:
            if "x" not in line and "{ /*" not in line:
                assert line in after
        with pytest.raises(JsoncConflict):
            add_key(after, ["x", "mine"], 3)

    def test_what_is_no_object_is_refused(self) -> None:
        for text in ("[1]", '{"x": 3}', '{"x" 3}'):
            with pytest.raises(JsoncConflict):
                add_key(text, ["x", "mine"], 1)
