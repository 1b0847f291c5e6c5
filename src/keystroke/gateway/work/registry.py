"""The models of a server, by name and by role.

Each name has its own engine, queue, budget and prices. Configured models are loaded before the server
listens, offered models on first use; a model with its adapter is loaded beside the plain model where that
needs no second copy of the weights. Starting and stopping belong to the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import difflib
import gc
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from keystroke.agent.chat.receipt import Price
from keystroke.assist.next_edit.places import PlacesFormat, adapter_places_format
from keystroke.assist.next_edit.prompt import EditFormat, detect_edit_format
from keystroke.config import NamedModel, Settings
from keystroke.engine.base import EngineStats
from keystroke.engine.library import ModelLibrary, Progress, no_progress
from keystroke.engine.locate import EDIT, base_model, has_adapter
from keystroke.engine.model import Model
from keystroke.engine.roles import Role, is_remote, model_for
from keystroke.engine.tokenizer import Tokenizer
from keystroke.errors import ConfigError, KeystrokeError
from keystroke.gateway.access.limits import RateBudget
from keystroke.gateway.work.loading import OfferedModel, PendingLoad
from keystroke.gateway.work.queue import WorkQueue
from keystroke.gateway.work.remote import RemoteScheduler
from keystroke.gateway.work.routing import ModelCandidate, Router
from keystroke.gateway.work.scheduler import Scheduler
from keystroke.protocol.faults import ModelNotFound

log = logging.getLogger("keystroke.registry")

AUTO = "auto"
ROLES = ("fast", "deep", "chat")
_JUST_USED = 5.0  # seconds between requesting a model and queueing its job, at most


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One named model. `model` is None for a remote one, whose context is `remote_context`, where it is
    known. `edits`: the format of its next-edit prompts, where it was trained for them."""

    name: str
    role: str
    scheduler: WorkQueue
    model: Model | None
    budget: RateBudget
    price: Price
    edits: EditFormat | PlacesFormat | None = None
    remote_context: int | None = None

    @property
    def candidate(self) -> ModelCandidate:
        here = self.model is not None
        return ModelCandidate(self.name, self.role, self.model is None or self.model.chat is not None, here)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer if self.model is not None else None

    @property
    def context_length(self) -> int | None:
        return self.model.engine.info.context_length if self.model is not None else self.remote_context

    @property
    def parameters(self) -> int:
        """The number of parameters; 0 where unknown."""
        return self.model.engine.info.parameters if self.model is not None else 0

    def stats(self) -> EngineStats | None:
        return self.model.engine.stats() if self.model is not None else None


Loader = Callable[[str, Progress], ServedModel]
AdapterLookup = Callable[[ServedModel], str | None]
"""The name of a loaded model with the adapter installed for it; None: there is none, or it costs too much."""


class ModelRegistry:
    """`entries` are loaded. `offers` are loaded by `load` on first use and unloaded after `idle_s` without
    use, or sooner where another model needs their memory. `open_ended`: any name that `load` accepts may be
    requested. `adapted_name`: see `load_adapted`."""

    def __init__(
        self,
        entries: Iterable[ServedModel],
        *,
        offers: Iterable[OfferedModel] = (),
        load: Loader | None = None,
        open_ended: bool = False,
        adapted_name: AdapterLookup = lambda entry: None,
        idle_s: float = 900.0,
    ) -> None:
        self.entries: dict[str, ServedModel] = {}
        for entry in entries:
            self._check_name(entry.name, entry.role)
            self.entries[entry.name] = entry
        self.offers = {offer.name: offer for offer in offers if offer.name not in self.entries}
        for offer in self.offers.values():
            self._check_name(offer.name, offer.role)
        if not self.entries and not self.offers:
            raise ConfigError("no model is configured; name one with --model or in [models.NAME]")
        self.loads: dict[str, PendingLoad[ServedModel]] = {}
        self._pinned = tuple(self.entries)
        self._load = load
        self._open_ended = open_ended and load is not None
        self._idle_s = idle_s
        self._adapted_name = adapted_name
        # By the name of each model that `load_adapted` checked: the name loaded beside it.
        self._beside: dict[str, str | None] = {}
        self._used: dict[str, float] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._build_router()

    @staticmethod
    def _check_name(name: str, role: str) -> None:
        if name in (AUTO, *ROLES) and role != name:
            raise ConfigError(f"a model may not be called {name}: that name chooses a role")

    def _build_router(self) -> None:
        # Models loaded on demand may be unloaded, so live buffers do not depend on them (`here` is False).
        here = [self.entries[name].candidate for name in self._pinned]
        later = [ModelCandidate(o.name, o.role, o.converses, here=False) for o in self.offers.values()]
        self.router = Router([*here, *later])

    def start(self) -> None:
        for entry in self.entries.values():
            entry.scheduler.start()
        if self._load is not None:
            self._sweeper = asyncio.create_task(self._unload_idle())

    async def stop(self) -> None:
        """End every answer and free every engine."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for load in self.loads.values():
            load.result.cancel()
        await asyncio.gather(*(_close(entry) for entry in self.entries.values()))

    def resolve(self, name: str) -> str:
        """The name of the model called `name`, or of the first of that role. Raises ModelNotFound."""
        if name in self.entries or name in self.offers:
            return name
        if name in ROLES and (first := self._first_of_role(name)) is not None:
            return first
        if self._open_ended and name not in ROLES:
            return name
        known = [AUTO, *(r for r in ROLES if self._first_of_role(r)), *self.entries, *self.offers]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(dict.fromkeys(known))}."
        raise ModelNotFound(f"There is no model called {name:.80}; {hint}", param="model")

    def role_of(self, name: str) -> str:
        """The role of a model that `resolve` returned."""
        known = self.entries.get(name) or self.offers.get(name)
        return known.role if known is not None else "fast"

    async def ensure_loaded(self, name: str) -> ServedModel:
        """The model that `resolve` returned, loaded if needed. Raises what loading raises."""
        entry = self.entries.get(name)
        if entry is None:
            entry = await asyncio.shield(self.start_load(name).result)
        self._used[name] = time.monotonic()
        # Requested by name, it is no longer unloaded together with another.
        self._beside = {base: None if beside == name else beside for base, beside in self._beside.items()}
        return entry

    def load_adapted(self, entry: ServedModel) -> None:
        """Start loading `entry` with its adapter, if it has one; it is unloaded together with `entry`. Tried
        once, after the prefill rate of `entry` was measured: the adapted model starts with the same rate."""
        rate = entry.scheduler.prefill_rate
        if self._load is None or rate is None or entry.name in self._beside:
            return
        name = self._beside[entry.name] = self._adapted_name(entry)
        if name is not None and name not in self.entries:
            self.start_load(name).result.add_done_callback(
                lambda ended: self._copy_prefill_rate(entry.name, ended, rate)
            )

    def _copy_prefill_rate(self, base: str, ended: asyncio.Future[ServedModel], rate: float) -> None:
        if ended.cancelled():
            return
        if (error := ended.exception()) is not None:
            log.info("%s is used without its adapter: %s", base, error)
        elif ended.result().scheduler.prefill_rate is None:
            ended.result().scheduler.prefill_rate = rate

    def start_load(self, name: str) -> PendingLoad[ServedModel]:
        """The load of a model in progress, started if needed."""
        load = self.loads.get(name)
        if load is None:
            make = self._load
            assert make is not None  # only offers are loaded later, and they come with a loader
            load = self.loads[name] = PendingLoad(name, lambda progress: make(name, progress))
            load.result.add_done_callback(lambda ended: self._on_loaded(name, ended))
        return load

    def _on_loaded(self, name: str, ended: asyncio.Future[ServedModel]) -> None:
        self.loads.pop(name, None)
        if not ended.cancelled() and ended.exception() is None:
            entry = ended.result()
            entry.scheduler.start()
            self.entries[name] = entry
            self._used[name] = time.monotonic()

    async def unload_idlest(self) -> bool:
        """Unload the model that was idle longest. False where none can be unloaded."""
        idle = self._find_idle(_JUST_USED)  # adapted models too: they are not loaded again
        if not idle:
            return False
        await self._unload(min(idle, key=lambda e: self._used.get(e.name, 0.0)))
        return True

    def _find_idle(self, seconds: float) -> list[ServedModel]:
        """The models loaded on demand and not used for so long."""
        since = time.monotonic() - seconds
        loaded = [e for e in self.entries.values() if e.name not in self._pinned]
        return [e for e in loaded if self._used.get(e.name, 0.0) <= since and not _busy(e)]

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(min(10.0, max(self._idle_s / 4, 0.05)))
            for entry in self._find_idle(self._idle_s):
                if entry.name not in self._beside.values():  # unloaded with its base
                    await self._unload(entry)

    async def _unload(self, entry: ServedModel) -> None:
        self.entries.pop(entry.name, None)
        beside = self.entries.pop(self._beside.pop(entry.name, None) or "", None)
        await _close(entry)
        if beside is not None:
            await _close(beside)
        del entry, beside
        _return_memory()

    def _first_of_role(self, role: str) -> str | None:
        found = next((c.name for c in self.router.candidates if c.role == role), None)
        if found is None and role == "chat":
            found = next((c.name for c in self.router.candidates if c.converses), None)
        return found


def _busy(entry: ServedModel) -> bool:
    return bool(entry.scheduler.running or entry.scheduler.waiting)


def _return_memory() -> None:
    """Give memory that is free back to the system: objects that refer to each other would stay until the next
    full collection, and the C library keeps what they held."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


async def _close(entry: ServedModel) -> None:
    await entry.scheduler.stop()
    if entry.model is not None:
        await asyncio.to_thread(entry.model.close)


def local_entry(
    name: str,
    model: Model,
    *,
    role: str = "fast",
    named: NamedModel | None = None,
    max_queue: int = 64,
    share_prefixes: bool = False,
) -> ServedModel:
    named = named or NamedModel()
    return ServedModel(
        name=name,
        role=role,
        scheduler=Scheduler(
            model, concurrent=named.concurrent, max_queue=max_queue, share_prefixes=share_prefixes
        ),
        model=model,
        budget=budget_of(named),
        price=Price.of(named),
        edits=_edit_format(model),
    )


def _edit_format(model: Model) -> EditFormat | PlacesFormat | None:
    """The format of next-edit prompts that the adapter, or else the model itself, was trained for."""
    learned = adapter_places_format(model.tokenizer, model.adapter_facts)
    if learned is not None or model.path is None:
        return learned
    return detect_edit_format(model.tokenizer, model.path)


def registry_from_settings(
    settings: Settings, progress: Progress = no_progress, *, roles: bool = True, open_ended: bool = False
) -> ModelRegistry:
    """Load every configured model; without any, the default one. Blocking, and may take seconds. `roles`:
    offer installed models for unassigned roles. `open_ended`: load other models on request."""
    tables = dict(settings.models)
    if settings.model.default not in tables and not any(t.role == "fast" for t in tables.values()):
        tables = {settings.model.default: NamedModel(), **tables}
    offers: dict[str, OfferedModel] = {}
    for role in (Role.DEEP, Role.CHAT) if roles else ():
        name = model_for(role, settings)
        if name is None:
            continue
        if name in tables:
            if name == getattr(settings.model, role) and name != settings.model.default:
                tables[name] = dataclasses.replace(tables[name], role=role)
        else:
            offers.setdefault(
                name, OfferedModel(name, role, converses=True, context=_recorded_context(name, settings))
            )
    entries = [load_entry(name, table, settings, progress) for name, table in tables.items()]

    def load(name: str, progress: Progress) -> ServedModel:
        base = base_model(name) or name  # NAME:edit has the role and the limits of NAME
        offer = offers.get(name) or offers.get(base)
        table = settings.models.get(name) or tables.get(base)
        if table is None or (base != name and is_remote(table)):
            table = NamedModel(role=offer.role if offer is not None else "fast")
        return load_entry(name, table, settings, progress)

    return ModelRegistry(
        entries,
        offers=offers.values(),
        load=load,
        open_ended=open_ended,
        adapted_name=partial(_adapted_name, settings=settings),
        idle_s=settings.sharing.idle_s,
    )


def _adapted_name(entry: ServedModel, settings: Settings) -> str | None:
    """The name under which a model is loaded with its adapter; None where that needs a second copy of the
    weights. A model that maps its file shares them."""
    model = entry.model
    if model is None or model.path is None or model.adapter_facts or not model.engine.info.mapped:
        return None
    return entry.name + EDIT if has_adapter(model.path, settings) else None


def _recorded_context(name: str, settings: Settings) -> int | None:
    """The context of a model that is not loaded, as recorded when it was added."""
    library = ModelLibrary(settings.paths.models)
    try:
        traits = library.get(name).traits
    except KeystrokeError:
        return None
    return settings.engine.context or (traits.context if traits is not None else None)


def load_entry(
    name: str, table: NamedModel, settings: Settings, progress: Progress = no_progress
) -> ServedModel:
    if table.engine == "remote":
        return remote_entry(name, table, settings)
    from keystroke.engine.load import load_model  # imports a whole backend

    model = load_model(name, settings, progress)
    server = settings.server
    return local_entry(
        name,
        model,
        role=table.role,
        named=table,
        max_queue=server.max_queue,
        share_prefixes=server.share_prefixes,
    )


def remote_entry(name: str, table: NamedModel, settings: Settings) -> ServedModel:
    from keystroke.engine.remote import Endpoint, RemoteModel

    assert table.base_url is not None  # checked by the configuration
    assert table.model is not None
    endpoint = Endpoint(table.base_url, table.api_key_env, first_token_timeout=settings.remote.timeout_s)
    remote = RemoteModel(endpoint, table.model)
    scheduler = RemoteScheduler(
        remote, name, concurrent=table.concurrent, max_queue=settings.server.max_queue
    )
    budget, price = budget_of(table), Price.of(table)
    return ServedModel(name, table.role, scheduler, None, budget, price, remote_context=table.context or None)


def budget_of(table: NamedModel) -> RateBudget:
    # Work over `concurrent` is queued by the scheduler; a key over `concurrent_per_key` is refused, so that
    # it cannot fill the queue.
    return RateBudget(table.requests_per_minute, table.tokens_per_minute, table.concurrent_per_key)
