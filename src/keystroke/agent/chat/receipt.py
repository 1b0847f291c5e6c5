"""What a step of a task cost, and all of them together, by model.

Values and sums. Prices are per million tokens, as the settings have them.
"""

from __future__ import annotations

import msgspec


class Price(msgspec.Struct, frozen=True):
    """Per million tokens."""

    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0

    def of(self, prompt: int, reused: int, output: int) -> float:
        return ((prompt - reused) * self.input + reused * self.cached + output * self.output) / 1e6


class Receipt(msgspec.Struct, frozen=True):
    """One step: what it was, which model, and what it took. Receipts of one model can be added."""

    what: str
    model: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    attempts: int = 0

    def __add__(self, other: Receipt) -> Receipt:
        return Receipt(
            self.what,
            self.model,
            self.prompt_tokens + other.prompt_tokens,
            self.reused_tokens + other.reused_tokens,
            self.tokens + other.tokens,
            round(self.seconds + other.seconds, 6),
            round(self.cost + other.cost, 9),
            self.attempts + other.attempts,
        )

    def line(self) -> str:
        """For a person."""
        parts = [f"{self.tokens:,} tokens" if self.model else "", f"{self.seconds:.1f} s"]
        if self.reused_tokens:
            parts.append(f"{self.reused_tokens:,} of {self.prompt_tokens:,} prompt tokens reused")
        if self.cost:
            parts.append(f"{self.cost:.4f} in cost")
        return ", ".join(part for part in parts if part)


class Account:
    """The receipts of a task, step by step."""

    def __init__(self, receipts: tuple[Receipt, ...] = ()) -> None:
        self.receipts = list(receipts)

    def add(self, receipt: Receipt) -> None:
        self.receipts.append(receipt)

    def by_model(self) -> dict[str, Receipt]:
        """The sum for each model; steps without one (commands) are under the empty name."""
        sums: dict[str, Receipt] = {}
        for receipt in self.receipts:
            known = sums.get(receipt.model, Receipt("task", receipt.model))
            sums[receipt.model] = known + receipt
        return sums

    def total(self) -> Receipt:
        result = Receipt("task")
        for receipt in self.receipts:
            result = result + receipt
        return result
