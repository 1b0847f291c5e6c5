"""Several attempts at once, of which a check keeps the best."""

from keystroke.agent.attempts.attempt import Attempt, End, Outcome, Policy, Verdict
from keystroke.agent.attempts.choice import choose
from keystroke.agent.attempts.decoder import Decoder, Piece, Writer
from keystroke.agent.attempts.engine_decoder import EngineDecoder
from keystroke.agent.attempts.judge import Go, Judge, Sign, Watch
from keystroke.agent.attempts.normal import normalised
from keystroke.agent.attempts.race import Race, samplings

__all__ = [
    "Attempt",
    "Decoder",
    "End",
    "EngineDecoder",
    "Go",
    "Judge",
    "Outcome",
    "Piece",
    "Policy",
    "Race",
    "Sign",
    "Verdict",
    "Watch",
    "Writer",
    "choose",
    "normalised",
    "samplings",
]
