"""Several attempts at once, of which a check keeps the best."""

from keystroke.agent.attempts.attempt import Attempt, End, Outcome, Policy, Verdict
from keystroke.agent.attempts.choice import choose
from keystroke.agent.attempts.judge import Go, Judge, Sign, Watch
from keystroke.agent.attempts.normal import normalised
from keystroke.agent.attempts.race import Race, samplings

__all__ = [
    "Attempt",
    "End",
    "Go",
    "Judge",
    "Outcome",
    "Policy",
    "Race",
    "Sign",
    "Verdict",
    "Watch",
    "choose",
    "normalised",
    "samplings",
]
