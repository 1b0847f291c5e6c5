"""The special tokens: their spelling and their ids, which never change.

They are the first `RESERVED` ids of every vocabulary, in this order, so data, models and prompts agree
without a tokenizer.
"""

from __future__ import annotations

from keystroke.assist.next_edit.prompt import REGION

NAMED = (
    "<|endoftext|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>",
    "<|edit|>", "<|edit_before|>", "<|edit_after|>", "<|cursor|>", "<|im_start|>", "<|im_end|>", "<|pad|>",
)  # fmt: skip
(
    END,
    FIM_PREFIX,
    FIM_SUFFIX,
    FIM_MIDDLE,
    FILE_SEP,
    REPO_NAME,
    EDIT,
    EDIT_BEFORE,
    EDIT_AFTER,
    CURSOR,
    IM_START,
    IM_END,
    PAD,
) = range(len(NAMED))
RESERVED = 32  # room for later ones without new embedding rows
SPELLING = NAMED + tuple(f"<|reserved_{i}|>" for i in range(RESERVED - len(NAMED)))
KEEP = len(NAMED)  # the first of them: "nothing to change here" as a next edit's answer
NUMBERS = tuple(range(KEEP + 1, KEEP + 2 + REGION))  # of the lines of a next edit's place, and of its end
