"""The installed program with the embedded model: the same paths, with nothing pretended."""
# ruff: noqa: F811 - fixtures are imported by name

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from cli_home import Home, home  # noqa: F401
from test_cli_chat import terminal

from keystroke.config import load_settings
from keystroke.engine.library import ModelLibrary

pytestmark = pytest.mark.model


@pytest.fixture
def model_home(home: Home) -> Home:
    """A home of its own, but with this machine's models and its cache of converted ones."""
    paths = load_settings().paths
    if "smollm2" not in ModelLibrary(paths.models).names():
        pytest.skip("smollm2 is not here; add it with `keystroke models add smollm2`")
    home.environment |= {
        "KEYSTROKE_PATHS_MODELS": str(paths.models),
        "KEYSTROKE_PATHS_CACHE": str(paths.cache),
    }
    return home


def test_a_completion_is_code_and_apply_writes_it(model_home: Home) -> None:
    file = model_home.root / "a.py"
    before = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return "
    file.write_text(before + "\n")
    result = json.loads(model_home.program("complete", "a.py:6", "--lines", "1", "--apply", "--json").stdout)
    assert result["applied"]
    assert file.read_text() == before + result["completion"] + "\n"
    ast.parse(file.read_text())


def test_a_completion_the_model_is_not_sure_of_is_withheld_unless_all_are_wanted(model_home: Home) -> None:
    file = model_home.root / "a.py"
    file.write_text("import json\n\n\ndef zorb(quux):\n    flim = \n")
    asked = json.loads(model_home.keystroke("complete", "a.py:5", "--lines", "1", "--json").stdout)
    assert asked["completion"]
    assert 0 < asked["confidence"] < 0.8
    assert not asked["sure"]
    silent = model_home.keystroke("complete", "a.py:5", "--lines", "1")
    assert silent.stdout == ""
    assert f"not sure ({asked['confidence'] * 100:.0f} %), so nothing is shown" in silent.stderr
    assert model_home.keystroke("complete", "a.py:5", "--lines", "1", "--all").stdout.strip()
    before = file.read_text()
    assert (
        "nothing is written" in model_home.keystroke("complete", "a.py:5", "--lines", "1", "--apply").stderr
    )
    assert file.read_text() == before
    eager = ("--set", "assist.eagerness=eager", "complete", "a.py:5", "--lines", "1", "--json")
    assert json.loads(model_home.keystroke(*eager).stdout)["sure"] == (asked["confidence"] >= 0.6)


def test_the_same_prompt_gives_the_same_text_whatever_is_drafted(model_home: Home) -> None:
    arguments = ("generate", "for i in range(10):\n    print(i)\nfor i in range(", "--max-tokens", "40")
    drafted = model_home.program(*arguments)
    plain = model_home.program("--set", "speculation.enabled=false", *arguments)
    assert drafted.stdout == plain.stdout
    assert drafted.stdout.strip()


def test_a_context_that_is_too_small_is_one_sentence(model_home: Home) -> None:
    prompt = "word " * 400
    done = model_home.program("--set", "engine.context=256", "generate", stdin=prompt, code=2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "context" in done.stderr


def test_doctor_measures_the_model_on_one_screen(model_home: Home) -> None:
    facts = json.loads(model_home.program("doctor", "--json").stdout)
    assert facts["model"]["speed"]["decode"] > 0
    assert facts["model"]["speed"]["prefill"] > 0
    assert facts["kernels"].startswith(("compiled", "portable: "))


def test_chat_is_stopped_and_redirected_and_goes_on(model_home: Home) -> None:
    with terminal(model_home, "chat", "--model", "smollm2", "--max-tokens", "400") as screen:
        screen.expect("> ", 120)
        screen.type("Count from one to one thousand, in words.\n")
        screen.expect(r"in words\.\r\n", 60)  # what was typed
        screen.expect(r"\w", 60)  # what is answered
        screen.type("Now write about cats instead.\n")
        screen.expect(r"\[Now write about cats instead\.\]", 60)
        screen.type("\x03")
        screen.expect("> ", 60)
        screen.type("/save talk.json\n")
        screen.expect("saved", 30)
        screen.type("/stats\n")
        screen.expect("reused_tokens", 30)
        screen.type("/exit\n")
        assert screen.leave() == 0
    messages = json.loads(Path(model_home.root / "talk.json").read_text())["messages"]
    assert [m["role"] for m in messages[:2]] == ["user", "assistant"]
    assert messages[1]["content"].strip()
