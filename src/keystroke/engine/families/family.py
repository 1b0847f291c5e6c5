"""A model family: its names, how its sizes are read, and where its tensors are in both file formats.

Engines build from the ModelSpec and the canonical tensor names of `checkpoint.spec`; only the readers of
files know how a family stores a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from keystroke.engine.checkpoint.fields import Fields
from keystroke.engine.checkpoint.spec import Architecture, ModelSpec

ELSEWHERE = "serve it with llama.cpp's server, Ollama or vLLM and add it as a remote model"
Change = Literal["", "plus one", "minus exponential"]


@dataclass(frozen=True, slots=True)
class TensorSource:
    """The stored tensors that a canonical one is made of: stacked by rows, then `rows` of them."""

    names: tuple[str, ...]
    rows: npt.NDArray[np.intp] | None = None
    transposed: bool = False  # matrices of experts are stored by columns
    turned: int = 0  # above 0: every so many rows are a matrix that is transposed
    change: Change = ""  # of the values
    flat: bool = False  # the vectors of experts, one after the other
    single_row: bool = False  # a vector that is a matrix of one row


Source = Callable[[ModelSpec, str, Container[str]], TensorSource]


def same_name(spec: ModelSpec, name: str, stored: Container[str]) -> TensorSource:
    return TensorSource((name,))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The configuration of a Hugging Face folder. `tied`: the default of tie_word_embeddings."""

    config: Fields
    generation: Fields
    name: str
    tied: bool = False


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The metadata of a GGUF file, its architecture as it names it, and the shapes of its tensors."""

    fields: Fields
    stated: str
    name: str
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    name: Architecture
    title: str  # in messages
    huggingface: tuple[str, ...]  # the architectures in config.json
    gguf: str  # general.architecture
    read_config: Callable[[ConfigFile], ModelSpec]
    read_gguf: Callable[[GGUFFile], ModelSpec]
    source: Source = same_name  # where a folder holds a canonical tensor
    gguf_names: Mapping[str, str] = field(default_factory=dict)  # of layers, where they differ from the usual
    gguf_source: Source | None = None  # for tensors that a GGUF file lays out differently
    predicts: bool = False  # the predictor (MTP) is read where a file holds it
    paired: bool = False  # GGUF files hold the rows of queries and keys in pairs
