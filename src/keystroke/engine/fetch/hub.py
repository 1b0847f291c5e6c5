"""Downloads models of the Hugging Face hub by owner and name.

`huggingface_hub` lists a repository and provides the user's token and endpoint. This module chooses the files
of the model, downloads them in ranges that can be resumed, and translates errors. Only text, safetensors and
GGUF files are downloaded: nothing that could be executed.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from keystroke.engine.fetch.parts import FilePart, PartialDownload, PartSource
from keystroke.engine.fetch.staging import check_space
from keystroke.engine.library import Progress
from keystroke.errors import InputError, KeystrokeError, ModelError, NotFound, Unavailable

REFERENCE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<file>.+))?")
TEXTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
_PREFERRED = "q4_k_m"  # of several quantisations: small, and close to the original
SPAN = 16 << 20  # bytes per request: the most that is lost when a connection breaks
_PATIENCE = 10.0  # seconds to connect and for the list of files


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; `sha256` is None if the hub does not state it."""

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Repository:
    name: str
    commit: str
    files: tuple[HubFile, ...]


def list_repository(name: str) -> Repository:
    """The files of the repository `owner/name`. Raises NotFound, Unavailable or ModelError."""
    with _translate_errors(name):
        info = _open_api().model_info(name, files_metadata=True, timeout=_PATIENCE)
    files = [
        HubFile(item.rfilename, int(item.size or 0), item.lfs.sha256 if item.lfs is not None else None)
        for item in info.siblings or ()
    ]
    return Repository(name, str(info.sha or "main"), tuple(files))


def choose_files(found: Repository, wanted: str | None) -> tuple[HubFile, ...]:
    """The files of the model: a GGUF file (the one wanted, the only one, or the preferred of many), or
    safetensors with their configuration. Raises InputError or NotFound, listing the available files."""
    ggufs = [file for file in found.files if file.name.lower().endswith(".gguf")]
    if wanted is not None:
        return (_select_file(found, ggufs, wanted),)
    weights = [f for f in found.files if f.name.endswith(".safetensors") and "/" not in f.name]
    there = {file.name for file in found.files}
    if weights and {"config.json", "tokenizer.json"} <= there:
        return (*(f for f in found.files if f.name in TEXTS), *weights)
    whole = [file for file in ggufs if not _SPLIT.search(file.name)]
    usual = [file for file in whole if _PREFERRED in file.name.lower()]
    for candidates in (whole, usual):
        if len(candidates) == 1:
            return (candidates[0],)
    if whole:
        raise InputError(
            f"{found.name} has {len(whole)} GGUF files; name one, such as {found.name}:{whole[0].name}"
        )
    raise InputError(
        f"{found.name} has neither a GGUF file nor safetensors with config.json and tokenizer.json; "
        "choose a repository that has"
    )


def _select_file(found: Repository, ggufs: Sequence[HubFile], wanted: str) -> HubFile:
    """The GGUF file called `wanted`, or the only one whose name contains it (such as q8_0)."""
    exact = [file for file in ggufs if file.name == wanted]
    close = exact or [file for file in ggufs if wanted.lower() in file.name.lower()]
    if len(close) != 1:
        offered = ", ".join(file.name for file in (close or ggufs)[:6]) or "none"
        raise NotFound(f"{found.name} has no single GGUF file {wanted:.80}; it has {offered}", param="model")
    if _SPLIT.search(close[0].name):
        raise InputError(f"{close[0].name} is one of several pieces; choose a file that is whole")
    return close[0]


def fetch_files(
    found: Repository, files: Sequence[HubFile], folder: Path, name: str, progress: Progress
) -> list[Path]:
    """Download `files` into `folder`, resuming partial ones, and verify their checksums. Raises Unavailable,
    NotEnoughDisk or ModelDamaged."""
    total, before = sum(file.size for file in files), 0
    parted = [_make_download(file, folder, name) for file in files]
    check_space(folder, sum(each.parts[n].size for each in parted for n in each.missing), name)
    paths: list[Path] = []
    for file, each in zip(files, parted, strict=True):

        def shown(what: str, done: int, _total: int, before: int = before) -> None:
            progress(what, before + done, total)

        paths.append(each.fetch(functools.partial(HubRanges, found, file.name, each.spans), shown))
        before += file.size
    return paths


def _make_download(file: HubFile, folder: Path, name: str) -> PartialDownload:
    parts = [
        FilePart(f"{file.name} from byte {start:,} on", min(SPAN, file.size - start))
        for start in range(0, file.size, SPAN)
    ]
    return PartialDownload(name, file.name, file.sha256, parts, folder)


class HubRanges(PartSource):
    """Downloads ranges of one file. (The hub client's own download cannot be resumed.)"""

    def __init__(self, found: Repository, file: str, spans: Sequence[tuple[int, int]]) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        self._file, self._repository, self._spans = file, found.name, spans
        self._url = hf_hub_url(found.name, file, revision=found.commit, endpoint=_endpoint())
        patience = httpx.Timeout(30.0, connect=_PATIENCE)
        headers = {**build_hf_headers(library_name="keystroke"), "Accept-Encoding": "identity"}
        self._client = httpx.Client(headers=headers, timeout=patience, follow_redirects=True)
        self._stopped = False

    @contextmanager
    def blocks(self, number: int, prefix: Path) -> Iterator[Iterable[bytes]]:
        start, end = self._spans[number]
        headers = {"Range": f"bytes={start}-{end - 1}"} if len(self._spans) > 1 else {}
        try:
            with self._client.stream("GET", self._url, headers=headers) as answer:
                if answer.status_code != (206 if headers else 200):
                    raise Unavailable(
                        f"the hub answers {answer.status_code} for {self._file} of {self._repository}"
                    )
                yield self._until_stopped(answer)
        except httpx.HTTPError as error:
            raise _unreachable_error(self._repository, error) from None

    def stop(self) -> None:
        self._stopped = True
        self._client.close()

    def _until_stopped(self, answer: httpx.Response) -> Iterator[bytes]:
        for block in answer.iter_raw():
            if self._stopped:
                raise Unavailable("the download was stopped")
            yield block


def _open_api() -> Any:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars, logging

    disable_progress_bars()  # we show our own
    logging.set_verbosity_error()
    return HfApi(endpoint=_endpoint(), library_name="keystroke")


def _endpoint() -> str | None:
    """The mirror that HF_ENDPOINT names; None: the hub itself."""
    return os.environ.get("HF_ENDPOINT") or None


@contextmanager
def _translate_errors(repo: str) -> Iterator[None]:
    """Translate the client's errors. Its transport has changed between major releases, so that any error
    which is not one of its own classes means that the hub did not answer."""
    from huggingface_hub import errors

    try:
        yield
    except (KeystrokeError, KeyboardInterrupt):
        raise
    except errors.GatedRepoError:
        raise ModelError(
            f"{repo} is given only to those who accepted its terms; do so on its page and set HF_TOKEN"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError):
        raise NotFound(
            f"the hub has no model called {repo:.120}; check the name, or set HF_TOKEN if it is private",
            param="model",
        ) from None
    except errors.OfflineModeIsEnabled:
        raise Unavailable(f"{repo} cannot be downloaded: HF_HUB_OFFLINE is set; unset it") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
            raise ModelError(f"{error.filename} cannot be written: {error.strerror}") from None
        raise _unreachable_error(repo, error) from None


def _unreachable_error(repo: str, error: Exception) -> Unavailable:
    why = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return Unavailable(
        f"the hub cannot be reached for {repo} ({why:.160}); check the network, or fetch the files elsewhere "
        "and add them with `keystroke models add FOLDER_OR_FILE`"
    )
