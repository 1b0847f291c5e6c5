"""The inverse of `keystroke_lab.pretraining.fim.join`, for tests that check what a sequence holds."""

from __future__ import annotations

from collections.abc import Sequence

from keystroke_lab.pretraining.fim import Order, TokenParts
from keystroke_lab.tokenizer import special


def take_apart(tokens: Sequence[int]) -> tuple[TokenParts, Order]:
    """The inverse of `join`. Raises ValueError if `tokens` is no such sequence."""
    try:
        first, second = (
            (special.FIM_SUFFIX, special.FIM_PREFIX)
            if tokens[0] == special.FIM_SUFFIX
            else (special.FIM_PREFIX, special.FIM_SUFFIX)
        )
        split, middle = tokens.index(second), tokens.index(special.FIM_MIDDLE)
        if tokens[0] != first or tokens[-1] != special.END or not split < middle:
            raise ValueError
    except (ValueError, IndexError) as error:
        raise ValueError("these tokens are not a fill-in-the-middle sequence") from error
    a, b = tuple(tokens[1:split]), tuple(tokens[split + 1 : middle])
    rest = tuple(tokens[middle + 1 : -1])
    if first == special.FIM_SUFFIX:
        return TokenParts(b, rest, a), Order.SPM
    return TokenParts(a, rest, b), Order.PSM
