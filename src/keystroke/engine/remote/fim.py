"""Fill-in-the-middle formats by model name, for remote servers.

Used only after a server has refused `suffix`. An unknown name has no format.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from keystroke.engine.fim import FimTemplate


@dataclass(frozen=True, slots=True)
class RemoteFim:
    """A format and its stop strings (servers accept no token ids)."""

    template: FimTemplate
    stop: tuple[str, ...]


_PIPES = RemoteFim(
    FimTemplate("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<|endoftext|>", "<|file_sep|>", "<|fim_pad|>"),
)
_ANGLES = RemoteFim(
    FimTemplate("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<|endoftext|>", "<file_sep>")
)
_CODELLAMA = RemoteFim(FimTemplate("<PRE> ", " <SUF>", " <MID>"), ("<EOT>",))
_DEEPSEEK = RemoteFim(
    FimTemplate("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), ("<|EOT|>", "<｜end▁of▁sentence｜>")
)
_CODESTRAL = RemoteFim(FimTemplate("[PREFIX]", "[SUFFIX]", "", order="spm"), ("</s>",))
_SEED = RemoteFim(FimTemplate("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), ("<[end▁of▁sentence]>",))

_BY_NAME: tuple[tuple[str, RemoteFim], ...] = (
    (r"qwen.*coder|codeqwen|codegemma|granite", _PIPES),
    (r"starcoder|stable-?code|refact", _ANGLES),
    (r"code-?llama", _CODELLAMA),
    (r"deepseek-?coder", _DEEPSEEK),
    (r"codestral", _CODESTRAL),
    (r"seed-?coder", _SEED),
)


def fim_for(model: str) -> RemoteFim | None:
    """The format of a model by its name; None if it is unknown."""
    return next((fim for pattern, fim in _BY_NAME if re.search(pattern, model.lower())), None)
