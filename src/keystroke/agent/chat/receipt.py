"""The cost of a step of a task, and the sums by model. Prices are per million tokens."""

from __future__ import annotations

import msgspec

from keystroke.config import NamedModel


class Price(msgspec.Struct, frozen=True):
    input: float = 0.0
    cached: float = 0.0
    output: float = 0.0

    @classmethod
    def of(cls, table: NamedModel) -> Price:
        return cls(table.cost_per_million_input, table.cost_per_million_cached, table.cost_per_million_output)

    def cost(self, prompt: int, reused: int, output: int) -> float:
        return ((prompt - reused) * self.input + reused * self.cached + output * self.output) / 1e6


class StepReceipt(msgspec.Struct, frozen=True):
    """The cost of one step. Receipts of one model can be added."""

    what: str
    model: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    attempts: int = 0

    def __add__(self, other: StepReceipt) -> StepReceipt:
        return StepReceipt(
            self.what,
            self.model,
            self.prompt_tokens + other.prompt_tokens,
            self.reused_tokens + other.reused_tokens,
            self.tokens + other.tokens,
            round(self.seconds + other.seconds, 6),
            round(self.cost + other.cost, 9),
            self.attempts + other.attempts,
        )

    def describe(self) -> str:
        """One line for the user."""
        parts = [f"{self.tokens:,} tokens" if self.model else "", f"{self.seconds:.1f} s"]
        if self.reused_tokens:
            parts.append(f"{self.reused_tokens:,} of {self.prompt_tokens:,} prompt tokens reused")
        if self.cost:
            parts.append(f"{self.cost:.4f} in cost")
        return ", ".join(part for part in parts if part)


class TaskReceipts:
    """The receipts of a task, step by step."""

    def __init__(self, receipts: tuple[StepReceipt, ...] = ()) -> None:
        self.receipts = list(receipts)

    def add(self, receipt: StepReceipt) -> None:
        self.receipts.append(receipt)

    def by_model(self) -> dict[str, StepReceipt]:
        """The sum for each model; steps without a model (commands) are under the empty name."""
        sums: dict[str, StepReceipt] = {}
        for receipt in self.receipts:
            known = sums.get(receipt.model, StepReceipt("task", receipt.model))
            sums[receipt.model] = known + receipt
        return sums

    def total(self) -> StepReceipt:
        return sum(self.receipts, StepReceipt("task"))
