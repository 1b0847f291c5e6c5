"""Settings: precedence, strictness, what a project may not do, and what every refusal says."""

from __future__ import annotations

import ast
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

import keystroke
from keystroke.config import NamedModel, Origin, Settings, SettingSource, load_settings
from keystroke.config.settings import SECTIONS
from keystroke.errors import ConfigError


class Home:
    """A user's configuration file, a project and an environment of their own."""

    def __init__(self, root: Path) -> None:
        self.user = root / "home" / "keystroke.toml"
        self.project = root / "project" / "keystroke.toml"
        self.cwd = root / "project" / "src" / "deep"
        self.cwd.mkdir(parents=True)
        self.user.parent.mkdir()

    def load(
        self,
        user: str = "",
        project: str | None = None,
        env: dict[str, str] | None = None,
        flags: dict[str, Any] | None = None,
    ) -> Settings:
        self.user.write_text(user, encoding="utf-8")
        if project is not None:
            self.project.write_text(project, encoding="utf-8")
        return load_settings(flags, self.cwd, {"KEYSTROKE_CONFIG": str(self.user), **(env or {})})

    def refusal(self, *args: Any, **kwargs: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            self.load(*args, **kwargs)
        return str(caught.value)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_no_configuration_gives_the_defaults(home: Home) -> None:
    assert home.load() == Settings()


def test_later_layers_win_and_each_value_names_its_origin(home: Home) -> None:
    user = "[engine]\nthreads = 1\ncontext = 1000\nkv_budget_mb = 100\n\n[generation]\ntop_k = 9\n"
    project = "[engine]\nthreads = 2\ncontext = 2000\nkv_budget_mb = 200\n"
    env = {"KEYSTROKE_ENGINE_THREADS": "3", "KEYSTROKE_ENGINE_CONTEXT": "3000"}
    settings = home.load(user, project, env, {"engine.threads": 4, "engine.kind": None})
    seen = {row.key: (row.value, row.origin) for row in settings.describe()}
    assert seen["engine.threads"] == ("4", Origin(SettingSource.FLAG))
    assert seen["engine.context"] == ("3000", Origin(SettingSource.ENVIRONMENT, "KEYSTROKE_ENGINE_CONTEXT"))
    assert seen["engine.kv_budget_mb"] == ("200", Origin(SettingSource.PROJECT, str(home.project), 4))
    assert seen["generation.top_k"] == ("9", Origin(SettingSource.USER, str(home.user), 7))
    assert seen["engine.kind"] == ("auto", Origin(SettingSource.DEFAULT))
    assert settings.origin("generation.top_k") == seen["generation.top_k"][1]
    assert settings.get("engine.threads") == settings.engine.threads == 4


def test_the_project_file_is_the_nearest_one_upwards(home: Home) -> None:
    (home.cwd.parent / "keystroke.toml").write_text("[engine]\nthreads = 7\n")
    assert home.load(project="[engine]\nthreads = 2\n").engine.threads == 7


def test_every_key_has_help_and_can_be_asked_for(home: Home) -> None:
    settings = home.load("[models.deep]\nrole = 'deep'\n")
    for row in settings.describe():
        assert row.help
        settings.get(row.key)
        settings.origin(row.key)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[engine]\nthraeds = 2\n", "line 2: engine.thraeds is not a setting; did you mean engine.threads?"),
        ("threads = 2\n", "line 1: threads is not a setting; did you mean engine.threads?"),
        ("[quux]\nzzz = 2\n", "known sections are model, engine"),
        ("[engine]\nthreads = 'two'\n", "line 2: engine.threads must be a whole number, not two"),
        ("[engine]\nthreads = true\n", "engine.threads must be a whole number, not True"),
        ("[engine]\nthreads = {}\nx = 1\n", "must be a whole number, not {}"),
        ("[engine]\n\nthreads = -1\n", "line 3: engine.threads must be between 0 and 1024, not -1"),
        ("[generation]\ntemperature = nan\n", "must be a finite number, not nan"),
        ("[engine]\nkv_budget_mb = 1\n", "must be between 16 and 4000000, not 1"),
        ("[generation]\ntop_k = -1\n", "must be 0 or more"),
        (
            "[model]\nprecision = 'int44'\n",
            "one of auto, stored, int4, int8, fp16, fp32 (did you mean int4?)",
        ),
        ("[speculation]\nenabled = 1\n", "must be true or false, not 1"),
        ("[assist]\nexclude = [1]\n", "must be a list of texts"),
        ("[paths]\nmodels = ''\n", "must be a path"),
        ("engine = 3\n", "line 1: engine is not a setting"),
        ("[engine]\nthreads = \n", "line 2: not valid TOML"),
        ("[models.deep]\nrol = 'deep'\n", "models.deep.rol is not a setting; did you mean models.deep.role?"),
        ("[models.'a b']\nrole = 'deep'\n", "a model's name holds letters"),
        ("[models.deep]\nengine = 'remote'\n", "line 2: a remote model needs models.deep.base_url"),
    ],
)
def test_a_bad_user_file_is_refused_in_one_sentence_with_its_place(home: Home, text: str, said: str) -> None:
    message = home.refusal(text)
    assert said in message
    assert str(home.user) in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"KEYSTROKE_ENGINE_THREADS": "two"},
            "KEYSTROKE_ENGINE_THREADS: engine.threads must be a whole number",
        ),
        ({"KEYSTROKE_SPECULATION_ENABLED": "maybe"}, "must be true or false, not maybe"),
        ({"KEYSTROKE_ENGIN_THREADS": "2"}, "did you mean KEYSTROKE_ENGINE_THREADS?"),
        ({"KEYSTROKE_CONFIG": "/nowhere/at/all.toml"}, "/nowhere/at/all.toml, which does not exist"),
    ],
)
def test_a_bad_variable_is_refused_by_name(home: Home, env: dict[str, str], said: str) -> None:
    assert said in home.refusal(env=env)


def test_variables_are_read_as_the_type_of_their_setting(home: Home) -> None:
    env = {
        "KEYSTROKE_SPECULATION_ENABLED": "off",
        "KEYSTROKE_GENERATION_TEMPERATURE": "1",
        "KEYSTROKE_PATHS_MODELS": "weights",
        "KEYSTROKE_ASSIST_EXCLUDE": "*.secret, .env",
        "KEYSTROKE_REMOTE_BASE_URL": "http://gpu:8000/v1",
        "KEYSTROKE_ENGINE_THREADS": "",
    }
    settings = home.load(env=env)
    assert settings.speculation.enabled is False
    assert settings.generation.temperature == 1.0
    assert settings.paths.models == home.cwd / "weights"
    assert settings.assist.exclude == ("*.secret", ".env")
    assert settings.remote.base_url == "http://gpu:8000/v1"
    assert settings.engine.threads == 0


def test_a_variable_that_holds_a_key_is_not_mistaken_for_a_setting(home: Home) -> None:
    user = "[models.deep]\nengine='remote'\nbase_url='http://x/v1'\nmodel='m'\napi_key_env='KEYSTROKE_DEEP_PASS'\n"
    env = {
        "KEYSTROKE_DEEP_PASS": "sk-1",
        "KEYSTROKE_API_KEY": "sk-2",
        "KEYSTROKE_KEY": "x",
        "KEYSTROKE_DEBUG": "1",
    }
    assert home.load(user, env=env).models["deep"].api_key_env == "KEYSTROKE_DEEP_PASS"
    assert "KEYSTROKE_DEEP_PASS is not a setting" in home.refusal(env=env)


@pytest.mark.parametrize(
    "text",
    [
        "[remote]\nbase_url = 'http://evil/v1'\n",
        "[remote]\napi_key_env = 'HOME'\n",
        "[server]\nhost = '0.0.0.0'\n",
        "[server]\ndatabase = 'postgresql://evil/x'\n",
        "[paths]\ncache = '/etc'\n",
        "[engine]\nkind = 'remote'\n",
        "[assist]\nexclude = []\n",
        "[models.fast]\nbase_url = 'http://evil/v1'\n",
        "models = {fast = {base_url = 'http://evil/v1'}}\n",
        "remote.base_url = 'http://evil/v1'\n",
    ],
)
def test_a_project_cannot_redirect_code_or_keys(home: Home, text: str) -> None:
    message = home.refusal(project=text)
    assert "a project may not set" in message
    assert str(home.project) in message
    assert f"put it in {home.user}" in message
    assert home.load(user=text, project="")


def test_paths_in_a_file_start_at_that_file(home: Home) -> None:
    settings = home.load("[paths]\nmodels = 'weights'\n[models.mine]\npath = '~/m.gguf'\n")
    assert settings.paths.models == home.user.parent / "weights"
    assert settings.models["mine"].path == Path.home() / "m.gguf"


def test_a_model_name_may_hold_dots_and_flags_reach_it(home: Home) -> None:
    settings = home.load("[models.'qwen2.5']\nrole = 'deep'\n", flags={"models.qwen2.5.concurrent": "2"})
    assert settings.models["qwen2.5"].concurrent == 2
    assert settings.origin("models.qwen2.5.role") == Origin(SettingSource.USER, str(home.user), 2)
    with pytest.raises(ConfigError, match=r"models\.qwen3\.role is not a setting"):
        settings.origin("models.qwen3.role")


def test_passwords_inside_urls_are_masked_when_shown(home: Home) -> None:
    settings = home.load("[server]\ndatabase = 'postgresql://me:hunter2@db/keys'\n")
    row = next(row for row in settings.describe() if row.key == "server.database")
    assert row.value == "postgresql://me:***@db/keys"
    assert "hunter2" in settings.get("server.database")


def test_unreadable_bytes_and_huge_files_are_refused(home: Home) -> None:
    home.load()
    home.user.write_bytes(b"[engine]\nthreads = 1 # \xff\n")
    with pytest.raises(ConfigError, match="line 2: not UTF-8"):
        load_settings({}, home.cwd, {"KEYSTROKE_CONFIG": str(home.user)})
    home.user.write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than 1 MB"):
        load_settings({}, home.cwd, {"KEYSTROKE_CONFIG": str(home.user)})


def test_settings_are_frozen_and_travel_between_processes(home: Home) -> None:
    settings = home.load("[models.deep]\nrole = 'deep'\n", env={"KEYSTROKE_ENGINE_THREADS": "2"})
    with pytest.raises(AttributeError):
        settings.engine.threads = 3  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(settings))
    assert copy == settings
    assert copy.origin("engine.threads") == settings.origin("engine.threads")


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 50_000,
        ".".join("a" * 100_000) + " = 1",
        "[engine]\nthreads = " + "9" * 5_000,
        "[engine]\nthreads = " + "9" * 300,
        "'" + "x" * 500_000 + "' = 1",
        " " * 500_000 + "\nx = 1",
        "[engine]\nkind = '" + "x" * 500_000 + "'",
        "[model]\nprecision = '" + "x" * 500_000 + "'",
        "[model]\ndefault = '../evil.gguf'",
        "[server.host]\nx = 1",
        "[[models]]\nname = 'x'",
        "\x00",
    ],
)
def test_a_hostile_project_file_is_refused_in_one_short_sentence(home: Home, text: str) -> None:
    message = home.refusal(project=text)
    assert str(home.project) in message
    assert "\n" not in message
    assert len(message) < 500 + len(str(home.project)) + len(str(home.user))


def test_an_unknown_flag_is_refused_with_the_nearest_key(home: Home) -> None:
    assert "did you mean server.port?" in home.refusal(flags={"server.prot": 1})


@pytest.mark.parametrize("name", ["draft_worker", "max_draft"])
@pytest.mark.parametrize("source", ["user", "project", "environment", "flag"])
def test_a_setting_of_an_earlier_release_is_accepted_with_one_warning(
    home: Home, source: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = f'[speculation]\nenabled = false\n{name} = "ahead"\n'
    key, variable = f"speculation.{name}", f"KEYSTROKE_SPECULATION_{name.upper()}"
    cases: dict[str, dict[str, Any]] = {
        "user": {"user": text},
        "project": {"project": text},
        "environment": {"env": {variable: "ahead"}},
        "flag": {"flags": {key: "ahead"}},
    }
    given = cases[source]
    settings = home.load(**given)
    assert settings == home.load(**given)  # read again: no second warning
    assert settings.speculation.enabled == (source not in ("user", "project"))
    [said] = [record.getMessage() for record in caplog.records]
    assert f"{key} has no effect any more; remove it" in said
    if source in ("user", "project"):
        assert "keystroke.toml, line 3: " in said


def test_every_setting_has_a_reader() -> None:
    source = Path(keystroke.__file__).parent
    files = (path for path in source.rglob("*.py") if "config" not in path.relative_to(source).parts)
    read = {
        node.attr
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    declared = {
        f"{section.__name__}.{item.name}": item.name
        for section in (*SECTIONS.values(), NamedModel)
        for item in dataclasses.fields(section)
    }
    assert {key for key, name in declared.items() if name not in read} == set()
