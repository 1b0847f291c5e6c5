"""Loads pytest, waits for a line of standard input, then runs `python -m pytest` or a pytest script.

Runs inside the sandbox as `PYTHON -c THIS`, so it imports only the standard library and pytest. The line is a
JSON list: the script (empty for `-m pytest`), then the arguments. Nothing of the workspace may be loaded
before the line comes, because it changes until then: if a module of it is, pytest is started anew.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import runpy
import sys


def load() -> None:
    """Import pytest, its own plugins and the installed ones. Those are imported through pytest's import hook,
    as pytest would, because their assertions are rewritten."""
    config = importlib.import_module("_pytest.config")  # the project's, which is no dependency of ours
    for name in config.default_plugins:
        importlib.import_module(f"_pytest.{name}")
    if os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        return
    hook = importlib.import_module("_pytest.assertion").install_importhook(config.get_config())
    plugins = [
        (entry.value.partition(":")[0], dist)
        for dist in importlib.metadata.distributions()
        for entry in dist.entry_points
        if entry.group == "pytest11"
    ]
    for _, dist in plugins:
        for name in config._iter_rewritable_modules(map(str, dist.files or ())):
            hook.mark_rewrite(name)
    for module, _ in plugins:
        importlib.import_module(module)
    sys.meta_path.remove(hook)


def is_of_workspace(module: object) -> bool:
    path = getattr(module, "__file__", None)
    if not isinstance(path, str):
        return False
    path = os.path.realpath(path)
    return path.startswith(f"{os.getcwd()}{os.sep}") and "site-packages" not in path


def main() -> None:
    sys.path.remove("")  # of `-c`; nothing is imported from the workspace yet
    usable = True
    try:
        load()
    except BaseException:  # the run itself reports it
        usable = False
    script, *arguments = json.loads(sys.stdin.readline() or '[""]')
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if not usable or any(map(is_of_workspace, list(sys.modules.values()))):
        options = sys.orig_argv[1 : sys.orig_argv.index("-c")]
        command = [sys.executable, *options, *([script] if script else ["-m", "pytest"]), *arguments]
        os.execv(sys.executable, command)
    sys.path.insert(0, os.path.dirname(script) if script else os.getcwd())
    importlib.invalidate_caches()
    sys.argv = [script, *arguments]
    if script:
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)


main()
