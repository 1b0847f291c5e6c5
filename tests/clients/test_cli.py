"""The command line as scripts and people meet it: what goes where, and how it ends."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cli_home import PROGRAM, Home, home, remote_home, server  # noqa: F401
from openai_server import OpenAIServer, answer, chat, delta, echo_chat, stream, text
from tiny_model import write_tiny_model

from keystroke.clients.cli import app
from keystroke.clients.cli.app import COMMANDS, CommandEntry
from keystroke.engine.locate import shipped_model


class TestCommands:
    def test_help_lists_every_command_and_imports_none_of_them(self, home: Home) -> None:
        script = (
            "import sys\nfrom keystroke.clients.cli import main\n"
            "try:\n    main(['--help'])\nexcept SystemExit as end:\n"
            "    heavy = {'numpy', 'onnx', 'httpx', 'rich', 'msgspec', 'keystroke.engine'}\n"
            "    sys.exit(end.code or ','.join(heavy & set(sys.modules)) or 0)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=home.environment
        )
        assert done.returncode == 0, done.stderr
        assert all(name in done.stdout for name in COMMANDS)

    @pytest.mark.parametrize("name", sorted(COMMANDS))
    def test_every_command_in_the_table_can_be_loaded(self, name: str) -> None:
        assert app.load_command(name).name == name

    def test_a_missing_extra_is_named(
        self, home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        (tmp_path / "needs").mkdir()
        (tmp_path / "needs" / "more.py").write_text("import a_package_nobody_has\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setitem(COMMANDS, "scale", CommandEntry("Scale.", "needs.more:app", extra="scale"))
        needs = "`keystroke scale` needs a_package_nobody_has, which is not installed"
        assert home.refused("scale", "x") == f"{needs}; install it with: pip install 'keystroke[scale]'"

    def test_training_without_the_lab_says_how_to_install_it(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "keystroke_lab.cli", raising=False)
        monkeypatch.setitem(sys.modules, "keystroke_lab", None)
        assert home.refused("train", "corpus", "x") == (
            "`keystroke train` is installed apart from the program: run `make lab` in a clone"
        )

    def test_what_cannot_be_parsed_is_one_sentence(self, home: Home) -> None:
        assert home.refused("complte") == "No such command 'complte'. Did you mean 'complete'?"
        assert home.refused("complete", "--frob") == "No such option: --frob; see `keystroke complete --help`"
        assert "Missing argument" in home.refused("complete")
        assert home.refused("--set", "threads", "config", "show").startswith("--set needs KEY=VALUE")

    @pytest.mark.parametrize("group", ["keys", "config"])
    def test_a_group_without_a_command_shows_its_help(self, home: Home, group: str) -> None:
        shown = home.keystroke(group, code=2)
        assert shown.stdout == ""
        assert shown.stderr.strip() == home.keystroke(group, "--help").stdout.strip()

    def test_version_is_text_or_json(self, home: Home) -> None:
        assert home.keystroke("version").stdout.startswith("keystroke ")
        for arguments in (("--json", "version"), ("version", "--json")):
            assert json.loads(home.keystroke(*arguments).stdout)["keystroke"]

    def test_shell_completion_knows_the_commands_and_the_models(self, home: Home) -> None:
        done = home.program(
            code=None,
            _KEYSTROKE_COMPLETE="complete_bash",
            COMP_WORDS="keystroke com",
            COMP_CWORD="1",
            _TYPER_COMPLETE_ARGS="keystroke com",
        )
        assert "complete" in done.stdout
        done = home.program(
            code=None,
            _KEYSTROKE_COMPLETE="complete_bash",
            COMP_WORDS="keystroke chat --model smo",
            COMP_CWORD="3",
        )
        assert done.stdout.split() == ["smollm2"]

    def test_a_reader_that_goes_away_is_silence(self, home: Home) -> None:
        done = subprocess.run(
            ["/bin/sh", "-c", f"'{PROGRAM}' config show | head -n 1; '{PROGRAM}' config show > /dev/full"],
            capture_output=True,
            text=True,
            env=home.environment,
        )
        assert done.stdout.startswith("key")
        (only,) = done.stderr.splitlines()  # the full disk is told, the reader that left is not
        assert "No space left" in only

    def test_a_failure_nobody_foresaw_is_one_line_and_debug_shows_where(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = (
            "from keystroke.clients.cli import app, main\n"
            "app.COMMANDS['boom'] = app.CommandEntry('', 'os.path:nothing')\nmain(['boom'])\n"
        )
        plain = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=home.environment
        )
        assert plain.returncode == 1
        assert plain.stderr.count("\n") == 1
        assert "KEYSTROKE_DEBUG=1" in plain.stderr
        debug = {**home.environment, "KEYSTROKE_DEBUG": "1"}
        shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=debug)
        assert "Traceback" in shown.stderr


class TestConfig:
    def test_show_names_values_and_origins(self, home: Home) -> None:
        home.configure("[engine]\nthreads = 3\n")
        rows = json.loads(
            home.keystroke("config", "show", "engine", "--json", KEYSTROKE_ENGINE_KIND="onnx").stdout
        )
        assert rows["engine.threads"]["value"] == "3"
        assert rows["engine.threads"]["origin"].endswith("keystroke.toml, line 2")
        assert rows["engine.kind"]["origin"] == "KEYSTROKE_ENGINE_KIND"

    def test_a_flag_beats_every_file(self, home: Home) -> None:
        home.configure("[engine]\nthreads = 3\n")
        rows = json.loads(
            home.keystroke("--set", "engine.threads=1", "config", "show", "engine", "--json").stdout
        )
        assert rows["engine.threads"] == {**rows["engine.threads"], "value": "1", "origin": "flag"}

    def test_a_broken_file_stops_what_needs_it_and_can_still_be_found(self, home: Home) -> None:
        home.configure("[engine\n")
        assert "keystroke.toml, line 1" in home.refused("config", "show")
        assert home.keystroke("config", "path").stdout.strip() == str(home.root / "keystroke.toml")
        assert home.keystroke("version").code == 0

    def test_an_unknown_key_suggests_the_right_one(self, home: Home) -> None:
        home.configure("[engine]\nthread = 3\n")
        assert "did you mean engine.threads?" in home.refused("doctor", "--quick")

    def test_another_file_can_be_named_and_must_exist(self, home: Home, tmp_path: Path) -> None:
        other = tmp_path / "other.toml"
        other.write_text("[engine]\nthreads = 7\n")
        shown = home.keystroke("--config", str(other), "config", "show", "engine.threads").stdout
        assert "7" in shown
        assert "does not exist" in home.refused("--config", str(tmp_path / "none.toml"), "config", "show")

    def test_edit_opens_the_editor_on_a_file_that_is_made_when_missing_and_checks_it(
        self, home: Home, tmp_path: Path
    ) -> None:
        editor = tmp_path / "editor"
        editor.write_text('#!/bin/sh\nprintf "[engine]\\nthreads = many\\n" > "$1"\n')
        editor.chmod(0o755)
        assert home.keystroke("config", "edit", VISUAL="true").code == 0
        assert (home.root / "keystroke.toml").read_text().startswith("# Settings")
        done = home.keystroke("config", "edit", VISUAL=str(editor), code=2)
        assert "line 2" in done.stderr
        assert (
            "cannot be started" in home.keystroke("config", "edit", VISUAL="/no/such/editor", code=2).stderr
        )


class TestModels:
    def test_models_are_added_listed_verified_and_removed(self, home: Home, tmp_path: Path) -> None:
        folder = write_tiny_model(tmp_path / "tiny")
        file = folder / "model.safetensors"
        home.keystroke("models", "add", str(folder), "--name", "tiny")
        listed = {row["name"]: row for row in json.loads(home.keystroke("models", "list", "--json").stdout)}
        assert listed["tiny"]["size"] > file.stat().st_size
        (default,) = (name for name, row in listed.items() if row["default"])
        assert default == ("smollm2" if shipped_model() is None else "embedded")
        assert "are intact" in home.keystroke("models", "verify", "tiny").stdout
        assert "exists already" in home.refused("models", "add", str(folder), "--name", "tiny")
        assert home.keystroke("models", "add", str(folder), "--name", "tiny", "--if-missing").stderr == ""
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        assert "SHA-256" in home.refused("models", "verify", "tiny", code=1)
        home.keystroke("models", "remove", "tiny")
        assert file.exists()
        assert "no model called tiny" in home.refused("models", "remove", "tiny")

    def test_the_embedded_model_is_verified_where_it_was_fetched(
        self, home: Home, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("keystroke.clients.cli.models.shipped_model", lambda: None)
        assert "no model called smollm2" in home.refused("models", "verify", "embedded")
        monkeypatch.setattr("keystroke.clients.cli.models.shipped_model", lambda: Path("own.gguf"))
        assert "no readable SHA256SUMS" in home.refused("models", "verify", "embedded")

    def test_a_file_that_is_no_model_is_refused(self, home: Home, tmp_path: Path) -> None:
        file = tmp_path / "bad.gguf"
        file.write_bytes(b"nope")
        assert "is not a GGUF file" in home.refused("models", "add", str(file))
        file.write_bytes(b"GGUF" + b"\xff" * 100)
        home.refused("models", "add", str(file), code=1)
        assert "no model called bad" in home.refused("models", "show", "bad")

    def test_remote_models_of_the_settings_are_listed(self, remote_home: Home, server: OpenAIServer) -> None:
        rows = json.loads(remote_home.keystroke("models", "list", "--json").stdout)
        assert {
            "name": "far",
            "kind": "remote",
            "size": 0,
            "where": f"{server.url}#test-model",
            "roles": ["fast", "deep", "chat"],
            "default": True,
        } in rows
        assert (
            json.loads(remote_home.keystroke("models", "show", "far", "--json").stdout)["server"]
            == server.url
        )

    def test_an_unknown_model_is_named_with_the_nearest(self, home: Home) -> None:
        assert "did you mean smollm2?" in home.refused("generate", "x", "--model", "smolm2")
        assert "write the model's name after the address" in home.refused(
            "generate", "x", "-m", "http://localhost:1"
        )


class TestGenerate:
    def test_text_streams_to_standard_output_alone(self, remote_home: Home) -> None:
        assert remote_home.program("generate", "def add(a, b):").stdout == "return a + b\n"
        assert remote_home.keystroke("generate", stdin="def add(a, b):").stdout == "return a + b\n"

    def test_json_is_one_line_for_each_piece_and_one_for_the_end(self, remote_home: Home) -> None:
        lines = [
            json.loads(line) for line in remote_home.keystroke("--json", "generate", "x").stdout.splitlines()
        ]
        assert [line["type"] for line in lines] == ["text", "text", "end"]
        assert (lines[-1]["model"], lines[-1]["finish"]) == ("far", "length")

    def test_options_reach_the_model(self, remote_home: Home, server: OpenAIServer) -> None:
        remote_home.keystroke(
            "generate", "x", "--max-tokens", "9", "--temperature", "0.5", "--seed", "4", "--stop", "END"
        )
        body = server.bodies[-1]
        assert (body["max_tokens"], body["temperature"], body["seed"], body["stop"]) == (9, 0.5, 4, ["END"])

    def test_a_model_can_be_named_by_address(self, home: Home, server: OpenAIServer) -> None:
        assert home.keystroke("generate", "x", "-m", f"{server.url}#m").stdout == "return a + b\n"
        assert server.bodies[-1]["model"] == "m"

    def test_bad_prompts_are_one_sentence(self, remote_home: Home) -> None:
        assert "prompt is empty" in remote_home.refused("generate", "  ")
        assert "not UTF-8" in remote_home.refused("generate", stdin=b"\xff\xfe")
        assert "NUL byte (line 2)" in remote_home.refused("generate", stdin=b"a\n\0")

    def test_a_server_that_is_gone_or_broken_is_one_sentence(
        self, remote_home: Home, server: OpenAIServer
    ) -> None:
        server.on("/completions", answer("<html>", 500))
        assert "failed (status 500)" in remote_home.refused("generate", "x", code=1)
        server.on("/completions", stream(delta("x")))
        broken = remote_home.keystroke("generate", "x", code=1)
        assert (broken.stdout, "broke off in the middle" in broken.stderr) == ("x", True)

    def test_ctrl_c_keeps_what_came_and_leaves_with_130(
        self, remote_home: Home, server: OpenAIServer
    ) -> None:
        server.on("/completions", stream(b'data: {"choices":[{"text":"begun"}]}\n\n', 120.0))
        with subprocess.Popen(
            [PROGRAM, "generate", "x"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=remote_home.environment,
            cwd=remote_home.root,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(5) == b"begun"
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == b"\n"
            assert process.stderr.read() == b""
        assert process.returncode == 130
        assert server.cut.wait(60)


class TestComplete:
    def test_the_completion_alone_is_printed(self, remote_home: Home, server: OpenAIServer) -> None:
        (remote_home.root / "a.py").write_text("def add(a, b):\n    \n\nprint(add(1, 2))\n")
        assert remote_home.program("complete", "a.py:2:5").stdout == "return a + b\n"
        assert server.bodies[-1]["prompt"] == "def add(a, b):\n    "
        assert server.bodies[-1]["suffix"] == "\n\nprint(add(1, 2))\n"

    def test_standard_input_is_the_text_before_the_cursor(
        self, remote_home: Home, server: OpenAIServer
    ) -> None:
        remote_home.keystroke("complete", "-", "--suffix", "\nend", stdin="def add(a, b):\n    ")
        assert (server.bodies[-1]["prompt"], server.bodies[-1]["suffix"]) == ("def add(a, b):\n    ", "\nend")

    def test_a_server_that_cannot_fill_in_the_middle_goes_on_from_what_is_before(
        self, remote_home: Home, server: OpenAIServer
    ) -> None:
        server.on(
            "/completions", answer({"error": {"message": "no suffix here"}}, 400), text("a - b\n", "end")
        )
        done = remote_home.keystroke("complete", "-", "--suffix", "\nend", stdin="    return ")
        assert done.stdout == "a - b\n"
        assert "suffix" not in server.bodies[-1]

    def test_apply_inserts_and_leaves_every_other_byte_alone(
        self, remote_home: Home, server: OpenAIServer
    ) -> None:
        server.on("/completions", text("x = 1\n", "    y = 2\n", "z"))
        file = remote_home.root / "a.py"
        head, tail = b"\xef\xbb\xbfdef f():\r\n    ", b"\r\n\r\nprint('\xc3\xa9')\n"
        file.write_bytes(head + tail)
        file.chmod(0o640)
        done = remote_home.keystroke("complete", "a.py:2", "--apply")
        assert done.stdout == ""
        assert file.read_bytes() == head + b"x = 1\r\n    y = 2" + tail
        assert file.stat().st_mode & 0o777 == 0o640
        assert sorted(p.name for p in remote_home.root.iterdir() if p.name.startswith(".a")) == []

    def test_json_says_what_was_done(self, remote_home: Home) -> None:
        (remote_home.root / "a.py").write_text("def f(a, b):\n    ")
        result = json.loads(remote_home.keystroke("complete", "a.py", "--json").stdout)
        assert (result["completion"], result["applied"], result["model"]) == ("return a + b", False, "far")

    @pytest.mark.parametrize(
        ("content", "place", "words"),
        [
            (b"x = 1\n", "a.py:9:1", "line 9 does not exist; a.py has lines 1 to 2"),
            (b"x = 1\n", "a.py:0", "line 0 does not exist"),
            (b"x = 1\n", "a.py:1:99", "column 99 does not exist; line 1 of a.py has columns 1 to 6"),
            (b"x = '\xff'\n", "a.py:1", "a.py is not UTF-8 text (line 1)"),
            (b"a\n\0b", "a.py", "a.py holds a NUL byte (line 2)"),
            (b"", "a.py:1:1", "a.py is empty"),
            (b" \n\n", "a.py:1:1", "a.py is empty"),
            (b"x", "none.py:1:1", "there is no file none.py"),
            (b"x", ".", ". is a folder"),
        ],
    )
    def test_bad_input_is_one_clear_sentence(
        self, remote_home: Home, content: bytes, place: str, words: str
    ) -> None:
        (remote_home.root / "a.py").write_bytes(content)
        assert words in remote_home.refused("complete", place)

    def test_options_that_do_not_go_together_are_refused(self, remote_home: Home) -> None:
        (remote_home.root / "a.py").write_text("x")
        assert "--apply needs a file" in remote_home.refused("complete", "-", "--apply", stdin="x")
        assert "--suffix goes with standard input" in remote_home.refused("complete", "a.py", "--suffix", "y")

    def test_a_file_changed_meanwhile_is_not_written(self, remote_home: Home, server: OpenAIServer) -> None:
        file = remote_home.root / "a.py"
        file.write_text("def f():\n    ")
        server.on(
            "/completions", stream(b'data: {"choices":[{"text":"pass"}]}\n\n', 1.5, b"data: [DONE]\n\n")
        )

        def type_on() -> None:
            server.streaming.wait(60)
            file.write_text("typed meanwhile")

        typist = threading.Thread(target=type_on)
        typist.start()
        message = remote_home.refused("complete", "a.py:2", "--apply", "--lines", "2")
        typist.join()
        assert "changed while the completion was made" in message
        assert file.read_text() == "typed meanwhile"


class TestChatThroughAPipe:
    def test_each_line_is_a_message_and_the_conversation_grows(
        self, remote_home: Home, server: OpenAIServer
    ) -> None:
        server.on("/chat/completions", echo_chat())
        done = remote_home.program("chat", "--system", "Be brief.", stdin="one\n\ntwo\n")
        assert done.stdout == "you said one.\nyou said two.\n"
        assert server.bodies[-1]["messages"] == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "you said one."},
            {"role": "user", "content": "two"},
        ]

    def test_a_conversation_is_saved_and_taken_up_again(
        self, remote_home: Home, server: OpenAIServer
    ) -> None:
        server.on("/chat/completions", echo_chat())
        remote_home.keystroke("chat", stdin="one\n/save talk.json\n")
        assert "exists already" in remote_home.keystroke("chat", stdin="/save talk.json\n", code=2).stderr
        remote_home.keystroke("chat", "--load", "talk.json", stdin="two\n")
        assert [m["content"] for m in server.bodies[-1]["messages"]] == ["one", "you said one.", "two"]
        (remote_home.root / "talk.json").write_text('{"messages": [3]}')
        assert "not a saved conversation" in remote_home.refused("chat", "--load", "talk.json")

    def test_another_model_goes_on_with_the_same_conversation(
        self, remote_home: Home, server: OpenAIServer
    ) -> None:
        server.on("/chat/completions", echo_chat())
        lines = f"one\n/model {server.url}#other\ntwo\n/reset\nthree\n/stats\n/help\n"
        done = remote_home.keystroke("chat", stdin=lines)
        assert [body["model"] for body in server.bodies] == ["test-model", "other", "other"]
        assert [len(body["messages"]) for body in server.bodies] == [1, 3, 1]
        assert "tokens_per_second" in done.stdout
        assert "/save FILE" in done.stdout

    def test_json_lines_carry_pieces_and_reports(self, remote_home: Home, server: OpenAIServer) -> None:
        server.on("/chat/completions", chat("hi"))
        lines = [
            json.loads(x) for x in remote_home.keystroke("chat", "--json", stdin="x\n").stdout.splitlines()
        ]
        assert [line["type"] for line in lines] == ["text", "end"]
        assert (lines[1]["prompt_tokens"], lines[1]["reused_tokens"], lines[1]["tokens"]) == (7, 3, 2)

    def test_an_error_ends_the_run_with_its_sentence(self, remote_home: Home, server: OpenAIServer) -> None:
        server.on("/chat/completions", answer({"error": {"message": "maximum context length is 10"}}, 400))
        done = remote_home.keystroke("chat", stdin="x\ny\n", code=2)
        assert done.stderr.strip().endswith("maximum context length is 10")
        assert len(server.bodies) == 1
        assert "/fly is not a command" in remote_home.refused("chat", stdin="/fly\n")


class TestDoctorAndBench:
    def test_doctor_reports_machine_folders_and_server(self, remote_home: Home, server: OpenAIServer) -> None:
        facts = json.loads(remote_home.keystroke("doctor", "--json").stdout)
        assert facts["machine"]["cores"] >= 1
        assert facts["model"]["ok"]
        screen = remote_home.keystroke("doctor").stdout
        assert len(screen.splitlines()) <= 24
        server.on("/models", answer({"error": "down"}, 500))
        assert "status 500" in remote_home.keystroke("doctor").stdout

    def test_doctor_without_a_model_says_why_and_fails(self, home: Home) -> None:
        done = home.keystroke("doctor", "--model", "nobody", "--json", code=2)
        assert "no model called nobody" in json.loads(done.stdout)["model"]["error"]

    def test_benchmarks_are_listed_and_an_unknown_one_is_named(self, home: Home) -> None:
        names = [row["name"] for row in json.loads(home.keystroke("bench", "--json").stdout)]
        assert names[0] == "quick"
        assert "no benchmark called slowest" in home.refused("bench", "slowest")


def test_colours_appear_on_a_terminal_only_and_never_with_no_color(home: Home) -> None:
    import pty

    def printed(**environment: str) -> bytes:
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.clear()
            os.environ.update({**home.environment, **environment})
            os.execv(PROGRAM, [PROGRAM, "config", "show", "engine"])
        shown = b""
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:  # Linux reports the closed terminal this way
            pass
        os.waitpid(pid, 0)
        os.close(terminal)
        return shown

    assert b"\x1b[1m" in printed()
    assert b"\x1b" not in printed(NO_COLOR="1")
    assert "\x1b" not in home.keystroke("config", "show", "engine").stdout
