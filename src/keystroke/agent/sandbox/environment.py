"""What a command must not access outside the workspace, and the environment variables it gets.

Credential paths are files and folders in which programs keep credentials. Escape sockets make a program
outside the sandbox act (a container engine, a message bus, a key agent). Only environment variables that
are known to be harmless are passed on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

import platformdirs

from keystroke.config import load_settings
from keystroke.errors import ConfigError

_CREDENTIALS = (
    ".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".netrc", ".pgpass", ".git-credentials", ".npmrc",
    ".pypirc", ".password-store", ".config/gh", ".config/gcloud", ".config/op", ".config/rclone",
    ".config/hub", ".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials", ".terraform.d",
    ".local/share/keyrings", ".mozilla", ".config/google-chrome", ".config/chromium",
    "Library/Keychains", "Library/Cookies", "Library/Application Support/Google/Chrome",
    ".config/git/credentials", ".cache/huggingface/token", ".huggingface/token", ".codex/auth.json",
    ".claude/.credentials.json", ".config/github-copilot", ".vault-token", ".env", ".bash_history",
    ".zsh_history", ".python_history", ".node_repl_history", ".psql_history", ".mysql_history",
    ".local/share/fish/fish_history", ".config/containers/auth.json", ".databrickscfg", ".boto", ".s3cfg",
)  # fmt: skip
_ESCAPE_SOCKETS = (
    "/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock", "/run/crio/crio.sock",
    "/run/dbus/system_bus_socket", "/run/systemd/private", "/run/snapd.socket", "/var/lib/lxd/unix.socket",
)  # fmt: skip
_USER_ESCAPE_SOCKETS = (
    "bus",
    "systemd/private",
    "docker.sock",
    "podman/podman.sock",
    "keyring/control",
    "gnupg",
)
_HARMLESS = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "COLUMNS", "LINES",
    "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHASHSEED", "PYENV_ROOT", "PYENV_VERSION", "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV", "NODE_PATH", "NODE_ENV", "NVM_DIR", "VOLTA_HOME", "JAVA_HOME", "GOPATH", "GOROOT",
    "GOCACHE", "GOMODCACHE", "GOFLAGS", "CARGO_HOME", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN", "GEM_HOME",
    "GEM_PATH", "CC", "CXX", "LD_LIBRARY_PATH", "PKG_CONFIG_PATH", "NIX_PATH", "CI",
)  # fmt: skip


def credential_paths(home: Path | None = None) -> tuple[Path, ...]:
    """Existing files and folders of the user's home that hold credentials, with links resolved."""
    home = home or Path.home()
    return tuple((home / name).resolve() for name in _CREDENTIALS if (home / name).exists())


def program_folders() -> tuple[Path, ...]:
    """The program's own folders that exist: configuration, models, caches, and state, which holds the keys of
    running gateways. A command that reads them could act as the gateway's user."""
    usual = (
        platformdirs.user_config_path("keystroke", appauthor=False),
        platformdirs.user_data_path("keystroke", appauthor=False),
        platformdirs.user_cache_path("keystroke", appauthor=False),
        platformdirs.user_state_path("keystroke", appauthor=False),
    )
    chosen: tuple[Path, ...] = ()
    with contextlib.suppress(ConfigError):  # reported elsewhere; the usual folders are hidden all the same
        paths = load_settings().paths
        chosen = (paths.models, paths.cache, paths.state)
    found = {path.resolve() for path in (*usual, *chosen) if path.is_dir()}
    return tuple(path for path in sorted(found) if found.isdisjoint(path.parents))


def secret_files(folder: Path, patterns: Iterable[str], most: int = 200_000) -> tuple[Path, ...]:
    """Files below `folder` whose names match a pattern. Links are not followed."""
    wanted = tuple(patterns)
    found: list[Path] = []
    seen = 0
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in (".git", "node_modules")]
        seen += len(files)
        found += [Path(parent, name) for name in files if any(fnmatch(name, pattern) for pattern in wanted)]
        if seen > most:
            break
    return tuple(found)


def escape_sockets(user: int | None = None) -> tuple[Path, ...]:
    """Sockets that this user can open and that a sandbox without mounts cannot hide."""
    mine = Path(f"/run/user/{os.getuid() if user is None else user}")
    known = [Path(name) for name in _ESCAPE_SOCKETS] + [mine / name for name in _USER_ESCAPE_SOCKETS]
    return tuple(path for path in known if os.access(path, os.W_OK))


def command_environment(scratch: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a command: harmless variables of `given` (by default this process's), without
    keys and sockets. Caches and temporary files go to `scratch`, as the command sees it."""
    given = os.environ if given is None else given
    kept = {
        name: value for name, value in given.items() if any(fnmatch(name, pattern) for pattern in _HARMLESS)
    }
    return {
        **kept,
        "TERM": "dumb",
        "NO_COLOR": "1",
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
    }


def paths_excluding(hidden: Iterable[Path], start: Path = Path("/")) -> list[Path]:
    """The fewest paths that cover `start` without any of `hidden`, for sandboxes that can only allow.
    Links, and entries created later beside a hidden one, are not covered."""
    secret = {path.absolute() for path in hidden}
    inside = [path for path in secret if path.is_relative_to(start)]
    if start in secret or start.is_symlink():
        return []
    if not inside:
        return [start]
    try:
        entries = sorted(start.iterdir())
    except OSError:
        return []
    return [path for entry in entries for path in paths_excluding(inside, entry)]
