"""Source archives of releases, from the package index that this machine's pip is set up for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

import httpx

from keystroke.errors import InputError, Unavailable

_TRIES = 4


def normalise_name(name: str) -> str:
    """A project's name as package indexes normalise it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def configured_index() -> str:
    """The base address of pip's index, without `/simple`: from the environment, pip's settings, or the
    default in pip's help text."""
    address = os.environ.get("PIP_INDEX_URL", "").strip() or _run_pip("config", "get", "global.index-url")
    if not address:
        match = re.search(
            r"--index-url <url>[^(]*\(default (\S+)\)", " ".join(_run_pip("download", "--help").split())
        )
        address = match[1] if match else ""
    if not address.startswith(("http://", "https://")):
        raise InputError(
            f"pip's index {address!r} is not a web address; set index-url to one that serves JSON metadata"
        )
    return address.rstrip("/").removesuffix("/simple")


def _run_pip(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pip", *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def source_archive(package: str, version: str, folder: Path) -> bytes:
    """The archive, kept in `folder` once downloaded. The caller checks its hash."""
    archive = folder / f"{package}-{version}"
    if archive.is_file():
        return archive.read_bytes()
    page = f"{configured_index()}/pypi/{normalise_name(package)}/json"
    with httpx.Client(timeout=60, follow_redirects=True) as client:
        response = _get(client, page)
        known = response.json().get("releases", {}) if response.status_code == 200 else {}
        for file in known.get(version, ()):
            name = str(file.get("filename", ""))
            if file.get("packagetype") == "sdist" and name.endswith((".tar.gz", ".zip", ".tgz")):
                data = _get(client, urljoin(page, file["url"])).raise_for_status().content
                folder.mkdir(parents=True, exist_ok=True)
                part = archive.with_name(f"{archive.name}.part")
                part.write_bytes(data)
                part.replace(archive)
                return data
    raise InputError(f"the package index has no source archive of {package} {version}")


def _get(client: httpx.Client, url: str) -> httpx.Response:
    return with_retries(lambda: client.get(url), "the package index")


def with_retries(ask: Callable[[], httpx.Response], server: str) -> httpx.Response:
    """The response of `ask`, whatever its status below 500; repeated with growing pauses while the server
    fails or limits requests. Raises Unavailable, which names the `server`, after the last try."""
    for attempt in range(_TRIES):
        try:
            response = ask()
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if response.status_code < 500 and response.status_code != 429:
                return response
            problem = f"status {response.status_code}"
        if attempt + 1 < _TRIES:
            time.sleep(2.0**attempt)
    raise Unavailable(
        f"{server} does not answer ({problem}); run the command again to go on where it stopped"
    )
