"""From a name or a path to a model that answers: the one place that chooses a backend.

Knows every local backend and imports only the one it needs. Everything that can be wrong with a model
is found here, before the first token, and said in one sentence.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from keystroke.config import Settings, load_settings
from keystroke.engine.adapter import AdapterFile, read_adapter
from keystroke.engine.base import Engine
from keystroke.engine.card import card_languages
from keystroke.engine.checkpoint import Checkpoint, ModelSpec, extended, open_checkpoint
from keystroke.engine.checkpoint.digest import quick_digest
from keystroke.engine.checkpoint.gguf_header import held_header
from keystroke.engine.gpu_kind import other_gpu
from keystroke.engine.library import Progress, silent
from keystroke.engine.locate import adapter_path, resolve, shipped_folders, table_for
from keystroke.engine.memory import available_bytes
from keystroke.engine.model import Model
from keystroke.engine.templates import detect_chat, detect_fim
from keystroke.engine.tokenizer import Tokenizer, load_tokenizer
from keystroke.errors import ConfigError, KeystrokeError, ModelError, NotEnoughMemory

if TYPE_CHECKING:
    from keystroke.engine.cuda.plan import KvPrecision
    from keystroke.engine.cuda.sparse import Sparse
    from keystroke.engine.onnx.kept_prefixes import KeptPrefixes
    from keystroke.engine.onnx.stored import Stored

# A model that is not stored in blocks is rounded. Below this, four bits cost more quality than they save
# time; above, memory traffic decides.
FOUR_BITS_FROM = 3_000_000_000
# Where a driver shows; the second is what Linux inside Windows has.
_NVIDIA_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/dxg"))
# A GPU keeps files of four bits as they are stored and reads other weights in 16 bits, fast enough for what
# fits its memory; fewer bits are a choice.
GpuPrecision = Literal["auto", "bf16", "int8", "int4", "stored"]
GPU_PRECISIONS: dict[str, GpuPrecision] = {
    "auto": "auto",
    "fp16": "bf16",
    "int8": "int8",
    "int4": "int4",
    "stored": "stored",
}

# Two models that cut this alike, into vocabularies of one size, share them.
PROBE = "def f(x):\n\treturn x + 1  # 0123456789 \u00e9\u4e2d\n"


def load_model(model: str | Path, settings: Settings | None = None, progress: Progress = silent) -> Model:
    """Load the model a name or a path stands for. Converts it the first time, which takes seconds and
    is shown through `progress`. Raises NotFound, ConfigError, or one of ModelError's kinds."""
    settings = settings or load_settings()
    # The adapter first: whoever has none need not fetch its model.
    adapter = _adapter(model, settings) if isinstance(model, str) else None
    path = model if isinstance(model, Path) else resolve(model, settings, progress)
    named = table_for(str(model), settings)
    kind = named.engine if named is not None and named.engine != "auto" else settings.engine.kind
    precision = (
        named.precision if named is not None and named.precision != "auto" else settings.model.precision
    )
    backend = _backend(kind)
    with held_header(path):  # read once for all who ask
        # The tokenizer first: converting takes time, and is in vain without one.
        tokenizer = _tokenizer(path, settings.paths.cache / "tokenizers")
        if backend == "cuda":
            engine = _cuda(path, precision, settings, adapter=adapter)
        else:
            engine = _onnx(path, precision, settings, progress, adapter)
        name = model if isinstance(model, str) else engine.info.name
        chat, fim = detect_chat(path), detect_fim(tokenizer, path)
    if adapter is not None and fim is not None and adapter.facts.get("fim_order") in ("psm", "spm"):
        fim = replace(fim, order=cast("Literal['psm', 'spm']", adapter.facts["fim_order"]))
    draft = _draft(engine, tokenizer, backend, settings, progress)
    learned = adapter.facts if adapter is not None else {}
    languages, follows = card_languages(path), card_languages(path, "follows") or frozenset()
    return Model(name, engine, tokenizer, chat, fim, path, draft, languages, learned, follows)


def _adapter(model: str, settings: Settings) -> AdapterFile | None:
    """The adapter that a model is to be run with. Raises InputError or ModelDamaged."""
    path = adapter_path(model, settings)
    return read_adapter(path) if path is not None else None


def _draft(
    engine: Engine,
    tokenizer: Tokenizer,
    backend: str,
    settings: Settings,
    progress: Progress,
) -> Engine | None:
    """The engine of the smaller model that drafts for `engine`, where the settings name one."""
    wanted = settings.speculation.draft_model
    if wanted is None or not settings.speculation.enabled:
        return None
    try:
        path = resolve(wanted, settings, progress)
        precision = settings.model.precision
        if backend == "cuda":
            draft = _cuda(path, precision, settings, kv_tokens=2 * engine.info.context_length)
        else:
            draft = _onnx(path, precision, settings, progress)
        try:
            other = _tokenizer(path, settings.paths.cache / "tokenizers")
            if draft.info.vocab_size != engine.info.vocab_size or other.encode(PROBE) != tokenizer.encode(
                PROBE
            ):
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


def _tokenizer(path: Path, cache: Path) -> Tokenizer:
    try:
        return load_tokenizer(path, cache)
    except KeystrokeError:
        open_checkpoint(path).close()  # where the model as a whole is of no use, that is what to say
        raise


def _backend(kind: str) -> str:
    if kind == "remote":
        raise ConfigError(
            "engine.kind is remote, which loads no local model; name a [models.NAME] with a base_url"
        )
    if kind == "auto":
        return "cuda" if _has_gpu() else "onnx"
    return kind


def _has_driver() -> bool:
    return any(path.exists() for path in _NVIDIA_DRIVERS)


@functools.cache
def _has_gpu() -> bool:
    """Looks for driver and package first: importing torch takes seconds that a laptop need not spend."""
    if not _has_driver() or importlib.util.find_spec("torch") is None:
        return False
    import torch

    if not torch.cuda.is_available():
        return False
    from keystroke.engine.cuda.gpu import gpu_target, nvidia_gpu

    try:
        gpu_target(nvidia_gpu())
    except ModelError:
        return False  # too old: `doctor` says so, and so does engine.kind = cuda
    return True


def _onnx(
    path: Path,
    precision: str,
    settings: Settings,
    progress: Progress,
    adapter: AdapterFile | None = None,
) -> Engine:
    from keystroke.engine.onnx.convert import converted, stored_bytes
    from keystroke.engine.onnx.engine import OnnxEngine
    from keystroke.engine.onnx.precision import PRECISIONS
    from keystroke.engine.onnx.stored import Stored, keeps_weights

    stored = None
    with open_checkpoint(path) as checkpoint:
        if settings.engine.context > checkpoint.spec.context_length:
            checkpoint.spec = extended(checkpoint.spec, settings.engine.context)
        spec = checkpoint.spec
        if adapter is not None:
            adapter.check(spec)
        if precision == "auto":
            smaller = "int4" if spec.parameters >= FOUR_BITS_FROM else "int8"
            precision = "stored" if keeps_weights(checkpoint) else smaller
        if precision == "stored":
            model, stored = _as_stored(checkpoint, settings, progress, adapted=adapter is not None)
        else:
            _check_memory(spec, stored_bytes(spec, PRECISIONS[precision]), precision)
            own = None if precision == "fp32" else _operators(checkpoint, settings, progress)
            stored = Stored(own, {}) if own is not None else None
            model = converted(
                checkpoint,
                precision=precision,
                native=own is not None,
                progress=lambda done, total: progress(f"converting {spec.name} to {precision}", done, total),
                cache=settings.paths.cache,
                adapted=adapter is not None,
            )
    made = f"{precision}/{stored is not None}" + (f"/{adapter.digest}" if adapter is not None else "")
    return OnnxEngine(
        model,
        spec,
        precision=precision,
        threads=settings.engine.threads,
        kv_budget=kv_budget(settings),
        context_length=settings.engine.context or None,
        exact=settings.engine.exact,
        stored=stored,
        free_memory=available_bytes if settings.engine.kv_budget_mb is None else lambda: None,
        kept=_kept_prefixes(path, made, settings),
        adapter=adapter,
    )


def _as_stored(
    checkpoint: Checkpoint, settings: Settings, progress: Progress, *, adapted: bool = False
) -> tuple[Path, Stored | None]:
    """The graph that runs a model's matrices as they are stored, and what it is completed with where our own
    operators can be had. Raises ConfigError for matrices of other types."""
    from keystroke.engine.onnx.convert import kept_as_stored
    from keystroke.engine.onnx.stored import TYPES, Stored, keeps_weights, portable_bytes, stored_tables

    spec, cache = checkpoint.spec, settings.paths.cache
    if not keeps_weights(checkpoint):
        raise ConfigError(
            f"{spec.name} has matrices that are not stored as {', '.join(TYPES)}; "
            "set model.precision to int8 or int4, which converts them"
        )
    own = _operators(checkpoint, settings, progress)
    tables = stored_tables(checkpoint) if own is not None else {}
    _check_memory(
        spec,
        sum(table.nbytes for table in tables.values()) if tables else portable_bytes(checkpoint),
        "stored",
    )
    model = kept_as_stored(
        checkpoint,
        native=own is not None,
        progress=lambda done, total: progress(f"laying out {spec.name}", done, total),
        cache=cache,
        adapted=adapted,
    )
    return model, Stored(own, tables) if own is not None else None


def _operators(checkpoint: Checkpoint, settings: Settings, progress: Progress) -> Path | None:
    """Our own operators, compiled for this machine; None where there can be none, or none are wanted."""
    from keystroke.engine.onnx.native import library, must_compile
    from keystroke.engine.onnx.stored import suits_operators

    cache = settings.paths.cache
    if settings.engine.kernels != "auto" or not suits_operators(checkpoint):
        return None
    if compiling := must_compile(cache):
        progress("compiling operators for this processor", 0, 1)
    own = library(cache)
    if compiling:
        progress("compiling operators for this processor", 1, 1)
    return own


def kv_budget(settings: Settings) -> int:
    """Bytes for KV caches: as set, or half of what is free now, between half a gigabyte and sixteen."""
    if settings.engine.kv_budget_mb is not None:
        return settings.engine.kv_budget_mb << 20
    free = available_bytes()
    return min(max((free or 2 << 30) // 2, 512 << 20), 16 << 30)


def _kept_prefixes(path: Path, made: str, settings: Settings) -> KeptPrefixes | None:
    """`made`: how the model is run."""
    limit = settings.engine.prefix_disk_mb << 20
    if not limit:
        return None
    from keystroke.engine.onnx.kept_prefixes import KeptPrefixes
    from keystroke.engine.onnx.precision import FORMAT, OPERATORS

    # Everything that the values follow from: the weights, and what computes with them how.
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    how = (
        f"{made}/{FORMAT}/{OPERATORS}/{settings.engine.exact}/{settings.engine.context}/{platform.machine()}"
    )
    return KeptPrefixes(settings.paths.cache / "prefixes", f"{quick_digest(files)}/{how}", limit)


def _check_memory(spec: ModelSpec, need: int, precision: str) -> None:
    have = available_bytes()
    if have is not None and need > have:
        raise NotEnoughMemory(
            f"{spec.name} needs about {need / 2**30:.1f} GB at {precision} "
            f"and {have / 2**30:.1f} GB are free; "
            f"close other programs{', set model.precision to int4' * (precision != 'int4')} "
            "or choose a smaller model"
        )


def _cuda(
    path: Path,
    precision: str,
    settings: Settings,
    kv_tokens: int | None = None,
    adapter: AdapterFile | None = None,
) -> Engine:
    check_cuda()
    from keystroke.engine.cuda.engine import load_cuda

    chosen = _gpu_precision(precision)
    if kv_tokens is None and settings.speculation.draft_model is not None:
        kv_tokens = 4 * _context(path, settings)  # the model that drafts needs room too
    return load_cuda(
        path,
        precision=chosen,
        context=settings.engine.context or None,
        kv_tokens=kv_tokens,
        kv_bytes=settings.engine.kv_budget_mb and settings.engine.kv_budget_mb << 20,
        sparse=cast("Sparse", settings.engine.sparse),  # the settings know the same words
        kv_precision=cast("KvPrecision", settings.engine.kv_precision),
        draft_head=lambda spec: _draft_head(path, spec, settings),
        adapter=adapter,
        target=settings.engine.cuda_target,
    )


def _draft_head(path: Path, spec: ModelSpec, settings: Settings) -> Path | None:
    if not settings.speculation.enabled:
        return None
    from keystroke.engine.speculative.find_head import find_head

    return find_head(settings.speculation.draft_head, path, spec, (settings.paths.models, *shipped_folders()))


def check_cuda() -> None:
    """Raises ConfigError or ModelError, saying what to do, unless the CUDA engine runs on this machine."""
    if not _has_driver() and (other := other_gpu()) is not None:
        raise ModelError(other)
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the CUDA engine needs the extra packages: pip install 'keystroke[cuda]'")
    from keystroke.engine.cuda.gpu import gpu_target, nvidia_gpu

    gpu_target(nvidia_gpu())


def gpu_verdict(model: str, settings: Settings) -> tuple[bool, str]:
    """Whether this machine's GPU, its driver and its memory suit `model`, and one sentence about it."""
    try:
        check_cuda()
        path = resolve(model, settings, silent)
        named = table_for(model, settings)
        wanted = named.precision if named is not None else "auto"
        precision = _gpu_precision(wanted if wanted != "auto" else settings.model.precision)
        from keystroke.engine.cuda.gpu import gpu_report
        from keystroke.engine.cuda.stored import chosen

        with open_checkpoint(path) as checkpoint:
            spec = checkpoint.spec
            meant, stored = chosen(checkpoint, precision)
    except KeystrokeError as error:
        return False, str(error)
    kv_precision = cast("KvPrecision", settings.engine.kv_precision)
    return gpu_report(spec, meant, kv_precision, stored, settings.engine.cuda_target)


def _gpu_precision(precision: str) -> GpuPrecision:
    chosen = GPU_PRECISIONS.get(precision)
    if chosen is None:
        known = ", ".join(GPU_PRECISIONS)
        raise ConfigError(
            f"the CUDA engine has no precision {precision!r}; set model.precision to one of {known}"
        )
    return chosen


def _context(path: Path, settings: Settings) -> int:
    with open_checkpoint(path) as checkpoint:
        return settings.engine.context or checkpoint.spec.context_length
