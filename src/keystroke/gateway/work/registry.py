"""The models a server has, by name and by role.

Law: a name leads to one engine with its queue, its budget and its price; nothing is shared between names.
Any number of models, embedded, CUDA or remote. Loading happens before the server listens; starting and
stopping belong to the event loop.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from keystroke.assist.next_edit.prompt import EditFormat, detect
from keystroke.config import NamedModel, Settings
from keystroke.engine.base import EngineStats
from keystroke.engine.library import Progress, silent
from keystroke.engine.model import Model
from keystroke.engine.tokenizer import Tokenizer
from keystroke.errors import ConfigError
from keystroke.gateway.access.limits import Budget
from keystroke.gateway.work.receipts import Price
from keystroke.gateway.work.remote import RemoteScheduler
from keystroke.gateway.work.routing import Candidate, Router
from keystroke.gateway.work.scheduler import Scheduler
from keystroke.protocol.faults import ModelNotFound

AUTO = "auto"
ROLES = ("fast", "deep")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One named model. `model` is None for a remote one, whose engine is elsewhere. `edits`: how it is asked
    for next edits, where it has learned them."""

    name: str
    role: str
    scheduler: Scheduler | RemoteScheduler
    model: Model | None
    budget: Budget
    price: Price
    edits: EditFormat | None = None

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


class Registry:
    def __init__(self, entries: Iterable[ServedModel]) -> None:
        self.entries: dict[str, ServedModel] = {}
        for entry in entries:
            if entry.name in (AUTO, *ROLES) and entry.role != entry.name:
                raise ConfigError(f"a model may not be called {entry.name}: that name chooses a role")
            self.entries[entry.name] = entry
        if not self.entries:
            raise ConfigError("no model is configured; name one with --model or in [models.NAME]")
        self.router = Router([e.candidate for e in self.entries.values()])

    def start(self) -> None:
        for entry in self.entries.values():
            entry.scheduler.start()

    async def stop(self) -> None:
        """End every answer and free every engine."""
        await asyncio.gather(*(entry.scheduler.stop() for entry in self.entries.values()))
        for entry in self.entries.values():
            if entry.model is not None:
                await asyncio.to_thread(entry.model.engine.close)
                if entry.model.draft is not None:
                    await asyncio.to_thread(entry.model.draft.close)

    def find(self, name: str) -> ServedModel:
        """The model called `name`, or the first of that role. Raises ModelNotFound."""
        if name in self.entries:
            return self.entries[name]
        if name in ROLES and (first := self._first(name)) is not None:
            return self.entries[first]
        known = [AUTO, *(r for r in ROLES if self._first(r)), *self.entries]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(dict.fromkeys(known))}."
        raise ModelNotFound(f"There is no model called {name:.80}; {hint}", param="model")

    def _first(self, role: str) -> str | None:
        return next((e.name for e in self.entries.values() if e.role == role), None)


def local_entry(
    name: str, model: Model, *, role: str = "fast", named: NamedModel | None = None, max_queue: int = 64
) -> ServedModel:
    named = named or NamedModel()
    return ServedModel(
        name=name,
        role=role,
        scheduler=Scheduler(model, concurrent=named.concurrent, max_queue=max_queue),
        model=model,
        budget=_budget(named),
        price=_price(named),
        edits=detect(model.tokenizer, model.path) if model.path is not None else None,
    )


def from_settings(settings: Settings, progress: Progress = silent) -> Registry:
    """Load every configured model; without any, the default one. Blocking, and may take seconds."""
    tables = dict(settings.models)
    if settings.model.default not in tables and not any(t.role == "fast" for t in tables.values()):
        tables = {settings.model.default: NamedModel(), **tables}
    return Registry([_entry(name, table, settings, progress) for name, table in tables.items()])


def _entry(name: str, table: NamedModel, settings: Settings, progress: Progress) -> ServedModel:
    if table.engine == "remote":
        return _remote_entry(name, table, settings)
    from keystroke.engine.load import load_model  # brings in a whole backend; only servers with one need it

    model = load_model(name, settings, progress)
    return local_entry(name, model, role=table.role, named=table, max_queue=settings.server.max_queue)


def _remote_entry(name: str, table: NamedModel, settings: Settings) -> ServedModel:
    from keystroke.engine.remote import Endpoint, RemoteModel

    assert table.base_url is not None  # the configuration checked
    assert table.model is not None
    endpoint = Endpoint(table.base_url, table.api_key_env, first_token_timeout=settings.remote.timeout_s)
    remote = RemoteModel(endpoint, table.model)
    scheduler = RemoteScheduler(
        remote, name, concurrent=table.concurrent, max_queue=settings.server.max_queue
    )
    return ServedModel(name, table.role, scheduler, None, _budget(table), _price(table))


def _budget(table: NamedModel) -> Budget:
    # `concurrent` is the engine's, shared by all keys: the scheduler queues what is over it. A key over its
    # own share is refused instead, so that it cannot fill the queue.
    return Budget(table.requests_per_minute, table.tokens_per_minute, table.concurrent_per_key)


def _price(table: NamedModel) -> Price:
    return Price(table.cost_per_million_input, table.cost_per_million_cached, table.cost_per_million_output)
