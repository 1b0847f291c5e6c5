"""Load a model by name or path: find its files, choose a backend, and detect its tokenizer and templates.

Whatever is wrong with a model is reported here, before the first token, as a KeystrokeError of one sentence.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from keystroke.config import Settings, load_settings
from keystroke.engine.adapter import read_adapter
from keystroke.engine.backends import Backend, LoadArguments, choose_backend
from keystroke.engine.base import Engine
from keystroke.engine.card import card_languages
from keystroke.engine.checkpoint import open_checkpoint
from keystroke.engine.checkpoint.gguf_header import cached_header
from keystroke.engine.library import Progress, no_progress
from keystroke.engine.locate import adapter_path, resolve, table_for
from keystroke.engine.model import Model
from keystroke.engine.onnx.native import start_compiling
from keystroke.engine.templates import detect_chat, detect_fim
from keystroke.engine.tokenizer import Tokenizer, load_tokenizer
from keystroke.errors import ConfigError, KeystrokeError

# Two models share a vocabulary if it has the same size and they cut this text into the same tokens.
SMALL_MODEL = 200_000_000  # parameters
_PROBE = "def f(x):\n\treturn x + 1  # 0123456789 \u00e9\u4e2d\n"


def load_model(
    model: str | Path, settings: Settings | None = None, progress: Progress = no_progress
) -> Model:
    """Load the model that a name or a path stands for. The first time it is converted, which takes seconds
    and is reported to `progress`. Raises NotFound, InputError, ConfigError or a ModelError."""
    settings = settings or load_settings()
    # The adapter first: a missing one is reported before its model is downloaded.
    adapter_file = adapter_path(model, settings) if isinstance(model, str) else None
    adapter = read_adapter(adapter_file) if adapter_file is not None else None
    path = model if isinstance(model, Path) else resolve(model, settings, progress)
    named = table_for(str(model), settings)
    kind = named.engine if named is not None and named.engine != "auto" else settings.engine.kind
    precision = (
        named.precision if named is not None and named.precision != "auto" else settings.model.precision
    )
    backend = _choose_backend(kind, path)
    if backend.name == "onnx" and settings.engine.kernels == "auto":
        start_compiling(settings.paths.cache)
    with cached_header(path):  # parsed once for everything below
        # The tokenizer first: without one, converting the model would be wasted time.
        tokenizer = _open_tokenizer(path, settings)
        request = LoadArguments(
            path=path, precision=precision, settings=settings, progress=progress, adapter=adapter
        )
        engine = backend.load(request)
        name = model if isinstance(model, str) else engine.info.name
        chat, fim = detect_chat(path), detect_fim(tokenizer, path)
    if adapter is not None and fim is not None and adapter.facts.get("fim_order") in ("psm", "spm"):
        fim = replace(fim, order=cast("Literal['psm', 'spm']", adapter.facts["fim_order"]))
    draft = _load_draft(engine, tokenizer, backend, settings, progress)
    learned = adapter.facts if adapter is not None else {}
    # "follows" is the older key of model cards.
    conservative = card_languages(path, "conservative_languages") or card_languages(path, "follows")
    languages = card_languages(path)
    return Model(
        name, engine, tokenizer, chat, fim, path, draft, languages, learned, conservative or frozenset()
    )


def _choose_backend(kind: str, path: Path) -> Backend:
    """The engine for a model. On a Mac a small one stays on the CPU, which answers it sooner, so that the
    GPU is free for the larger one."""
    backend = choose_backend(kind)
    if kind == "auto" and backend.name == "mlx":
        with open_checkpoint(path) as checkpoint:
            if checkpoint.spec.parameters < SMALL_MODEL:
                return choose_backend("onnx")
    return backend


def _load_draft(
    engine: Engine, tokenizer: Tokenizer, backend: Backend, settings: Settings, progress: Progress
) -> Engine | None:
    """The engine of the smaller model that drafts for `engine`, where the settings name one."""
    wanted = settings.speculation.draft_model
    if wanted is None or not settings.speculation.enabled:
        return None
    try:
        path = resolve(wanted, settings, progress)
        request = LoadArguments(
            path=path,
            precision=settings.model.precision,
            settings=settings,
            progress=progress,
            kv_tokens=2 * engine.info.context_length,
        )
        draft = backend.load(request)
        try:
            other = _open_tokenizer(path, settings)
            same_size = draft.info.vocab_size == engine.info.vocab_size
            if not same_size or other.encode(_PROBE) != tokenizer.encode(_PROBE):
                raise ConfigError(
                    f"{draft.info.name} cannot draft for {engine.info.name}: they do not share a vocabulary; "
                    "set speculation.draft_model to a smaller model of the same family"
                )
        except BaseException:
            draft.close()
            raise
    except BaseException:
        engine.close()
        raise
    return draft


def _open_tokenizer(path: Path, settings: Settings) -> Tokenizer:
    try:
        return load_tokenizer(path, settings.paths.cache / "tokenizers")
    except KeystrokeError:
        open_checkpoint(path).close()  # if the model itself is unusable, report that instead
        raise
