"""The same GGUF file gives the same greedy tokens here and in llama.cpp.

Runs where LLAMA_CPP names a folder with llama.cpp's shared libraries: see `bench.llama_library`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from bench.llama_library import LlamaLibrary
from family_models import MODELS, TOKENS, engine_on, reference, write_gguf
from gguf.constants import GGMLQuantizationType

BUILD = os.environ.get("LLAMA_CPP", "")
pytestmark = pytest.mark.skipif(not BUILD, reason="LLAMA_CPP names no build of llama.cpp")
PROMPT, ANSWER = 60, 40


@pytest.mark.parametrize("family", [name for name, model in MODELS.items() if model[3]])
def test_greedy_tokens_are_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, family, reference(family), GGMLQuantizationType.F32)
    theirs = LlamaLibrary(Path(BUILD), path, 1)
    theirs.eval(TOKENS[:PROMPT])
    expected: list[int] = []
    while len(expected) < ANSWER:
        expected.append(int(theirs.logits(96).argmax()))
        theirs.eval(expected[-1:])
    with engine_on(path, "stored", tmp_path / "cache") as engine, engine.session() as session:
        session.extend(TOKENS[:PROMPT])
        assert [token for _ in range(ANSWER) for token in session.step().tokens] == expected
