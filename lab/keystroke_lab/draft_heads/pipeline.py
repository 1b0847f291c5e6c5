"""Makes a draft head for a target model: prompts, answers, training, evaluation, export.

A run is a folder. Every step leaves a file that the next one reads, and a file that exists is not made again,
so a stopped run resumes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keystroke.engine.checkpoint import Checkpoint, open_checkpoint
from keystroke.engine.templates import detect_chat, detect_fim
from keystroke.engine.tokenizer import Tokenizer, load_tokenizer
from keystroke.errors import InputError, NotFound
from keystroke_lab.draft_heads.batches import HeadBatches, vocabulary_of
from keystroke_lab.draft_heads.evaluation import chain_of, tree_of, trials, yield_of
from keystroke_lab.draft_heads.export import export_head
from keystroke_lab.draft_heads.generation import BatchGenerator, GenerationPrompt
from keystroke_lab.draft_heads.prompts import PromptFormats, make_prompts
from keystroke_lab.draft_heads.shape import HeadShape
from keystroke_lab.draft_heads.sources import source_texts
from keystroke_lab.draft_heads.target import TargetModel
from keystroke_lab.draft_heads.texts import TokenText, read_folder, read_texts, write_texts
from keystroke_lab.draft_heads.training import DraftHeadRecipe, DraftHeadRun, head_of, new_head, read_head
from keystroke_lab.pretraining.documents import SourceText

Progress = Callable[[str, int, int], None]  # what, how much of it is done, how much there is

HEAT = 0.8  # of the evaluation's drawn answers
DEPTH = 7
_SHORTEST_PROMPT = 32


@dataclass(frozen=True, slots=True)
class DraftHeadPlan:
    """How large a run is; the default suits a model of 1 to 3 billion parameters and one large GPU."""

    asks: int = 32_000
    heldout: int = 100  # asks that are answered but never trained on
    code: int = 2_000  # excerpts of real code
    longest_prompt: int = 512
    longest_answer: int = 384
    slots: int = 1024  # answers written at a time
    batch: int = 16_384  # tokens a training step
    keep_gigabytes: float = 0.0  # of the device, for batches; 0: half of what is free
    vocabulary: int = 16_384
    intermediate: int = 0  # 0: ten thirds of the hidden size
    layers: tuple[int, ...] = ()
    recipe: DraftHeadRecipe = field(default_factory=DraftHeadRecipe)
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.asks - self.heldout, self.heldout, self.slots, self.batch) < 1 or self.code < 0:
            raise InputError(
                "a run needs asks beyond the held-out ones, a slot to write in and a batch to learn from"
            )


class DraftHeadPipeline:
    def __init__(
        self, model: Path, code: Sequence[Path], run: Path, plan: DraftHeadPlan, device: str, report: Progress
    ) -> None:
        self._model, self._code, self._run, self._plan, self._report = model, code, run, plan, report
        self._device = torch.device(device)
        self._target: TargetModel | None = None
        self._prompt = plan.longest_prompt
        run.mkdir(parents=True, exist_ok=True)

    def make(self) -> dict[str, Any]:
        """All steps. What was measured: share of tokens the vocabulary covers, tokens a step by depth."""
        with open_checkpoint(self._model) as checkpoint:
            self._prompt = min(self._prompt, checkpoint.spec.context_length - self._plan.longest_answer)
            if self._prompt < _SHORTEST_PROMPT:
                raise InputError(
                    f"{checkpoint.spec.name} holds {checkpoint.spec.context_length} tokens, which leaves no "
                    f"room for prompts beside answers of {self._plan.longest_answer}; allow shorter answers"
                )
            self._asks()
            self._answers(checkpoint)
            self._train(checkpoint)
            measured = self._evaluate(checkpoint)
            size = export_head(self._run / "final.pt", checkpoint.spec, self._run / "head")
        return {"head": str(self._run / "head"), "bytes": size, **measured}

    def _loaded(self, checkpoint: Checkpoint) -> TargetModel:
        if self._target is None:
            self._report("target", 0, 1)
            dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
            length = self._prompt + self._plan.longest_answer + 64
            self._target = TargetModel.load(checkpoint, self._device, dtype, length)
            self._report("target", 1, 1)
        return self._target

    def _asks(self) -> None:
        path, plan = self._run / "asks.npz", self._plan
        if path.exists():
            return
        sources = source_texts(self._code)
        if not sources:
            raise NotFound(
                "there is no code in the folders given; name folders of source files or of corpus pieces"
            )
        tokenizer = load_tokenizer(self._model)
        formats = PromptFormats(tokenizer, detect_chat(self._model), detect_fim(tokenizer, self._model))
        made = []
        for ask in make_prompts(sources, formats, plan.asks, seed=plan.seed, longest=self._prompt):
            made.append(_as_text(ask))
            self._report("asks", len(made), plan.asks)
        if len(made) <= plan.heldout:
            raise InputError(f"the code gives {len(made)} asks only; give more of it or hold out fewer")
        write_texts(self._run / "code.npz", self._excerpts(sources, tokenizer))
        write_texts(path, made)

    def _excerpts(self, sources: Sequence[SourceText], tokenizer: Tokenizer) -> list[TokenText]:
        """Pieces of real code as they stand."""
        rng, length = random.Random(self._plan.seed), self._prompt
        found = []
        for source in rng.sample(list(sources), min(self._plan.code, len(sources))):
            tokens = tokenizer.encode(source.text[: 12 * length])
            at = rng.randrange(max(1, len(tokens) - length))
            if len(tokens) > 32:
                found.append(TokenText(np.asarray(tokens[at : at + length], np.int32), 0, "code"))
        return found

    def _answers(self, checkpoint: Checkpoint) -> None:
        plan, folder = self._plan, self._run / "written"
        folder.mkdir(exist_ok=True)
        every = [
            GenerationPrompt(t.tokens.tolist(), t.kind, t.temperature, t.seed)
            for t in read_texts(self._run / "asks.npz")
        ]
        held, rest = every[: plan.heldout], every[plan.heldout :]
        portion = 8 * plan.slots
        portions = {
            self._run / "heldout-greedy.npz": ([replace(ask, temperature=0.0) for ask in held], False),
            self._run / "heldout-drawn.npz": ([replace(ask, temperature=HEAT) for ask in held], True),
        }
        for number, first in enumerate(range(0, len(rest), portion)):
            portions[folder / f"{number:04}.npz"] = rest[first : first + portion], False
        missing = {path: work for path, work in portions.items() if not path.exists()}
        done = len(every) + len(held) - sum(len(some) for some, _ in missing.values())
        writers: dict[bool, BatchGenerator] = {}
        for path, (some, coupled) in missing.items():
            if coupled not in writers:
                writers.clear()  # gives back the other's keys and values first
                writers[coupled] = self._writer(checkpoint, coupled)
            written = []
            # Of like lengths together: attention reads no further than the longest.
            for text in writers[coupled].generate(sorted(some, key=lambda ask: len(ask.tokens))):
                written.append(text)
                self._report("answers", done + len(written), len(every) + len(held))
            done += len(written)
            write_texts(path, written)

    def _writer(self, checkpoint: Checkpoint, coupled: bool) -> BatchGenerator:
        plan, target = self._plan, self._loaded(checkpoint)
        fim = detect_fim(load_tokenizer(self._model), self._model)
        ends = target.spec.eos | (fim.stops if fim is not None else frozenset())
        return BatchGenerator(
            target,
            slots=min(plan.slots, plan.asks),
            longest_prompt=self._prompt,
            longest_answer=plan.longest_answer,
            ends=ends,
            coupled=coupled,
        )

    def _train(self, checkpoint: Checkpoint) -> None:
        if (self._run / "final.pt").exists():
            return
        plan, target = self._plan, self._loaded(checkpoint)
        own = [text for text in read_folder(self._run / "written") if text.written > 1]
        vocabulary, covered = vocabulary_of(own, plan.vocabulary // 16 * 16, target.spec.vocab_size)
        (self._run / "coverage.json").write_text(json.dumps({"covered": round(covered, 5)}) + "\n")
        shape = HeadShape.of(
            target.spec, intermediate=plan.intermediate, vocabulary=len(vocabulary), layers=plan.layers
        )
        head = new_head(shape, target, vocabulary, seed=plan.seed)
        trainer = DraftHeadRun(self._run, target, head, vocabulary, plan.recipe)
        texts = [*own, *read_texts(self._run / "code.npz")]
        batches = HeadBatches(
            target, texts, vocabulary, shape.layers, size=plan.batch, room=self._room(), seed=plan.seed
        )

        def report(row: dict[str, Any]) -> None:
            done = max(row["step"] / row["of"], row["seconds"] / plan.recipe.seconds)
            self._report(f"training, loss {row['loss']:.2f}", round(1000 * done), 1000)

        trainer.train(batches, report)

    def _room(self) -> int:
        if self._plan.keep_gigabytes:
            return int(self._plan.keep_gigabytes * 1e9)
        return torch.cuda.mem_get_info(self._device)[0] // 2 if self._device.type == "cuda" else 1 << 30

    def _evaluate(self, checkpoint: Checkpoint) -> dict[str, Any]:
        path = self._run / "evaluation.json"
        if not path.exists():
            target = self._loaded(checkpoint)
            state = read_head(self._run / "final.pt")
            head = head_of(state).to(target.device)
            measured = json.loads((self._run / "coverage.json").read_text())
            for name in ("greedy", "drawn"):
                self._report(f"evaluation, {name}", 0, 1)
                texts = read_texts(self._run / f"heldout-{name}.npz")
                found = trials(head, target, texts, state["vocabulary"].long(), DEPTH)
                half = len(found) // 2  # a tree is chosen on one half and judged on the other
                measured[name] = {
                    "texts": len(found),
                    "tokens_a_step": [
                        round(yield_of(found, chain_of(d)).per_step, 3) for d in range(1, DEPTH + 1)
                    ],
                    "tree_of_15": round(yield_of(found[half:], tree_of(found[:half], 15)).per_step, 3),
                }
            path.write_text(json.dumps(measured, indent=1) + "\n")
        found_there: dict[str, Any] = json.loads(path.read_text())
        return found_there


def _as_text(ask: GenerationPrompt) -> TokenText:
    return TokenText(np.asarray(ask.tokens, np.int32), len(ask.tokens), ask.kind, ask.temperature, ask.seed)


def timed(recipe: DraftHeadRecipe, minutes: float) -> DraftHeadRecipe:
    """The recipe with an end by the clock; 0 minutes: none."""
    return replace(recipe, seconds=60 * minutes) if minutes else recipe
