"""Drafts of the layer that predicts the token after the next one (MTP), on a session's own keys and values.

The predictor reads a token and the stream of the one before. What it writes beyond the session's tokens is
overwritten when these are known: a draft never changes a text.
"""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from keystroke.engine.base import Guess
from keystroke.engine.checkpoint import ModelSpec
from keystroke.engine.onnx.recurrent import Float32
from keystroke.engine.speculative.layer_draft import LayerDrafter

MOST_TOKENS = 3  # later ones are rarely right: there is one layer, trained to predict one token


class MtpDrafter(LayerDrafter):
    def __init__(
        self, runtime: ort.InferenceSession, spec: ModelSpec, tables: dict[str, ort.OrtValue]
    ) -> None:
        """`runtime` is the graph of `PredictorBuilder`, `tables` its matrices and those of the model."""
        self._runtime, self._layer = runtime, spec.layers
        asked = {each.name for each in runtime.get_inputs()}
        self._tables = {name: table for name, table in tables.items() if name in asked}
        self._ids, self._last = np.zeros((1, 1), np.int64), np.zeros(1, np.int32)
        self._previous, self._stream = (np.zeros((1, 1, spec.hidden), np.float32) for _ in range(2))
        self._logits = np.zeros((1, spec.vocab_size), np.float32)
        self._inputs = {
            name: ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in (("input_ids", self._ids), ("last", self._last), ("previous", self._previous))
        }
        self._outputs = {
            name: ort.OrtValue.ortvalue_from_numpy(array)
            for name, array in (("logits", self._logits), ("hidden", self._stream))
        }

    def draft(
        self, kv: tuple[ort.OrtValue, ort.OrtValue], token: int, position: int, stream: Float32, most: int
    ) -> Guess:
        """Up to `most` tokens that follow `token` at `position`, while they are likely. `stream` is that of
        the token before; `kv` the predictor's keys and values, with room for more."""
        binding = self._runtime.io_binding()
        for name, value in (self._tables | self._inputs).items():
            binding.bind_ortvalue_input(name, value)
        for kind, value in zip(("key", "value"), kv, strict=True):
            binding.bind_ortvalue_input(f"{kind}.{self._layer}", value)
        for name, value in self._outputs.items():
            binding.bind_ortvalue_output(name, value)
        self._previous[0, 0] = stream

        def follow(token: int, place: int) -> tuple[int, float]:
            self._ids[0, 0], self._last[0] = token, place
            self._runtime.run_with_iobinding(binding)
            self._previous[:] = self._stream
            best = int(self._logits[0].argmax())
            return best, float(1 / np.exp(self._logits[0] - self._logits[0, best]).sum())

        return self.guess_likely(follow, token, position, most)
