"""A model's layer that predicts the token after the next one (MTP), of transformers' own layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file


class ReferencePredictor(torch.nn.Module):
    """A model's predictor of transformers' own layers. Row i has token i and the stream of token i - 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        body, config = model.model, copy.deepcopy(model.config)
        config.layer_types = ["full_attention"] * len(config.layer_types)
        norm = type(body.norm)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = torch.nn.ModuleList([type(body.layers[0])(config, 0)])
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2)

    @torch.no_grad()
    def streams(self, model: Any, tokens: list[int], before: torch.Tensor) -> torch.Tensor:
        body = model.model
        embedded = self.pre_fc_norm_embedding(body.embed_tokens(torch.tensor([tokens])))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(before)], dim=-1))
        angles = body.rotary_emb(x, torch.arange(len(tokens))[None])
        mask = torch.full((len(tokens), len(tokens)), float("-inf")).triu(1)[None, None]
        out = self.layers[0](x, position_embeddings=angles, attention_mask=mask)
        found: torch.Tensor = self.norm(out[0] if isinstance(out, tuple) else out)
        return found

    @torch.no_grad()
    def before(self, model: Any, tokens: list[int]) -> torch.Tensor:
        stream = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state
        return torch.cat([torch.zeros_like(stream[:, :1]), stream[:, :-1]], dim=1)

    @torch.no_grad()
    def logits(self, model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
        found = model.lm_head(self.streams(model, tokens, self.before(model, tokens)))[0]
        return np.asarray(found)

    @torch.no_grad()
    def draft(self, model: Any, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens after `tokens`, each with the predictor's own stream of the one before."""
        tokens, before = list(tokens), self.before(model, tokens)
        for _ in range(count):
            stream = self.streams(model, tokens, before)[:, -1:]
            tokens.append(int(model.lm_head(stream).argmax()))
            before = torch.cat([before, stream], dim=1)
        return tokens[-count:]


def save_with_predictor(model: Any, predictor: ReferencePredictor, folder: Path) -> None:
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    further = {f"mtp.{name}": value.contiguous() for name, value in predictor.state_dict().items()}
    save_file({**stored, **further}, folder / "model.safetensors")
