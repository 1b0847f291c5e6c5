"""A model whose engine is elsewhere, as a gateway holds it.

Everything about text is here, nothing that computes. Asking it for a session is a fault of ours.
"""

from __future__ import annotations

from keystroke.config import NamedModel
from keystroke.engine.base import Engine, EngineStats, Session
from keystroke.engine.model import Model
from keystroke.engine.speculative.cost import remember_cost
from keystroke.errors import EngineError
from keystroke.gateway.work.queue import Queue
from keystroke.gateway.work.registry import ServedModel, budget_of, price_of
from keystroke.scale.call import TextSide


class DistantEngine(Engine):
    def __init__(self, side: TextSide) -> None:
        self.info = side.info
        self.max_batch = side.slots

    def session(self, scope: str = "") -> Session:
        raise EngineError("This model's engine is on another replica; ask through its queue.")

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0, 0)  # each replica has its own

    def close(self) -> None:
        """Nothing of it is here."""


def distant_entry(side: TextSide, queue: Queue, table: NamedModel) -> ServedModel:
    """The model as the gateway's registry holds it, with `queue` in place of an engine's own."""
    engine = DistantEngine(side)
    remember_cost(engine, side.costs)
    model = Model(
        side.name,
        engine,
        side.tokenizer,
        side.chat,
        side.fim,
        languages=side.languages,
        follows=side.follows,
    )
    return ServedModel(side.name, table.role, queue, model, budget_of(table), price_of(table), side.edits)
