"""Several sampled attempts at one answer, of which a check selects the best."""

from keystroke.agent.attempts.attempt import Attempt, AttemptEnd, CheckResult, RaceResult, StopPolicy
from keystroke.agent.attempts.checker import AttemptChecker, WatchResult, WatchState
from keystroke.agent.attempts.decoder import AttemptChunk, AttemptStream, Decoder
from keystroke.agent.attempts.engine_decoder import EngineDecoder
from keystroke.agent.attempts.race import Race, attempt_samplings
from keystroke.agent.attempts.selection import select_attempt
from keystroke.analysis.normalise import normalise

__all__ = [
    "Attempt",
    "AttemptChecker",
    "AttemptChunk",
    "AttemptEnd",
    "AttemptStream",
    "CheckResult",
    "Decoder",
    "EngineDecoder",
    "Race",
    "RaceResult",
    "StopPolicy",
    "WatchResult",
    "WatchState",
    "attempt_samplings",
    "normalise",
    "select_attempt",
]
