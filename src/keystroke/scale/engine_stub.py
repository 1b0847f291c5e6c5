"""A model whose engine runs on a replica, as a gateway holds it: tokenizer and templates, nothing that
computes."""

from __future__ import annotations

from keystroke.agent.chat.receipt import Price
from keystroke.config import NamedModel
from keystroke.engine.base import Engine, EngineStats, Session
from keystroke.engine.model import Model
from keystroke.engine.speculative.cost import remember_cost
from keystroke.errors import EngineError
from keystroke.gateway.work.queue import WorkQueue
from keystroke.gateway.work.registry import ServedModel, budget_of
from keystroke.scale.call import ModelDescription


class EngineStub(Engine):
    def __init__(self, side: ModelDescription) -> None:
        self.info = side.info
        self.max_batch = side.slots

    def session(self, scope: str = "") -> Session:
        raise EngineError("This model's engine is on another replica; ask through its queue.")

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0)  # each replica reports its own

    def close(self) -> None:
        """Nothing to close: the engine is on the replica."""


def stub_entry(side: ModelDescription, queue: WorkQueue, table: NamedModel) -> ServedModel:
    """The entry of the gateway's registry; `queue` sends its work to the replicas."""
    engine = EngineStub(side)
    remember_cost(engine, side.costs)
    model = Model(
        side.name,
        engine,
        side.tokenizer,
        side.chat,
        side.fim,
        languages=side.languages,
        conservative_languages=side.follows,
    )
    return ServedModel(side.name, table.role, queue, model, budget_of(table), Price.of(table), side.edits)
