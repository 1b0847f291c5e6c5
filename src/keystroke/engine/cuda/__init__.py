"""The CUDA engine: decodes one stream close to the memory bandwidth of one GPU. All CUDA code is here."""

from __future__ import annotations
