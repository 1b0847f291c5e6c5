"""Makes untrusted text safe for a terminal: file names, source text, answers of models, output of commands.

Control characters could move the cursor, hide lines or set the title; bidirectional controls make code read
in another order than it runs. Both appear as the replacement character, so that the reader sees them.
"""

from __future__ import annotations

_SHOWN = "\N{REPLACEMENT CHARACTER}"
_BIDIRECTIONAL = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_UNSAFE: dict[int, str | None] = {
    **dict.fromkeys((*range(32), *range(127, 160), *_BIDIRECTIONAL, 8232, 8233), _SHOWN),
    **{ord(character): character for character in "\n\t"},
    **dict.fromkeys(range(55296, 57344), _SHOWN),  # of file names that are not UTF-8
    ord("\r"): None,
}


def safe_for_terminal(text: str) -> str:
    """`text` with its control and bidirectional characters replaced; carriage returns are left out."""
    return text.translate(_UNSAFE)
