"""What a command must not access outside the workspace, and the environment variables it gets.

Homes are hidden, and the toolchains in them are lent. Credential paths are files and folders in which
programs keep credentials; they are hidden also inside what is lent. A Unix socket can make a program outside
the sandbox act (a container engine, a message bus, a key agent). Only environment variables that are known
to be harmless are passed on.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
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
_TOOLCHAINS = (
    ".pyenv", ".rustup", ".cargo", ".nvm", ".volta", ".fnm", ".asdf", ".rbenv", ".rvm", ".gem", ".sdkman",
    ".jenv", ".deno", ".bun", ".dotnet", ".ghcup", ".cabal", ".stack", ".opam", ".elan", ".juliaup", ".julia",
    ".nix-profile", ".linuxbrew", ".conda", ".npm-global", ".pub-cache", ".swiftly", ".mix", ".luarocks",
    ".m2/repository", ".gradle/caches", ".gradle/wrapper", ".composer/vendor", ".config/composer/vendor",
    ".local/bin", ".local/lib", ".local/include", ".local/go", ".local/pipx", ".local/share/uv",
    ".local/share/pipx", ".local/share/mise", ".local/share/fnm", ".local/share/gem", ".local/share/pnpm",
    ".local/share/swiftly", ".local/state/nix", "go", "sdk", "miniconda3", "anaconda3", "miniforge3",
    "mambaforge",
)  # fmt: skip
_TOOLCHAIN_VARIABLES = (
    "VIRTUAL_ENV", "CONDA_PREFIX", "PYENV_ROOT", "NVM_DIR", "VOLTA_HOME", "JAVA_HOME", "GOPATH", "GOROOT",
    "GOMODCACHE", "CARGO_HOME", "RUSTUP_HOME", "GEM_HOME",
)  # fmt: skip
_TOOLCHAIN_PATHS = ("PYTHONPATH", "NODE_PATH", "GEM_PATH", "LD_LIBRARY_PATH", "PKG_CONFIG_PATH")
_MOST_SEARCHED = 200_000  # files of a workspace that are searched for secrets
_SYSTEM = frozenset(map(Path, ("/", "/usr", "/etc", "/var", "/opt", "/bin", "/lib", "/srv", "/nix")))
_HARMLESS = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "COLUMNS", "LINES",
    "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHASHSEED", "PYENV_ROOT", "PYENV_VERSION", "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV", "NODE_PATH", "NODE_ENV", "NVM_DIR", "VOLTA_HOME", "JAVA_HOME", "GOPATH", "GOROOT",
    "GOCACHE", "GOMODCACHE", "GOFLAGS", "CARGO_HOME", "RUSTUP_HOME", "RUSTUP_TOOLCHAIN", "GEM_HOME",
    "GEM_PATH", "CC", "CXX", "LD_LIBRARY_PATH", "PKG_CONFIG_PATH", "NIX_PATH", "CI",
)  # fmt: skip


def credential_paths() -> tuple[Path, ...]:
    """Existing files and folders of the user's home that hold credentials, with links resolved."""
    home = Path.home()
    return tuple((home / name).resolve() for name in _CREDENTIALS if os.path.exists(home / name))


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
    return outermost(path.resolve() for path in (*usual, *chosen) if os.path.isdir(path))


def secret_files(folder: Path, patterns: Iterable[str]) -> tuple[Path, ...]:
    """Files below `folder` whose names match a pattern. Links are not followed."""
    wanted = tuple(patterns)
    found: list[Path] = []
    seen = 0
    waiting = [folder]
    while waiting and seen <= _MOST_SEARCHED:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        seen += 1
                        if any(fnmatch(entry.name, pattern) for pattern in wanted):
                            found.append(Path(entry.path))
                    elif entry.name not in (".git", "node_modules"):
                        waiting.append(Path(entry.path))
        except OSError:  # unreadable for commands too
            continue
    return tuple(found)


def home_folders() -> tuple[Path, ...]:
    """The folders in which users keep their files, as far as they exist, none inside another. A home that is
    a folder of the system is left out: only its credentials can be hidden."""
    usual = [Path("/home"), Path("/root"), Path("/Users"), Path.home()]
    with contextlib.suppress(KeyError):
        usual.append(Path(pwd.getpwuid(os.getuid()).pw_dir))
    there = (path.resolve() for path in usual if os.path.isdir(path))
    return outermost(path for path in there if path not in _SYSTEM)


def toolchain_paths() -> tuple[Path, ...]:
    """Files and folders that programs are run from: this interpreter, what the search path and variables of
    toolchains name, and the places of a home in which toolchains install themselves."""
    home, given = Path.home(), os.environ
    found = [Path(sys.prefix), Path(sys.base_prefix), Path(os.path.realpath(sys.executable)).parent]
    found += [home / name for name in _TOOLCHAINS]
    found += [Path(given[name]) for name in _TOOLCHAIN_VARIABLES if given.get(name)]
    for name in _TOOLCHAIN_PATHS:
        found += [Path(part) for part in given.get(name, "").split(os.pathsep) if part]
    for part in given.get("PATH", "").split(os.pathsep):
        folder = Path(part)
        # A toolchain's programs need what lies beside them, but ~/.local and a home hold more than programs.
        whole = folder.name in ("bin", "shims", "sbin") and not home.is_relative_to(folder.parent)
        found.append(folder.parent if whole and folder.parent != home / ".local" else folder)
    there = (path for path in found if path.is_absolute() and os.path.exists(path))
    kept = [path for path in there if not home.is_relative_to(path)]
    return outermost([*kept, *(path.resolve() for path in kept)])


def outermost(paths: Iterable[Path]) -> tuple[Path, ...]:
    """The paths without those inside another, sorted."""
    known = set(paths)
    return tuple(path for path in sorted(known) if known.isdisjoint(path.parents))


def unix_sockets() -> tuple[Path, ...]:
    """The sockets that programs of this machine listen on by path. A read-only mount does not keep a command
    from connecting to one."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]
    except OSError:
        return ()
    names = {fields[7] for line in lines if len(fields := line.split(maxsplit=7)) == 8}
    paths = (Path(os.path.realpath(name)) for name in names if name.startswith("/"))
    return tuple(sorted(path for path in paths if os.path.exists(path)))


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
