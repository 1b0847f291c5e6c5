"""Verifies shipped weights against the `SHA256SUMS` beside them, in the format of `sha256sum`."""

from __future__ import annotations

from pathlib import Path

from keystroke.engine.library import Progress, hash_file, no_progress
from keystroke.errors import ModelDamaged, NotFound

NAME = "SHA256SUMS"


def verify_checksums(folder: Path, progress: Progress = no_progress) -> list[str]:
    """Verify a folder and return the names of its files. Raises NotFound if it has no checksums, ModelDamaged
    for a missing or different file."""
    try:
        lines = (folder / NAME).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        raise NotFound(f"{folder} has no readable {NAME}; reinstall the program if in doubt") from None
    wanted = [line.split(maxsplit=1) for line in lines if line.strip()]
    if not wanted or any(len(parts) != 2 or len(parts[0]) != 64 or "/" in parts[1] for parts in wanted):
        raise ModelDamaged(f"{folder / NAME} is not a list of checksums; reinstall the program")
    sizes = [_file_size(folder / name.lstrip("*")) for _, name in wanted]
    done = 0
    for (digest, name), size in zip(wanted, sizes, strict=True):
        path = folder / name.lstrip("*")
        found = hash_file(path, progress, f"verify {path.name}", done, sum(sizes))
        if found != digest.lower():
            raise ModelDamaged(
                f"{path} is not what was published (SHA-256 {found[:12]}…, not {digest[:12]}…); "
                "reinstall the program"
            )
        done += size
    return [name.lstrip("*") for _, name in wanted]


def _file_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        raise ModelDamaged(f"{path} is missing; reinstall the program") from None
