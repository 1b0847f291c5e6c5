"""The CUDA engine: one stream close to the memory limit of one GPU.

Everything that touches CUDA lives in this package, and importing it needs torch and numpy alone. The
rest of the program meets it through the engine contract and `load_cuda`.
"""

from __future__ import annotations
