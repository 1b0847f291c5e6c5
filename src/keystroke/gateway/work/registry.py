"""The models a server has, by name and by role.

A name leads to one engine with its queue, its budget and its price; nothing is shared between names.
Any number of models, embedded, CUDA or remote. What is configured is loaded before the server listens, what
is only offered when it is first asked for, and a model with its adapter beside the model alone where that
costs no second copy of the weights; starting and stopping belong to the event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from keystroke.assist.next_edit.places import PlacesFormat, learned_places
from keystroke.assist.next_edit.prompt import EditFormat, detect
from keystroke.config import NamedModel, Settings
from keystroke.engine.base import EngineStats
from keystroke.engine.library import Library, Progress, silent
from keystroke.engine.locate import EDIT, base_of, has_adapter
from keystroke.engine.model import Model
from keystroke.engine.roles import Role, is_remote, model_for
from keystroke.engine.tokenizer import Tokenizer
from keystroke.errors import ConfigError, KeystrokeError
from keystroke.gateway.access.limits import Budget
from keystroke.gateway.work.loading import Load, Offer
from keystroke.gateway.work.queue import Queue
from keystroke.gateway.work.receipts import Price
from keystroke.gateway.work.remote import RemoteScheduler
from keystroke.gateway.work.routing import Candidate, Router
from keystroke.gateway.work.scheduler import Scheduler
from keystroke.protocol.faults import ModelNotFound

log = logging.getLogger("keystroke.registry")

AUTO = "auto"
ROLES = ("fast", "deep", "chat")
_JUST_ASKED = 5.0  # seconds between asking for a model and queueing what it was asked for, at most


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One named model. `model` is None for a remote one, whose engine is elsewhere. `edits`: how it is asked
    for next edits, where it has learned them."""

    name: str
    role: str
    scheduler: Queue
    model: Model | None
    budget: Budget
    price: Price
    edits: EditFormat | PlacesFormat | None = None

    @property
    def candidate(self) -> Candidate:
        """As routing sees it."""
        here = self.model is not None
        return Candidate(self.name, self.role, self.model is None or self.model.chat is not None, here)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.tokenizer if self.model is not None else None

    @property
    def context_length(self) -> int | None:
        return self.model.engine.info.context_length if self.model is not None else None

    @property
    def parameters(self) -> int:
        """How many the model has; 0 where that is not known."""
        return self.model.engine.info.parameters if self.model is not None else 0

    def stats(self) -> EngineStats | None:
        return self.model.engine.stats() if self.model is not None else None


Loader = Callable[[str, Progress], ServedModel]
Adapted = Callable[[ServedModel], str | None]
"""What a loaded model is called with the adapter that this installation brings for it; None: there is none,
or loading it costs too much."""


class Registry:
    """`entries` are loaded. `offers` could be, and are when first asked for by `load`, which takes a name;
    those are let go again when they were idle for `idle_s`, or sooner where another needs their memory.
    `open_ended`: any name may be asked for that `load` makes something of. `adapted`: see `adapt`."""

    def __init__(
        self,
        entries: Iterable[ServedModel],
        *,
        offers: Iterable[Offer] = (),
        load: Loader | None = None,
        open_ended: bool = False,
        adapted: Adapted = lambda entry: None,
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
        self.loads: dict[str, Load[ServedModel]] = {}
        self._pinned = tuple(self.entries)
        self._load = load
        self._open_ended = open_ended and load is not None
        self._idle_s = idle_s
        self._adapted = adapted
        # By the name of each model that `adapt` looked at: what was begun to be loaded beside it.
        self._beside: dict[str, str | None] = {}
        self._used: dict[str, float] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._route()

    @staticmethod
    def _check_name(name: str, role: str) -> None:
        if name in (AUTO, *ROLES) and role != name:
            raise ConfigError(f"a model may not be called {name}: that name chooses a role")

    def _route(self) -> None:
        # What is loaded on demand may be let go again, so no buffer that is typed in rests on it.
        here = [self.entries[name].candidate for name in self._pinned]
        later = [Candidate(o.name, o.role, o.converses, here=False) for o in self.offers.values()]
        self.router = Router([*here, *later])

    def start(self) -> None:
        for entry in self.entries.values():
            entry.scheduler.start()
        if self._load is not None:
            self._sweeper = asyncio.create_task(self._let_go_of_idle())

    async def stop(self) -> None:
        """End every answer and free every engine."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for load in self.loads.values():
            load.result.cancel()
        await asyncio.gather(*(_closed(entry) for entry in self.entries.values()))

    def find(self, name: str) -> str:
        """The name of the model called `name`, or of the first of that role. Raises ModelNotFound."""
        if name in self.entries or name in self.offers:
            return name
        if name in ROLES and (first := self._first(name)) is not None:
            return first
        if self._open_ended and name not in ROLES:
            return name
        known = [AUTO, *(r for r in ROLES if self._first(r)), *self.entries, *self.offers]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(dict.fromkeys(known))}."
        raise ModelNotFound(f"There is no model called {name:.80}; {hint}", param="model")

    def role(self, name: str) -> str:
        """The role of a model that `find` named."""
        known = self.entries.get(name) or self.offers.get(name)
        return known.role if known is not None else "fast"

    async def ready(self, name: str) -> ServedModel:
        """The model that `find` named, loaded first if it is not. Raises what loading raises."""
        entry = self.entries.get(name)
        if entry is None:
            entry = await asyncio.shield(self.begin(name).result)
        self._used[name] = time.monotonic()
        # Asked for by name, it no longer comes and goes with another.
        self._beside = {base: None if beside == name else beside for base, beside in self._beside.items()}
        return entry

    def adapt(self, entry: ServedModel) -> None:
        """Begin to load what `entry` is with its adapter, if it has one; once loaded it is among the entries,
        until `entry` is let go. It is tried once, and not before it is known how fast `entry` reads: the rate
        is taken over, so that nobody has to wait to find out."""
        rate = entry.scheduler.prefill_rate
        if self._load is None or rate is None or entry.name in self._beside:
            return
        name = self._beside[entry.name] = self._adapted(entry)
        if name is not None and name not in self.entries:
            self.begin(name).result.add_done_callback(lambda ended: self._take_rate(entry.name, ended, rate))

    def _take_rate(self, base: str, ended: asyncio.Future[ServedModel], rate: float) -> None:
        if ended.cancelled():
            return
        if (error := ended.exception()) is not None:
            log.info("%s goes on without its adapter: %s", base, error)
        elif ended.result().scheduler.prefill_rate is None:
            ended.result().scheduler.prefill_rate = rate

    def begin(self, name: str) -> Load[ServedModel]:
        """The load of a model under way, begun if it is not."""
        load = self.loads.get(name)
        if load is None:
            make = self._load
            assert make is not None  # only offers are not loaded, and they come with one
            load = self.loads[name] = Load(name, lambda progress: make(name, progress))
            load.result.add_done_callback(lambda ended: self._loaded(name, ended))
        return load

    def _loaded(self, name: str, ended: asyncio.Future[ServedModel]) -> None:
        self.loads.pop(name, None)
        if not ended.cancelled() and ended.exception() is None:
            entry = ended.result()
            entry.scheduler.start()
            self.entries[name] = entry
            self._used[name] = time.monotonic()

    async def make_room(self) -> bool:
        """Let go of the model that was idle longest. False where none may go."""
        idle = self._idle_for(_JUST_ASKED)  # what was loaded beside another too: it is not loaded again
        if not idle:
            return False
        await self._let_go(min(idle, key=lambda e: self._used.get(e.name, 0.0)))
        return True

    def _idle_for(self, seconds: float) -> list[ServedModel]:
        """The models loaded on demand that nobody asked for so long."""
        since = time.monotonic() - seconds
        loaded = [e for e in self.entries.values() if e.name not in self._pinned]
        return [e for e in loaded if self._used.get(e.name, 0.0) <= since and not _busy(e)]

    async def _let_go_of_idle(self) -> None:
        while True:
            await asyncio.sleep(min(10.0, max(self._idle_s / 4, 0.05)))
            for entry in self._idle_for(self._idle_s):
                if entry.name not in self._beside.values():  # that goes with the other
                    await self._let_go(entry)

    async def _let_go(self, entry: ServedModel) -> None:
        self.entries.pop(entry.name, None)
        beside = self.entries.pop(self._beside.pop(entry.name, None) or "", None)
        await _closed(entry)
        if beside is not None:
            await _closed(beside)

    def _first(self, role: str) -> str | None:
        found = next((c.name for c in self.router.candidates if c.role == role), None)
        if found is None and role == "chat":
            found = next((c.name for c in self.router.candidates if c.converses), None)
        return found


def _busy(entry: ServedModel) -> bool:
    return bool(entry.scheduler.running or entry.scheduler.waiting)


async def _closed(entry: ServedModel) -> None:
    await entry.scheduler.stop()
    if entry.model is not None:
        await asyncio.to_thread(entry.model.engine.close)
        if entry.model.draft is not None:
            await asyncio.to_thread(entry.model.draft.close)


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
        price=price_of(named),
        edits=_edits(model),
    )


def _edits(model: Model) -> EditFormat | PlacesFormat | None:
    """How the model is asked for next edits: as its adapter has learned it, else as the model itself has."""
    learned = learned_places(model.tokenizer, model.learned)
    if learned is not None or model.path is None:
        return learned
    return detect(model.tokenizer, model.path)


def from_settings(
    settings: Settings, progress: Progress = silent, *, roles: bool = True, open_ended: bool = False
) -> Registry:
    """Load every configured model; without any, the default one. Blocking, and may take seconds. `roles`:
    offer what is installed for the roles that nobody has been given. `open_ended`: load others when asked
    for."""
    tables = dict(settings.models)
    if settings.model.default not in tables and not any(t.role == "fast" for t in tables.values()):
        tables = {settings.model.default: NamedModel(), **tables}
    offers: dict[str, Offer] = {}
    for role in (Role.DEEP, Role.CHAT) if roles else ():
        name = model_for(role, settings)
        if name is None:
            continue
        if name in tables:
            if name == getattr(settings.model, role) and name != settings.model.default:
                tables[name] = dataclasses.replace(tables[name], role=role)
        else:
            offers.setdefault(
                name, Offer(name, role, converses=True, context=_stated_context(name, settings))
            )
    entries = [_entry(name, table, settings, progress) for name, table in tables.items()]

    def load(name: str, progress: Progress) -> ServedModel:
        base = base_of(name) or name  # NAME:edit has the role and the limits of NAME
        offer = offers.get(name) or offers.get(base)
        table = settings.models.get(name) or tables.get(base)
        if table is None or (base != name and is_remote(table)):
            table = NamedModel(role=offer.role if offer is not None else "fast")
        return _entry(name, table, settings, progress)

    return Registry(
        entries,
        offers=offers.values(),
        load=load,
        open_ended=open_ended,
        adapted=partial(_adapted_name, settings=settings),
        idle_s=settings.sharing.idle_s,
    )


def _adapted_name(entry: ServedModel, settings: Settings) -> str | None:
    """Where both read the same mapped file, a model with its adapter costs a graph, the adapter and KV."""
    model = entry.model
    if model is None or model.path is None or model.learned or not model.engine.info.mapped:
        return None
    return entry.name + EDIT if has_adapter(model.path, settings) else None


def _stated_context(name: str, settings: Settings) -> int | None:
    """The context of a model that is not loaded, as it was recorded when it was added."""
    library = Library(settings.paths.models)
    try:
        traits = library.get(name).traits
    except KeystrokeError:
        return None
    return settings.engine.context or (traits.context if traits is not None else None)


def _entry(name: str, table: NamedModel, settings: Settings, progress: Progress) -> ServedModel:
    if table.engine == "remote":
        return remote_entry(name, table, settings)
    from keystroke.engine.load import load_model  # brings in a whole backend; only servers with one need it

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

    assert table.base_url is not None  # the configuration checked
    assert table.model is not None
    endpoint = Endpoint(table.base_url, table.api_key_env, first_token_timeout=settings.remote.timeout_s)
    remote = RemoteModel(endpoint, table.model)
    scheduler = RemoteScheduler(
        remote, name, concurrent=table.concurrent, max_queue=settings.server.max_queue
    )
    return ServedModel(name, table.role, scheduler, None, budget_of(table), price_of(table))


def budget_of(table: NamedModel) -> Budget:
    # `concurrent` is the engine's, shared by all keys: the scheduler queues what is over it. A key over its
    # own share is refused instead, so that it cannot fill the queue.
    return Budget(table.requests_per_minute, table.tokens_per_minute, table.concurrent_per_key)


def price_of(table: NamedModel) -> Price:
    return Price(table.cost_per_million_input, table.cost_per_million_cached, table.cost_per_million_output)
