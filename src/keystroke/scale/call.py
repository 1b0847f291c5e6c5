"""What crosses between a gateway and an engine replica.

Values only, picklable and complete: a call says everything a replica needs to make the answer from its
beginning or to take it up in the middle, so any replica will do. Nothing here knows Ray.
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
from keystroke.gateway.work.ticket import Item

_OPENING = 64  # tokens that a prompt without an affinity of its own is known by


@dataclass(frozen=True, slots=True)
class Call:
    """One answer to make, or to go on with after `said`. `steers` have not been spliced in yet. `trace` is
    the span it belongs to, as W3C headers."""

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
    said: tuple[int, ...] = ()
    steers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    trace: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Splice:
    """Input for a call under way, for the replica that makes it."""

    replica: str
    call: str
    steer: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a call since the last reply. `stats` is whole but for its step times, of which only the
    new ones are told. `replica` comes with the first reply, `read` while a prompt is being read."""

    items: tuple[Item, ...]
    stats: GenerationStats
    read: int = 0
    replica: str = ""


@dataclass(frozen=True, slots=True)
class TextSide:
    """A model without its engine: what a gateway needs to make prompts and to read answers."""

    name: str
    info: ModelInfo
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    fim: FimTemplate | None
    languages: frozenset[str] | None
    follows: frozenset[str]
    edits: EditFormat | PlacesFormat | None
    costs: tuple[float, ...]  # of verifying drafts, as measured on the replica
    slots: int  # sessions that one replica steps together


def affinity_of(job: Job, key: str) -> str:
    """What a job is routed by. Always of one key: what one has in the cache another may not find."""
    if job.affinity:
        return f"{key}/{job.affinity}"
    return f"{key}/{digest(job.prompt[:_OPENING])}"


def digest(tokens: Sequence[int]) -> str:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=12).hexdigest()
