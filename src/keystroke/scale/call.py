"""Messages between a gateway and an engine replica.

Picklable values. A call contains everything a replica needs to generate the answer from its beginning or to
continue it, so any replica can take it. Independent of Ray.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keystroke.assist.next_edit.places import PlacesFormat
from keystroke.assist.next_edit.prompt import EditFormat
from keystroke.engine.base import ModelInfo
from keystroke.engine.generation import GenerationParams, GenerationStats
from keystroke.engine.speculative.base import Drafter
from keystroke.engine.templates import ChatTemplate, FimTemplate
from keystroke.engine.tokenizer import Tokenizer
from keystroke.gateway.work.priority import Priority, Tier
from keystroke.gateway.work.scheduler import Job
from keystroke.gateway.work.ticket import TicketItem

_OPENING = 64  # first tokens that identify a prompt without an affinity


@dataclass(frozen=True, slots=True)
class ReplicaCall:
    """One answer to generate, or to continue after the tokens `generated`. `resumed`: it had begun on another
    replica. `steers` have not been spliced in yet. `trace` is its span, as W3C headers."""

    id: str
    key: str
    affinity: str
    prompt: array[int]
    params: GenerationParams
    priority: Priority
    tier: Tier
    drafter: Drafter | None = None
    warm: bool = False
    buffer: str | None = None
    generated: tuple[int, ...] = ()
    steers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    trace: Mapping[str, str] = field(default_factory=dict)
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Splice:
    """Steering input for a running call, for the replica that runs it."""

    replica: str
    call: str
    steer: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReplicaReply:
    """The items of a call since the last reply. `stats` contains only the new step times. `replica` comes
    with the first reply, `read` (prompt tokens) during the prefill."""

    items: tuple[TicketItem, ...]
    stats: GenerationStats
    read: int = 0
    replica: str = ""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model without its engine: what a gateway needs to make prompts and parse answers."""

    name: str
    info: ModelInfo
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    fim: FimTemplate | None
    languages: frozenset[str] | None
    follows: frozenset[str]
    edits: EditFormat | PlacesFormat | None
    costs: tuple[float, ...]  # of verifying drafts, measured on the replica
    slots: int  # sessions that one replica steps together


def affinity_of(job: Job, key: str) -> str:
    """The routing key of a job. It includes the API key: caches are not shared between keys."""
    return f"{key}/{job.affinity or digest(job.prompt[:_OPENING])}"


def digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=12).hexdigest()
