"""Builds an adapter's training examples from collected edits and the base's own answers.

Needs the base's tokenizer and templates, not torch. `examples` says what an example is, `sampling` how many
there are of each kind.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from keystroke.assist.next_edit.places import places_format
from keystroke.engine.templates import detect_fim
from keystroke.engine.tokenizer import Tokenizer, load_tokenizer
from keystroke.errors import InputError, NotFound
from keystroke_lab.adapters.examples import NEW, NEXT, OWN, QUIET, PromptForms
from keystroke_lab.adapters.sampling import project_examples, sample_examples
from keystroke_lab.corpus.dedup import Deduplicator
from keystroke_lab.corpus.edit_shards import select_edits
from keystroke_lab.corpus.overlap import EvaluationLines
from keystroke_lab.corpus.trajectories import FileEdit, read_edits
from keystroke_lab.draft_heads.texts import TokenText, read_texts, write_texts

Progress = Callable[[str, int, int], None]
_LONGEST_OWN = 900  # tokens
_BLOCK = 32  # projects of a process at a time
_KEPT = 1 << 17  # encoded lines: a file's lines recur in every example about it


def make_examples(
    model: Path,
    edits: Sequence[Path],
    own: Sequence[Path],
    out: Path,
    *,
    without: Sequence[Path] = (),
    tokens: int = 16_000_000,
    heldout: int = 0,
    seed: int = 0,
    processes: int = 0,
    report: Progress = lambda *_: None,
) -> dict[str, Any]:
    """Write examples to `out`; tokens and texts by kind. `own`: files of texts the base generated. `without`:
    evaluation cases whose files are kept out. `heldout`: of so many projects the next edits go to a file
    beside `out` and are not trained on: what a threshold is chosen by. Raises InputError for a base of
    another family, NotFound where there are no edits."""
    forms = _forms(model)
    paths = [path for folder in edits for path in folder.glob("*.jsonl.gz")]
    if not paths:
        raise NotFound("the folders given hold no collected edits; collect some with `keystroke train edits`")
    paths.sort(key=lambda path: hashlib.blake2b(path.name.encode(), digest_size=8).digest())
    left_out: Counter[str] = Counter()
    licences: Counter[str] = Counter()
    projects = _projects(paths, EvaluationLines.from_files(without), left_out, licences)
    examples = _worked(projects, model, seed, processes)
    apart = [text for texts in islice(examples, heldout) for text in texts if text.kind in (NEXT, NEW, QUIET)]
    if heldout:
        write_texts(out.with_name(f"{out.stem}-heldout{out.suffix}"), apart)
    made = list(
        sample_examples(
            examples,
            _own(own, forms.end),
            tokens,
            report=lambda done, of: report("examples", min(done, of), of),
        )
    )
    write_texts(out, made)
    sizes: Counter[str] = Counter()
    for text in made:
        sizes[text.kind] += len(text.tokens)
    return {
        "tokens": dict(sizes),
        "texts": dict(Counter(text.kind for text in made)),
        "heldout": len(apart),
        "left_out": dict(left_out),
        "licences": dict(licences.most_common()),  # of the projects read
    }


def _worked(
    projects: Iterator[list[FileEdit]], model: Path, seed: int, processes: int
) -> Iterator[list[TokenText]]:
    """The examples of each project, in their order, whatever the number of processes."""
    work = functools.partial(_examples_of, model, seed)
    if not processes:
        yield from map(work, projects)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        while some := list(islice(projects, _BLOCK * processes)):
            yield from pool.map(work, some, chunksize=_BLOCK // 4)


def _examples_of(model: Path, seed: int, edits: list[FileEdit]) -> list[TokenText]:
    return project_examples(edits, _forms(model), f"{seed}:{edits[0].project}")


def forms_of(model: Path) -> PromptForms:
    """How the base at `model` is asked. Raises InputError unless it is of the ChatML family with fill-in
    tokens."""
    tokenizer = load_tokenizer(model)
    places, fim = places_format(tokenizer), detect_fim(tokenizer, model)
    if places is None or fim is None:
        raise InputError(
            f"{model.name} has no ChatML or no fill-in tokens; an adapter for edits needs a base with both"
        )
    encode = functools.lru_cache(_KEPT)(tokenizer.encode)
    return PromptForms(
        tokenizer,
        replace(places, encode=encode),
        fim,
        chat_ml(tokenizer, places.marks.start),
        places.marks.end,
    )


@functools.lru_cache(1)
def _forms(model: Path) -> PromptForms:
    """Kept, for a tokenizer takes seconds to build."""
    return forms_of(model)


def chat_ml(tokenizer: Tokenizer, start: int) -> Callable[[Sequence[Mapping[str, str]]], list[int]]:
    """ChatML as tokens. Same as the templates of this family, and much faster."""
    end = tokenizer.special("<|im_end|>")
    assert end is not None  # places_format found it

    def tokens(messages: Sequence[Mapping[str, str]]) -> list[int]:
        found: list[int] = []
        for message in messages:
            said = f"{message['role']}\n{message['content']}"
            found += [start, *tokenizer.encode(said), end, *tokenizer.encode("\n")]
        return [*found, start, *tokenizer.encode("assistant\n")]

    return tokens


def _projects(
    paths: Sequence[Path], evaluated: EvaluationLines, left_out: Counter[str], licences: Counter[str]
) -> Iterator[list[FileEdit]]:
    seen = Deduplicator()
    for path in paths:
        every = read_edits(path)
        unseen = [e for e in every if not any(map(evaluated.occurs_in, (e.before, e.after())))]
        left_out["evaluated"] += len(every) - len(unseen)
        kept = select_edits(unseen, seen, left_out)
        if kept:
            licences[kept[0].licence] += 1
            yield kept


def _own(paths: Sequence[Path], end: int) -> Iterator[TokenText]:
    """Answers that came to their end."""
    for path in paths:
        for text in read_texts(path):
            if len(text.tokens) <= _LONGEST_OWN and text.given and int(text.tokens[-1]) == end:
                yield replace(text, kind=OWN)
