"""`keystroke train`: the steps that make the models we ship, from a corpus to its evaluation.

Each command is one step, can be stopped and run again, and leaves files for the next one. torch is imported
only by the steps that need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keystroke.clients.cli import options
from keystroke.clients.cli.options import Invocation, invocation_of
from keystroke.errors import InputError, NotFound, UsageError

if TYPE_CHECKING:
    from keystroke.engine.library import Progress

app = typer.Typer(
    name="train",
    help="Make a model: corpus, tokenizer, pretraining, export, evaluation.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Argument(help="The folder to work in.")]
Tokenizer = Annotated[Path, typer.Option(help="Folder of the tokenizer.")]
Without = Annotated[
    list[Path] | None,
    typer.Option(help="Evaluation cases: what shares six lines with them is not trained on."),
]
Processes = Annotated[int, typer.Option(min=0, help="Processes that clean and compare; 0 for one a core.")]
Downloads = Annotated[int, typer.Option(min=1, max=16, help="Downloads at a time.")]
Run = Annotated[Path, typer.Option(help="Folder of this run; a stopped run is resumed.")]
Base = Annotated[str, typer.Argument(help="The base: a model by name or path.")]
Shape = Annotated[str, typer.Option("--shape", help="JSON of what differs from the default shape.")]
Recipe = Annotated[str, typer.Option("--recipe", help="JSON of what differs from the default recipe.")]
Start = Annotated[Path | None, typer.Option(help="Weights of an earlier run to begin from.")]
Own = Annotated[list[Path] | None, typer.Option(help="Texts that the base generated, which keep its skill.")]
Seed = Annotated[int, typer.Option(help="Another seed gives other examples.")]
GpuIfAny = Annotated[str, typer.Option("--device", help="cuda or cpu; the GPU if there is one.")]
Counts = Mapping[str, Mapping[str, int]]


@contextmanager
def _resumable(run: Invocation) -> Iterator[Progress]:
    """Show progress; after Ctrl-C, say that the same command resumes the work."""
    try:
        with run.console.progress() as progress:
            yield progress
    except KeyboardInterrupt:
        run.console.note("stopped; the same command goes on from here")
        raise


def _print_counts(run: Invocation, counts: Counts) -> None:
    if run.json:
        run.console.json(counts)
    else:
        run.console.table(
            ("what", "outcome", "number"),
            [(what, name, f"{n:,}") for what, some in counts.items() for name, n in some.items()],
        )


def _print_row(run: Invocation, heads: tuple[str, str], counts: Mapping[str, int], result: Any) -> None:
    if run.json:
        run.console.json(result)
    else:
        run.console.table(heads, [(name, f"{n:,}") for name, n in counts.items()])


def _choose_device(device: str) -> str:
    """`device`, or the GPU if there is one. Raises UsageError for a GPU that is not there."""
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError("there is no GPU that torch can use; leave --device out or say --device cpu")
    return chosen


@app.command()
def corpus(
    ctx: typer.Context,
    folder: Folder,
    names: Annotated[
        Path | None, typer.Option(help="Project names, one a line; Debian's curated list if left out.")
    ] = None,
    projects: Annotated[int, typer.Option(min=0, help="Request this many of the names; 0 for all.")] = 0,
    late: Annotated[
        int, typer.Option(min=0, help="Names to draw from the whole index for the late part.")
    ] = 5000,
    requirements: Annotated[
        bool, typer.Option("--requirements", help="Also harvest what the kept projects require.")
    ] = False,
    cap: Annotated[
        int,
        typer.Option(
            min=1000, help="Most characters of one project; projects cut at less are requested again."
        ),
    ] = 4 << 20,
    young: Annotated[
        bool, typer.Option(help="Harvest projects of the late part where they are among the names.")
    ] = True,
    every_language: Annotated[
        bool, typer.Option("--every-language", help="Also keep files in other languages.")
    ] = False,
    without: Without = None,
    workers: Downloads = 6,
    processes: Processes = 0,
    build: Annotated[bool, typer.Option(help="Compare, split and write the pieces afterwards.")] = True,
    grow: Annotated[bool, typer.Option("--grow", help="Keep existing shards and add new ones.")] = False,
    json: options.Json = False,
) -> None:
    """Harvest projects from the package index and build the corpus, with what `sources` harvested. Resumes
    where it stopped."""
    from keystroke_lab.corpus import names as lists
    from keystroke_lab.corpus.build import build as build_corpus
    from keystroke_lab.corpus.build import grow as grow_corpus
    from keystroke_lab.corpus.harvest import HarvestLimits, ProjectRecord, harvest, read_record
    from keystroke_lab.corpus.languages import LANGUAGES
    from keystroke_lab.corpus.package_index import PackageIndex
    from keystroke_lab.corpus.split import LATE

    run = invocation_of(ctx)
    processes = processes or os.cpu_count() or 1
    learned = LANGUAGES if every_language else ("python",)
    before = None if young else LATE
    if names is None:
        wanted = lists.project_names(lists.debian_packages())
    else:
        try:
            wanted = names.read_text(encoding="utf-8").split()
        except (OSError, ValueError) as error:
            raise InputError(f"{names} cannot be read as a list of names: {error}") from error
        if not wanted:
            raise InputError(f"{names} holds no names; write one project name a line")
    wanted = lists.sampled(wanted, projects) if projects else wanted
    index = PackageIndex(connections=workers)
    outcomes: dict[str, dict[str, int]] = {}
    with _resumable(run) as progress:

        def gather(what: str, some: list[str], limits: HarvestLimits) -> None:
            done = [0]

            def count(_: ProjectRecord) -> None:
                done[0] += 1
                progress(what, done[0], len(some))

            place = folder / ("late-projects" if what == "late projects" else "projects")
            counts = harvest(
                index, some, place, limits=limits, workers=workers, processes=processes, report=count
            )
            outcomes[what] = dict(counts)

        gather(
            "projects", wanted, HarvestLimits(first_released_before=before, characters=cap, languages=learned)
        )
        if requirements:
            there = list((folder / "projects").glob("*.jsonl.gz"))
            kept = [record for path in there if (record := read_record(path)).outcome == "kept"]
            more = lists.required((r.requires for r in kept), (p.name.split(".")[0] for p in there))
            small = HarvestLimits(
                first_released_before=before,
                min_files=3,
                min_releases=3,
                try_variants=False,
                characters=cap,
                languages=learned,
            )
            gather("requirements", more, small)
        if late:
            progress("names of the index", 0, 1)
            drawn = lists.sampled(index.names(), late, seed=7)
            progress("names of the index", 1, 1)
            young_ones = HarvestLimits(LATE, min_files=5, min_releases=3, try_variants=False, characters=cap)
            gather("late projects", drawn, young_ones)
        index.close()
        if build:
            places = [folder / "projects", folder / "late-projects", folder / "sources"]
            make = grow_corpus if grow else build_corpus
            summary = make(
                places, folder / "corpus", without=without or (), workers=processes, report=progress
            )
            outcomes["files"] = summary["files"]
            outcomes["characters"] = summary["characters"]
    _print_counts(run, outcomes)


@app.command()
def sources(
    ctx: typer.Context,
    folder: Folder,
    millions: Annotated[int, typer.Option(min=1, help="Characters of each language, in millions.")] = 700,
    minutes: Annotated[float, typer.Option(min=0.0, help="Stop after this long; 0 for never.")] = 0.0,
    release: Annotated[str, typer.Option(help="Debian's release.")] = "trixie",
    packages: Annotated[
        bool, typer.Option(help="Also request npm packages that those packages name.")
    ] = True,
    workers: Annotated[int, typer.Option(min=1, max=32, help="Downloads at a time.")] = 12,
    processes: Processes = 0,
    json: options.Json = False,
) -> None:
    """Harvest Go, Rust, Java, C, C++, JavaScript and TypeScript from Debian's source packages and from npm;
    `corpus` builds them in. Resumes where it stopped."""
    from keystroke_lab.corpus.debian import Mirror
    from keystroke_lab.corpus.languages import LANGUAGES
    from keystroke_lab.corpus.npm import NpmIndex
    from keystroke_lab.corpus.sources import PackageQueue, harvest_sources, in_order

    run = invocation_of(ctx)
    mirror = Mirror(connections=workers)
    registry = NpmIndex(connections=workers) if packages else None
    queue = PackageQueue({language: millions * 1_000_000 for language in LANGUAGES if language != "python"})
    with _resumable(run) as progress:
        progress("Debian's indexes", 0, 1)
        for wanted in in_order(mirror.packages(release)):
            queue.add(wanted)
        progress("Debian's indexes", 1, 1)

        def show(queue: PackageQueue) -> None:
            reached = (min(queue.characters[name], goal) for name, goal in queue.goals.items())
            progress("million characters", sum(reached) // 1_000_000, sum(queue.goals.values()) // 1_000_000)

        outcomes = harvest_sources(
            mirror,
            registry,
            queue,
            folder / "sources",
            seconds=60 * minutes,
            workers=workers,
            processes=processes or os.cpu_count() or 1,
            report=show,
        )
    mirror.close()
    if registry is not None:
        registry.close()
    found = {"packages": dict(outcomes), "characters": dict(queue.characters)}
    _print_counts(run, found)


@app.command()
def edits(
    ctx: typer.Context,
    folder: Folder,
    projects: Annotated[int, typer.Option(min=0, help="Harvested projects to train on; 0 for all.")] = 0,
    heldout: Annotated[int, typer.Option(min=0, help="Late and held-out projects kept apart.")] = 60,
    releases: Annotated[int, typer.Option(min=2, max=20, help="Latest releases of each to compare.")] = 5,
    without: Without = None,
    workers: Downloads = 6,
    processes: Processes = 0,
    json: options.Json = False,
) -> None:
    """Collect what changed between consecutive releases of harvested projects. Resumes where it stopped."""
    from keystroke_lab.corpus.edit_shards import pack
    from keystroke_lab.corpus.edits import choose_projects, collect
    from keystroke_lab.corpus.package_index import PackageIndex
    from keystroke_lab.corpus.split import CorpusPart

    run = invocation_of(ctx)
    places = [folder / "projects", folder / "late-projects"]
    parts = {
        "train": choose_projects(places, [CorpusPart.TRAIN])[: projects or None],
        "heldout": choose_projects(places, [CorpusPart.HELD_OUT, CorpusPart.LATE])[:heldout],
    }
    if not parts["train"]:
        raise NotFound(
            f"{folder} holds no harvested projects; harvest some with `keystroke train corpus {folder}`"
        )
    out = folder / "edits"
    summary: dict[str, Any] = {}
    index = PackageIndex(connections=workers)
    with _resumable(run) as progress:
        for part, records in parts.items():
            counts = collect(
                index,
                records,
                out / "collected" / part,
                releases=releases,
                workers=workers,
                processes=processes or os.cpu_count() or 1,
                report=progress,
            )
            summary[f"{part} projects"] = dict(counts)
        index.close()
        manifest = pack(
            out / "collected" / "train",
            out / "collected" / "heldout",
            out,
            without=without or (),
            report=progress,
        )
    summary |= {key: manifest[key] for key in ("train", "heldout", "left_out")}
    _print_counts(run, summary)


@app.command("npm-edits")
def npm_edits(
    ctx: typer.Context,
    names: Annotated[Path, typer.Argument(help="A file of package names, one a line.")],
    out: Annotated[Path, typer.Option(help="Folder for the edits of each package.")],
    versions: Annotated[int, typer.Option(min=2, max=20, help="Latest versions of each to compare.")] = 4,
    workers: Downloads = 6,
    json: options.Json = False,
) -> None:
    """Collect what changed between versions of JavaScript packages. Resumes where it stopped."""
    from keystroke_lab.corpus.npm_edits import NpmRegistry, collect_packages

    run = invocation_of(ctx)
    try:
        wanted = names.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{names} cannot be read ({error}); give a file of package names") from error
    registry = NpmRegistry()
    with _resumable(run) as progress:
        counts = collect_packages(registry, wanted, out, versions=versions, workers=workers, report=progress)
        registry.close()
    _print_row(run, ("outcome", "packages"), counts, dict(counts))


@app.command("debian-edits")
def debian_edits(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for the edits of each package.")],
    packages: Annotated[int, typer.Option(min=1, help="Source packages to ask for.")] = 1000,
    workers: Downloads = 6,
    json: options.Json = False,
) -> None:
    """Collect what changed in C, C++, Go, Rust and Java between two releases of Debian. Resumes where it
    stopped."""
    from keystroke_lab.corpus import debian_edits as debian
    from keystroke_lab.corpus.names import shuffled

    run = invocation_of(ctx)
    archive = debian.SourceArchive()
    with _resumable(run) as progress:
        releases = [archive.packages(suite) for suite in debian.SUITES]
        names = shuffled(debian.in_both(releases), "edits")[:packages]
        counts = debian.collect_sources(archive, releases, names, out, workers=workers, report=progress)
        archive.close()
    _print_row(run, ("outcome", "packages"), counts, dict(counts))


@app.command()
def tokenizer(
    ctx: typer.Context,
    folder: Folder,
    out: Annotated[Path, typer.Option(help="Where to write it.")],
    vocabulary: Annotated[int, typer.Option(min=320, max=65_536, help="Tokens.")] = 32_768,
    characters: Annotated[int, typer.Option(help="Characters of the corpus to learn from.")] = 80_000_000,
    baseline: Annotated[Path | None, typer.Option(help="Another tokenizer to measure beside it.")] = None,
) -> None:
    """Train the tokenizer on the corpus, every language by its share, and measure it on held-out code."""
    from keystroke_lab.pretraining.mixture import EDITS, SHARES
    from keystroke_lab.tokenizer import code_tokenizer as code
    from keystroke_lab.tokenizer.sampling import balanced_texts, density

    run = invocation_of(ctx)
    shares = {language: share for language, share in SHARES.items() if language != EDITS}
    if not (folder / "corpus" / "train").is_dir():
        raise NotFound(f"{folder} holds no corpus; make one with `keystroke train corpus {folder}`")
    trained = code.train(balanced_texts(folder / "corpus" / "train", shares, characters), vocabulary)
    code.save(trained, out)
    measured = {"vocabulary": vocabulary, "bytes_per_token": density(trained, folder / "corpus" / "heldout")}
    if baseline is not None:
        measured["baseline"] = density(code.load(baseline), folder / "corpus" / "heldout")
    run.console.json(measured)


@app.command()
def pretrain(
    data: Annotated[Path, typer.Argument(help="Folder of corpus pieces; may still be filling.")],
    tokenizer: Tokenizer,
    run: Run,
    heldout: Annotated[Path | None, typer.Option(help="A piece that is never trained on.")] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long, by the clock.")] = 10.0,
    steps: Annotated[int, typer.Option(min=0, help="This many steps instead.")] = 0,
    shape: Shape = "{}",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    workers: Annotated[int, typer.Option(min=1, help="Processes that prepare data.")] = 8,
    start: Start = None,
    edits: Annotated[
        Path | None, typer.Option(help="Folder of pieces of edits; may still be filling.")
    ] = None,
    recipe: Recipe = "{}",
) -> None:
    """Train a model on prepared pieces."""
    from keystroke_lab.pretraining import __main__ as deadline
    from keystroke_lab.pretraining.deadline_run import DeadlineRecipe
    from keystroke_lab.training import transformer

    deadline.pretrain(
        data,
        tokenizer,
        run,
        heldout=heldout,
        minutes=minutes,
        shape=transformer.Shape.from_json(shape),
        recipe=DeadlineRecipe.from_json(recipe, steps=steps),
        device=device,
        workers=workers,
        start=start,
        edits=edits,
    )


@app.command()
def check(
    ctx: typer.Context,
    folder: Folder,
    without: Annotated[list[Path], typer.Option(help="Evaluation cases that must not be in the corpus.")],
    processes: Processes = 0,
) -> None:
    """Fail if a training shard holds lines, or a project, of an evaluation case."""
    from keystroke_lab.corpus.overlap import contaminated
    from keystroke_lab.corpus.shards import shard_paths

    pieces = list(shard_paths(folder / "corpus" / "train"))
    if not pieces:
        raise NotFound(f"{folder} holds no corpus; make one with `keystroke train corpus {folder}`")
    found = contaminated(pieces, without, processes or os.cpu_count() or 1)
    if found:
        raise InputError(
            f"{len(found)} training files hold evaluation cases, the first {found[0]}; "
            "build the corpus again with --without"
        )
    invocation_of(ctx).console.note(f"{len(pieces)} pieces hold nothing of the cases")


@app.command()
def plan(
    ctx: typer.Context,
    folder: Folder,
    out: Annotated[Path, typer.Option(help="The plan to write, a JSON file.")],
    shares: Annotated[str, typer.Option(help="JSON of what differs from the default shares.")] = "{}",
    edits: Annotated[bool, typer.Option(help="A share for the edits, where there are any.")] = True,
    lot: Annotated[int, typer.Option(min=1, help="Megabytes of pieces to send at once.")] = 50,
    seed: Annotated[int, typer.Option(help="Another seed gives another order.")] = 0,
) -> None:
    """Write the order in which shards are trained on and sent, by shares of languages."""
    from json import loads

    from keystroke_lab.pretraining.mixture import SHARES, make_plan

    try:
        wanted = {**SHARES, **{str(name): float(share) for name, share in loads(shares).items()}}
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"the shares are no JSON object of numbers ({error})") from error
    place = folder / "edits" / "train"
    made = make_plan(folder / "corpus" / "train", place if edits and place.is_dir() else None, wanted, seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(made.to_json() + "\n")
    lots = [[piece.name for piece in some] for some in made.lots(lot * 1_000_000)]
    out.with_suffix(".lots").write_text("".join(" ".join(some) + "\n" for some in lots))
    total = {s: sum(p.characters for p in made.pieces if p.stream == s) for s in made.shares}
    invocation_of(ctx).console.json(
        {"pieces": len(made.pieces), "lots": len(lots), "about_characters": total}
    )


@app.command()
def stretch(
    plan: Annotated[Path, typer.Argument(help="The plan that `train plan` wrote.")],
    data: Annotated[
        list[Path], typer.Option(help="Folder of pieces; may be repeated, may still be filling.")
    ],
    tokenizer: Tokenizer,
    run: Run,
    seconds: Annotated[float, typer.Option(min=0.0, help="Stop before so many seconds are over.")] = 0.0,
    steps: Annotated[int, typer.Option(min=0, help="Stop after so many steps.")] = 0,
    finish: Annotated[int, typer.Option(min=0, help="Decay over so many steps and end.")] = 0,
    shape: Shape = "{}",
    recipe: Recipe = "{}",
    heldout: Annotated[Path | None, typer.Option(help="Folder of pieces that are never trained on.")] = None,
    cases: Annotated[list[Path] | None, typer.Option(help="Cases to complete at the end.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    workers: Annotated[int, typer.Option(min=0, help="Processes that prepare data.")] = 8,
    start: Start = None,
) -> None:
    """Resumable training on short GPU leases: stopping a run does not change its result."""
    from keystroke_lab.pretraining import leased
    from keystroke_lab.pretraining.leased_run import LeasedRecipe
    from keystroke_lab.training import transformer

    leased.train(
        plan,
        data,
        tokenizer,
        run,
        seconds=seconds,
        steps=steps,
        finish=finish,
        shape=transformer.Shape.from_json(shape),
        recipe=LeasedRecipe.from_json(recipe),
        heldout=heldout,
        cases=cases or [],
        device=device,
        workers=workers,
        start=start,
    )


@app.command()
def unpack(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(help="`finished` or `checkpoint` of a `train stretch` run.")],
    out: Annotated[Path, typer.Option(help="The .pt file to write.")],
) -> None:
    """Turn a checkpoint of `train stretch` into weights that `export` and `--start` read."""
    from keystroke_lab.pretraining.leased_run import to_weights

    to_weights(folder, out)
    invocation_of(ctx).console.note(f"wrote {out}")


@app.command()
def export(
    ctx: typer.Context,
    weights: Annotated[Path, typer.Argument(help="final.pt of a run.")],
    tokenizer: Tokenizer,
    out: Annotated[Path, typer.Option(help="A .gguf file, or a folder for transformers.")],
    name: Annotated[str, typer.Option(help="Name stored in the model.")] = "keystroke",
    quantisation: Annotated[str, typer.Option(help="Of a GGUF: Q8_0, F16, BF16 or F32.")] = "Q8_0",
) -> None:
    """Write trained weights as a GGUF file or as a folder for transformers."""
    from keystroke_lab.export import weights as exporter

    if out.suffix == ".gguf":
        exporter.export_gguf(weights, tokenizer, out, name=name, quantisation=quantisation)
    else:
        exporter.export_huggingface(weights, tokenizer, out)
    invocation_of(ctx).console.note(f"wrote {out}")


@app.command("import")
def import_(
    ctx: typer.Context,
    model: Annotated[Path, typer.Argument(help="A GGUF file or a folder that was exported.")],
    out: Annotated[Path, typer.Option(help="The .pt file to write.")],
    layers: Annotated[
        int, typer.Option(min=0, help="Add layers up to this number; new ones change nothing yet.")
    ] = 0,
    context: Annotated[int, typer.Option(min=0, help="A longer context, in tokens.")] = 0,
) -> None:
    """Turn an exported model back into weights that `--start` continues from."""
    from keystroke_lab.export.weights import import_weights

    import_weights(model, out, layers=layers, context=context)
    invocation_of(ctx).console.note(f"wrote {out}")


@app.command("draft-head")
def draft_head(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="The target: a model by name or path.")],
    code: Annotated[
        list[Path],
        typer.Option(help="Folder of source files or corpus shards to make prompts from; may be repeated."),
    ],
    run: Run,
    asks: Annotated[int, typer.Option(min=2, help="Prompts that the target answers.")] = 32_000,
    heldout: Annotated[int, typer.Option(min=1, help="Of these, kept apart to measure with.")] = 100,
    minutes: Annotated[
        float, typer.Option(min=0.0, help="End training by the clock; 0: after its passes.")
    ] = 0.0,
    passes: Annotated[float, typer.Option(min=0.01, help="Over all texts.")] = 4.0,
    answer: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 384,
    slots: Annotated[int, typer.Option(min=1, help="Answers written at a time.")] = 1024,
    batch: Annotated[int, typer.Option(min=64, help="Tokens of a training step.")] = 16_384,
    vocabulary: Annotated[int, typer.Option(min=16, help="Tokens that the head can guess.")] = 16_384,
    width: Annotated[
        int, typer.Option(min=0, help="Of its feed-forward layer; 0: ten thirds of hidden.")
    ] = 0,
    keep: Annotated[float, typer.Option(min=0.0, help="GB of the device for features; 0: half of it.")] = 0.0,
    device: GpuIfAny = "",
    json: options.Json = False,
) -> None:
    """Train a draft head: one layer that predicts a model's next tokens, so that it needs fewer steps.
    The model answers prompts made from CODE; the head is trained on its answers, measured on held-out ones
    and written to RUN/head."""
    from keystroke.engine.locate import resolve
    from keystroke_lab.draft_heads.pipeline import DraftHeadPipeline, DraftHeadPlan, timed
    from keystroke_lab.draft_heads.training import DraftHeadRecipe

    invocation = invocation_of(ctx)
    chosen = _choose_device(device)
    plan = DraftHeadPlan(
        asks=asks,
        heldout=heldout,
        longest_answer=answer,
        slots=slots,
        batch=batch,
        keep_gigabytes=keep,
        vocabulary=vocabulary,
        intermediate=width,
        recipe=timed(DraftHeadRecipe(passes=passes), minutes),
    )
    with _resumable(invocation) as progress:
        path = resolve(model, invocation.settings)
        measured = DraftHeadPipeline(path, code, run, plan, chosen, progress).make()
    if invocation.json:
        invocation.console.json(measured)
        return
    rows = [("the vocabulary covers", f"{measured['covered']:.1%} of what the target wrote")]
    for name in ("greedy", "drawn"):
        found = measured[name]
        steps = ", ".join(
            f"{depth}: {value:.2f}" for depth, value in enumerate(found["tokens_a_step"], start=1)
        )
        rows.append(
            (f"tokens a step, {name}, by drafts", f"{steps}; best tree of 15: {found['tree_of_15']:.2f}")
        )
    rows.append(("written", f"{measured['head']} ({measured['bytes']:,} bytes)"))
    invocation.console.table(("what", "measured"), rows)


@app.command("adapter-lessons", hidden=True)  # the name of earlier releases
@app.command("adapter-examples")
def adapter_examples(
    ctx: typer.Context,
    model: Base,
    edits: Annotated[list[Path], typer.Option(help="Folder of collected edits; may be repeated.")],
    out: Annotated[Path, typer.Option(help="The .npz file to write.")],
    own: Own = None,
    without: Without = None,
    tokens: Annotated[int, typer.Option(min=1000, help="Tokens to make.")] = 16_000_000,
    seed: Seed = 0,
    json: options.Json = False,
) -> None:
    """Make training examples for an adapter from collected edits: next edits, no edit, rewriting, fill-in."""
    from keystroke.engine.locate import resolve
    from keystroke_lab.adapters.dataset import make_examples

    run = invocation_of(ctx)
    with _resumable(run) as progress:
        path = resolve(model, run.settings)
        made = make_examples(
            path, edits, own or (), out, without=without or (), tokens=tokens, seed=seed, report=progress
        )
    _print_row(run, ("kind", "tokens"), made["tokens"], made)


@app.command("adapter-data")
def adapter_data(
    ctx: typer.Context,
    model: Base,
    folder: Folder,
    without: Without = None,
    own: Own = None,
    projects: Annotated[int, typer.Option(min=0, help="Names of Python projects that Debian has.")] = 4000,
    drawn: Annotated[int, typer.Option(min=0, help="Names drawn from the whole package index.")] = 22_400,
    after: Annotated[
        int, typer.Option(min=0, help="Skip the first names of the draw, which an earlier run had.")
    ] = 0,
    packages: Annotated[int, typer.Option(min=0, help="Names of npm packages to ask for.")] = 1600,
    until: Annotated[datetime, typer.Option(formats=["%Y-%m-%d"], help="Releases before this day.")] = (
        datetime(2026, 11, 1)
    ),
    tokens: Annotated[int, typer.Option(min=1000, help="Tokens of examples.")] = 64_000_000,
    seed: Seed = 0,
    workers: Downloads = 8,
    processes: Processes = 0,
    json: options.Json = False,
) -> None:
    """Collect consecutive releases and make an adapter's examples from them, in one step. Resumes where it
    stopped."""
    from keystroke.engine.locate import resolve
    from keystroke_lab.adapters import pipeline as data
    from keystroke_lab.corpus.npm_edits import NpmRegistry
    from keystroke_lab.corpus.package_index import PackageIndex

    run = invocation_of(ctx)
    index, registry = PackageIndex(connections=workers), NpmRegistry() if packages else None
    with _resumable(run) as progress:
        made = data.make_data(
            folder,
            resolve(model, run.settings),
            index,
            registry,
            data.python_names(projects, index, drawn, after),
            data.npm_names(packages) if packages else [],
            until=until.replace(tzinfo=UTC),
            amounts=data.Amounts(projects, drawn, packages, tokens=tokens),
            without=without or (),
            own=own or (),
            seed=seed,
            workers=workers,
            processes=processes or os.cpu_count() or 1,
            report=progress,
        )
        index.close()
        if registry is not None:
            registry.close()
    _print_row(run, ("kind", "tokens"), made["tokens"], made)


@app.command()
def adapter(
    ctx: typer.Context,
    model: Base,
    examples: Annotated[
        list[Path], typer.Option("--examples", "--lessons", help="Examples (.npz); may be repeated.")
    ],
    run: Run,
    begin: Annotated[
        Path | None, typer.Option(help="An adapter to continue from, with other examples.", exists=True)
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.0, help="End by the clock; 0: after its passes.")] = 0.0,
    passes: Annotated[float, typer.Option(min=0.01, help="Over all examples.")] = 1.0,
    rank: Annotated[int, typer.Option(min=1, max=256, help="Of each correction.")] = 16,
    rate: Annotated[float, typer.Option(min=1e-6, help="Learning rate.")] = 2e-4,
    keep: Annotated[
        float, typer.Option(min=0.0, help="Weight of the divergence from the base on examples to keep.")
    ] = 4.0,
    batch: Annotated[int, typer.Option(min=64, help="Tokens that are read at once.")] = 8192,
    device: GpuIfAny = "",
    json: options.Json = False,
) -> None:
    """Train an adapter that teaches a base model to edit. The base is not changed."""
    from keystroke.engine.locate import resolve
    from keystroke_lab.adapters.examples import LEARNED
    from keystroke_lab.adapters.training import AdapterRecipe, train_adapter

    invocation = invocation_of(ctx)
    chosen = _choose_device(device)
    recipe = AdapterRecipe(
        passes=passes, seconds=60 * minutes or float("inf"), rate=rate, keep=keep, batch=batch, report_every=1
    )
    with _resumable(invocation) as progress:
        path = resolve(model, invocation.settings)
        made = train_adapter(path, examples, run, recipe, rank, chosen, LEARNED, progress, begin=begin)
    if invocation.json:
        invocation.console.json(made)
    else:
        invocation.console.note(
            f"wrote {made['adapter']} ({made['bytes']:,} bytes) after {made['steps']} steps"
        )


@app.command()
def evaluate(
    ctx: typer.Context,
    models: Annotated[list[str], typer.Argument(help="Models by name or path.")],
    cases: Annotated[Path, typer.Option(help="Evaluation cases.")],
    limit: Annotated[int, typer.Option(min=0, help="Cases of each kind; 0 is all.")] = 0,
    edits: Annotated[Path | None, typer.Option(help="Cases of next edits.")] = None,
) -> None:
    """Score models on the same completions, and on next edits if they were trained on them, as JSON."""
    from keystroke.engine.load import load_model
    from keystroke.engine.locate import resolve
    from keystroke.text.cases import read_cases
    from keystroke_lab.evaluation.completion import ModelSuggester, evaluate, limited, summary
    from keystroke_lab.evaluation.edit_cases import read_edit_cases, scored_edits

    run = invocation_of(ctx)
    asked = limited(read_cases(cases), limit)
    changes = [] if edits is None else read_edit_cases(edits)[: limit or None]
    results: dict[str, Any] = {}
    for name in models:
        path = resolve(name, run.settings)
        model = load_model(name, run.settings)
        try:
            results[name] = {**summary(evaluate(ModelSuggester(model), asked))}
            results[name] |= scored_edits(model, path, changes)
        finally:
            model.engine.close()
    run.console.json({"cases": len(asked), "models": results})
