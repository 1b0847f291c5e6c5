"""Caches built tokenizers on disk, keyed by a hash of everything they are built from.

Damaged files are ignored, and a folder that cannot be written only costs time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import tokenizers

from keystroke.engine.tokenizer.huggingface import LibraryTokenizer
from keystroke.replacing import replace_file

FORMAT = 2  # increment when the file format or the construction of tokenizers changes


def load_or_build(folder: Path, content: str, build: Callable[[], LibraryTokenizer]) -> LibraryTokenizer:
    """The tokenizer for the hash `content`, read from `folder` or built and stored there."""
    key = hashlib.sha256(f"{FORMAT}:{tokenizers.__version__}:{content}".encode()).hexdigest()
    place = folder / f"{key[:40]}.json"
    found = _read_cached(place)
    if found is None:
        found = build()
        with contextlib.suppress(OSError):
            _write(place, found)
    return found


def _read_cached(place: Path) -> LibraryTokenizer | None:
    try:
        digest, _, body = place.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            return None
        description, _, machine = body.partition(b"\n")
        return LibraryTokenizer.from_description(json.loads(description), machine.decode())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(place: Path, tokenizer: LibraryTokenizer) -> None:
    description, machine = tokenizer.description()
    body = f"{json.dumps(description)}\n{machine}".encode()
    place.parent.mkdir(parents=True, exist_ok=True)
    replace_file(place, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
