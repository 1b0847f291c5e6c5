"""The embedded engine: the contract of `engine.base` on ONNX Runtime.

Called by one thread; runs release the GIL and append KV in place. Positions are inputs, so that a rollback
only changes a length, a verification is a run of several rows, and a fork shares memory until it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from keystroke.engine.adapter import AdapterFile
from keystroke.engine.base import Engine, EngineStats, Guess, Interrupt, Step, StepRequest
from keystroke.engine.checkpoint import ModelSpec
from keystroke.engine.cores import usable_cores
from keystroke.engine.disk_prefixes import DiskPrefixes
from keystroke.engine.host import HostSession, PreparedStep
from keystroke.engine.onnx.kv import KvBuffers, KvPool
from keystroke.engine.onnx.plan import LogitRows, PlannedRun, StepPlan, StopFlag
from keystroke.engine.onnx.precision import MIN_ATTENTION_ROWS
from keystroke.engine.onnx.predictor import MOST_TOKENS, MtpDrafter
from keystroke.engine.onnx.recurrent import Float32
from keystroke.engine.onnx.stored import NativeWeights
from keystroke.engine.prefix import CachedPrefix, PrefixCache, common_prefix
from keystroke.engine.sampler import RankedRow
from keystroke.engine.snapshots import SNAPSHOT_SHARE, SnapshotStore
from keystroke.engine.speculative.layer_draft import KEPT_STREAM, StreamTail
from keystroke.errors import EngineError, Interrupted, ModelDamaged, NotEnoughMemory, UsageError

PREFILL_CHUNK = 128  # rows; larger is hardly faster and slower to interrupt
TAIL = 64  # an extension of up to this many tokens is computed with the next step, in one run
LOGIT_ROWS = 64  # more than any drafter's longest draft
KNOWN_ROWS = 4  # prompts whose logits are kept
WORTH_COPYING = 16  # tokens: below this, recomputing is as fast
WORTH_SPARING = 256  # tokens beyond the shared prefix that justify a copy, if memory allows
FEW_CORES = 4
BRIEF_SPIN_US = 50
RESERVE = 1 << 30  # free memory in bytes below which cached prefixes are dropped


@dataclass(frozen=True, slots=True)
class OnnxGraph:
    """A converted model, and what completes its graph."""

    file: Path
    spec: ModelSpec
    precision: str
    stored: NativeWeights | None = None  # for a graph that was built without its weights
    adapter: AdapterFile | None = None  # for a graph that was built to take one
    predictor: Path | None = None  # the graph of the layer that predicts the token after the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxOptions:
    """Settings for running a graph."""

    threads: int = 0  # 0: one per physical core
    kv_budget: int = 4 << 30  # bytes
    context_length: int | None = None  # None: the model's own
    planned: bool = True  # one native call a step, where there is a plan for the model
    exact: bool = True  # results do not depend on how tokens were grouped into runs
    # Bytes that the machine can still give; when they run short, cached prefixes are dropped, oldest first.
    free_memory: Callable[[], int | None] = lambda: None
    disk_prefixes: DiskPrefixes | None = (
        None  # prefixes on disk, read when useful and written when the engine closes
    )


DEFAULTS = OnnxOptions()


class OnnxEngine(Engine):
    def __init__(self, graph: OnnxGraph, options: OnnxOptions = DEFAULTS) -> None:
        """Raises ModelDamaged if ONNX Runtime cannot open the graph."""
        spec, stored, kv_budget = graph.spec, graph.stored, options.kv_budget
        self.spec = spec
        self.disk_prefixes = options.disk_prefixes
        self._free_memory = options.free_memory
        self.exact = options.exact
        tables: dict[str, np.ndarray] = dict(stored.tables) if stored is not None else {}
        if graph.adapter is not None:
            tables |= _adapter_inputs(graph.adapter)
        self._tables: dict[str, ort.OrtValue] = {}
        # Models that a plan runs have no other use for the runtime.
        self._plan: StepPlan | None = None
        self._runtime: ort.InferenceSession | None = None
        kinds: dict[str, str] = {}
        if stored is not None and stored.vectors and options.planned:
            self._plan = StepPlan(spec, stored, options.threads)
            self.batch_slows = True
        else:
            self._tables = {name: ort.OrtValue.ortvalue_from_numpy(each) for name, each in tables.items()}
            self._runtime = _open_session(graph.file, options.threads, stored)
            kinds = {each.name: each.type for each in self._runtime.get_inputs()}
        halves = self._plan is not None or "float16" in kinds[f"key.{spec.attention_layers[0]}"]
        kv: np.dtype[np.floating] = np.dtype(np.float16 if halves else np.float32)
        self._padded = "pad" in kinds
        outputs = self._runtime.get_outputs() if self._runtime is not None else []
        self._returns_kv = any(each.name.startswith("new_key.") for each in outputs)
        self.pool = KvPool(spec, kv, kv_budget, make_room=lambda: self.cache.drop_oldest())
        width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        self._pads = [np.zeros((1, rows, width), dtype=kv) for rows in range(MIN_ATTENTION_ROWS)]
        self._pad_values = [ort.OrtValue.ortvalue_from_numpy(pad) for pad in self._pads]
        # The whole budget: sessions evict the oldest prefixes when they need memory.
        self.cache: PrefixCache[KvBuffers] = PrefixCache(kv_budget, drop=self.pool.release)
        self.live: set[OnnxSession] = set()
        self._scratch: dict[int, _RunInputs] = {}
        # One buffer for the logits of all runs; the system allocates pages on first write.
        self._logits_memory = np.empty((LOGIT_ROWS, spec.vocab_size), dtype=np.float32)
        self._logits: dict[int, tuple[LogitRows, ort.OrtValue]] = {}
        # The logits after the newest prompts, by scope and tokens; the newest last.
        self.known: dict[tuple[str, tuple[int, ...]], tuple[Float32, RankedRow]] = {}
        self.last = np.zeros(1, dtype=np.int32)
        self.total = np.zeros(1, dtype=np.int32)
        self.control = np.zeros(4, dtype=np.int64)  # of recurrent layers: see RecurrentState.prepare
        self.control_value = ort.OrtValue.ortvalue_from_numpy(self.control)
        self.snapshots: SnapshotStore[list[Float32]] = SnapshotStore(int(kv_budget * SNAPSHOT_SHARE))
        self.last_value = ort.OrtValue.ortvalue_from_numpy(self.last)
        self.total_value = ort.OrtValue.ortvalue_from_numpy(self.total)
        # The stream before the first row of a run and that of its rows, for models with a predictor.
        self.previous = np.zeros((1, 1, spec.hidden), np.float32)
        self._previous_value = ort.OrtValue.ortvalue_from_numpy(self.previous)
        self._streams: dict[int, tuple[Float32, ort.OrtValue]] = {}
        self.predictor: MtpDrafter | None = None
        if graph.predictor is not None:
            runtime = _open_session(graph.predictor, options.threads, stored)
            self.predictor = MtpDrafter(runtime, spec, self._tables)
            self._tables = {name: table for name, table in self._tables.items() if name in kinds}
        self.drafts = self.predictor is not None
        self._watched: tuple[Interrupt, ort.RunOptions | StopFlag, Callable[[], None]] | None = None
        self._never = StopFlag()
        self._closed = False
        files = sum(file.stat().st_size for file in graph.file.parent.iterdir() if file.is_file())
        weight_bytes = files + sum(table.nbytes for table in tables.values())
        self.info = spec.info(
            weight_bytes=weight_bytes,
            kv_bytes_per_token=self.pool.bytes_for(2) - self.pool.bytes_for(1),
            precision=graph.precision,
            context=options.context_length,
            mapped=stored is not None and bool(stored.tables),
            host_bytes=weight_bytes,
        )
        if self._plan is not None:  # each session may grow to a whole context
            fit = kv_budget // (self.info.kv_bytes_per_token * self.info.context_length)
            self.max_batch = max(1, min(self._plan.cheap_sequences, fit))

    def session(self, scope: str = "") -> OnnxSession:
        if self._closed:
            raise EngineError("this engine was closed; load the model again")
        return OnnxSession(self, scope)

    def protect_prefix(self, tokens: Sequence[int], seconds: float, scope: str = "") -> None:
        self.cache.protect(tokens, seconds, scope)

    def stats(self) -> EngineStats:
        held = {id(s.buffers): s.buffers.nbytes for s in self.live if s.buffers is not None}
        return EngineStats(
            sessions=len(self.live),
            kv_bytes=sum(held.values()),
            cached_bytes=self.cache.nbytes,
            cached_tokens=self.cache.tokens,
            kv_limit_bytes=self.pool.budget,
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for session in tuple(self.live):
            session.close()
        if self.disk_prefixes is not None:
            self.save_prefixes(self.disk_prefixes)
        self.cache.clear()
        self._unwatch()
        self._scratch.clear()
        self._streams.clear()
        self.predictor = None
        self._logits.clear()
        self.known.clear()
        self._runtime = None
        if self._plan is not None:
            self._plan.close()
            self._plan = None  # with the weights: others may hold the engine until the next collection
        self._tables.clear()

    def save_prefixes(self, disk: DiskPrefixes) -> None:
        for entry in self.cache.newest_first():
            recurrent = entry.payload.recurrent
            states = None if recurrent is None else recurrent.saved_states(len(entry.tokens))
            disk.save(entry.tokens, entry.payload.arrays, entry.scope, states)

    def step_many(self, requests: Sequence[StepRequest]) -> list[Step]:
        """Step several sessions in one run, where there is a plan for the model."""
        plan = self._plan
        if plan is None or len(requests) < 2:
            return super().step_many(requests)
        sessions: list[OnnxSession] = []
        for request in requests:
            if not isinstance(request.session, OnnxSession) or request.session in sessions:
                raise UsageError("a session can take part in a step only once, and only in its own engine's")
            request.session.check_ready()
            sessions.append(request.session)
        ready = [
            session.prepare_step(request.draft, request.sampling, None, request.allowed)
            for session, request in zip(sessions, requests, strict=True)
        ]
        steps: list[Step] = []
        for group in _group_steps(list(zip(sessions, ready, strict=True))):
            steps += self._step_group(plan, group)
        return steps

    def _step_group(self, plan: StepPlan, group: Sequence[tuple[OnnxSession, PreparedStep]]) -> list[Step]:
        parts = [session.begin_run(step) for session, step in group if step.rows]
        rows = sum(part.asked for part in parts)
        if parts:
            tokens = [token for _, step in group for token in step.tokens]
            logits = self._run_plan(plan, tokens, parts, rows)
            ranked, array = logits.ranked(), logits.array
        else:
            ranked, array = [], self._logits_memory[:0]
        steps, at = [], 0
        for session, step in group:
            end = at + step.rows
            session.end_run(step)
            steps.append(session.finish_step(step, array[at:end], ranked[at:end]))
            at = end
        return steps

    def guess(self, tokens: Sequence[int], *, wanted: bool = True) -> Guess | None:
        if self.predictor is None or not wanted:
            return None
        session = next((each for each in self.live if each.tokens is tokens), None)
        guess = session.predict(self.predictor) if session is not None else None
        self.guess_seconds = self.predictor.seconds
        return guess

    # For sessions

    def release_memory(self) -> None:
        """Drop cached prefixes while the machine is short of memory."""
        while (free := self._free_memory()) is not None and free < RESERVE and self.cache.drop_oldest():
            pass

    def load_prefix(self, tokens: Sequence[int], scope: str, beyond: int) -> None:
        """Load a prefix from disk into the cache if it is longer than `beyond`."""
        if self.disk_prefixes is None:
            return
        entry, length = self.disk_prefixes.find(tokens, scope, beyond + WORTH_COPYING)
        if entry is None:
            return
        try:
            buffers = self.pool.allocate(length + MIN_ATTENTION_ROWS)
        except NotEnoughMemory:
            return
        restore, recurrent = None, buffers.recurrent
        if recurrent is not None:
            restore = partial(recurrent.take_over, store=self.snapshots)
        if self.disk_prefixes.load(entry, buffers.arrays, length, restore):
            self.cache.put(list(tokens[:length]), buffers, buffers.nbytes, scope)
        else:
            self.pool.release(buffers)

    def has_room_to_copy(self, buffers: KvBuffers) -> bool:
        """Whether a copy fits without evicting anything."""
        return self.pool.used + buffers.nbytes <= self.pool.budget // 2

    def binding(self, buffers: KvBuffers) -> SessionBinding:
        if self._plan is not None:
            return SessionBinding(self._plan.bind(buffers.arrays), buffers.capacity)
        assert self._runtime is not None
        binding = self._runtime.io_binding()
        binding.bind_ortvalue_input("last", self.last_value)
        for name, table in self._tables.items():
            binding.bind_ortvalue_input(name, table)
        if self._padded:
            binding.bind_ortvalue_input("total", self.total_value)
        if self.spec.predictor:
            binding.bind_ortvalue_input("previous", self._previous_value)
            binding.bind_output("predicted")
        if buffers.recurrent is not None:
            binding.bind_ortvalue_input("control", self.control_value)
            for name, value in buffers.recurrent.values.items():
                binding.bind_ortvalue_input(name, value)
        for at, layer in enumerate(self.spec.attention_layers):
            for kind, value in (("key", buffers.values[2 * at]), ("value", buffers.values[2 * at + 1])):
                binding.bind_ortvalue_input(f"{kind}.{layer}", value)
                if self._returns_kv:
                    binding.bind_ortvalue_output(f"new_{kind}.{layer}", value)
        return SessionBinding(binding)

    def padding(self, rows: int) -> int:
        return max(MIN_ATTENTION_ROWS - rows, 0) if self.exact and self._padded else 0

    def run(
        self, bound: SessionBinding, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        """Run the graph once. The returned logits are valid until the next run."""
        count = len(tokens)
        if self._plan is not None:
            part = PlannedRun(count, start, rows, bound.binding, bound.capacity)
            return self._run_plan(self._plan, tokens, [part], rows, interrupt).array
        scratch, found = self._inputs_of(count), self._logits_of(rows)
        padding = self.padding(count)
        if bound.shape != (count, rows, padding):  # decoding binds once and then only updates values in place
            bound.shape = (count, rows, padding)
            binding = bound.binding
            binding.bind_ortvalue_input("input_ids", scratch.value)
            binding.bind_ortvalue_input("logit_rows", scratch.last_rows(rows))
            if self._padded:
                binding.bind_ortvalue_input("count", scratch.count)
                binding.bind_ortvalue_input("pad", self._pad_values[padding])
            binding.bind_ortvalue_output("logits", found[1])
            if self.spec.predictor:
                binding.bind_ortvalue_output("hidden", self._stream_of(count)[1])
        scratch.ids[0, :] = tokens
        self.last[0] = start + count + padding - 1
        self.total[0] = start + count + padding
        if interrupt is None:
            self._execute(bound.binding, None)
            return found[0].array
        try:
            self._execute(bound.binding, self._options(interrupt))
        except EngineError:
            if interrupt.is_set:
                raise Interrupted("stopped on request") from None
            raise
        return found[0].array

    def _run_plan(
        self,
        plan: StepPlan,
        tokens: Sequence[int],
        parts: Sequence[PlannedRun],
        rows: int,
        interrupt: Interrupt | None = None,
    ) -> LogitRows:
        scratch, logits = self._inputs_of(len(tokens)), self._logits_of(rows)[0]
        scratch.ids[0, :] = tokens
        stop = self._never if interrupt is None else self._options(interrupt)
        plan.run(scratch.address, parts, logits, stop)
        return logits

    def _inputs_of(self, count: int) -> _RunInputs:
        scratch = self._scratch.get(count)
        if scratch is None:
            scratch = self._scratch[count] = _RunInputs(count)
        return scratch

    def _logits_of(self, rows: int) -> tuple[LogitRows, ort.OrtValue]:
        found = self._logits.get(rows)
        if found is None:
            array = self._logits_memory[:rows]
            if rows > LOGIT_ROWS:
                array = np.empty((rows, self.spec.vocab_size), dtype=np.float32)
            found = self._logits[rows] = (LogitRows(array), ort.OrtValue.ortvalue_from_numpy(array))
        return found

    def ranked(self, rows: int) -> Sequence[RankedRow]:
        """Of the last run, which returned logits of `rows` rows. The same for the same logits, whatever the
        number of threads; empty without a plan."""
        return () if self._plan is None else self._logits[rows][0].ranked()

    def _stream_of(self, count: int) -> tuple[Float32, ort.OrtValue]:
        found = self._streams.get(count)
        if found is None:
            array = np.empty((1, count, self.spec.hidden), np.float32)
            found = self._streams[count] = (array, ort.OrtValue.ortvalue_from_numpy(array))
        return found

    def stream(self, count: int) -> Float32:
        """The stream of every row of the last run, which had `count`; valid until the next."""
        rows: Float32 = self._stream_of(count)[0][0]
        return rows

    def _options(self, interrupt: Interrupt) -> ort.RunOptions | StopFlag:
        """Run options that `interrupt` terminates, created once per interrupt."""
        if self._watched is None or self._watched[0] is not interrupt:
            self._unwatch()
            options = ort.RunOptions() if self._plan is None else StopFlag()

            def terminate() -> None:
                options.terminate = True

            interrupt.add_callback(terminate)
            self._watched = (interrupt, options, terminate)
        return self._watched[1]

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._watched[0].remove_callback(self._watched[2])
            self._watched = None

    def _execute(self, binding: ort.IOBinding, options: ort.RunOptions | None) -> None:
        assert self._runtime is not None
        try:
            self._runtime.run_with_iobinding(binding, options)
        except MemoryError:
            raise NotEnoughMemory("the system ran out of memory during a run; shorten the prompt") from None
        except Exception as error:
            raise EngineError(f"ONNX Runtime could not run the model: {_first_line(error)}") from error


class OnnxSession(HostSession):
    def __init__(self, engine: OnnxEngine, scope: str = "") -> None:
        spec = engine.spec
        borders = spec.eos if spec.delta is not None else ()
        super().__init__(engine.info.context_length, chunk=PREFILL_CHUNK, tail=TAIL, borders=borders)
        self._engine = engine
        self.scope = scope
        self.buffers: KvBuffers | None = None
        self._binding: SessionBinding | None = None
        self.streams: StreamTail[Float32] = StreamTail()  # that the predictor reads
        engine.live.add(self)

    def fork(self) -> OnnxSession:
        self._check_open()
        other = OnnxSession(self._engine, self.scope)
        if self.buffers is not None:
            other.buffers = self._engine.pool.share(self.buffers)
        self._copy_state_to(other)
        other.streams = self.streams.copy()
        return other

    def predict(self, predictor: MtpDrafter) -> Guess | None:
        """The predictor's draft; None without the stream before the last token, or if memory is short."""
        position = len(self._tokens) - 1
        stream = self.streams.before(position)
        most = min(MOST_TOKENS, self._context_length - len(self._tokens) - 1)
        if stream is None or self._resident != position or most < 1:
            return None
        try:
            self._ensure_buffers(position, len(self._tokens) + most)
        except NotEnoughMemory:
            return None
        assert self.buffers is not None
        keys, values = self.buffers.values[-2:]
        return predictor.draft((keys, values), self._tokens[position], position, stream, most)

    def _forward(
        self, tokens: Sequence[int], start: int, rows: int, interrupt: Interrupt | None
    ) -> np.ndarray:
        binding = self._bind(start, len(tokens))
        assert self.buffers is not None
        if self._engine.spec.predictor:
            stream = self.streams.before(start)
            self._engine.previous[0, 0] = 0 if stream is None else stream
        recurrent = self.buffers.recurrent
        if recurrent is None:
            logits = self._engine.run(binding, tokens, start, rows, interrupt)
            self._keep_stream(start, len(tokens), rows)
            return logits
        drafted = max(rows - 1, 0)
        # Not interrupted: a state that is half computed would have to be read again from a snapshot.
        self._engine.control[:3] = recurrent.prepare(start, len(tokens), drafted)
        logits = self._engine.run(binding, tokens, start, rows, None)
        recurrent.finish()
        self._keep_stream(start, len(tokens), rows)
        at = self._snapshot_position(start, tokens, drafted, recurrent.newest_snapshot())
        if at is not None:
            recurrent.keep(at, self._engine.snapshots)
        return logits

    def _bind(self, start: int, count: int) -> SessionBinding:
        """The binding for a run of `count` tokens from `start` on."""
        self._ensure_buffers(start, start + count + self._engine.padding(count))
        if self._binding is None:
            assert self.buffers is not None
            self._binding = self._engine.binding(self.buffers)
        return self._binding

    def begin_run(self, step: PreparedStep) -> PlannedRun:
        """This session's part of a run of several. Until `end_run`, its KV behind `resident` is undefined."""
        start, count = self._resident, len(step.tokens)
        del self._held[start:]
        bound = self._bind(start, count)
        return PlannedRun(count, start, step.rows, bound.binding, bound.capacity)

    def end_run(self, step: PreparedStep) -> None:
        self._held.extend(step.tokens)

    def _ranked(self, rows: int) -> Sequence[RankedRow]:
        return self._engine.ranked(rows)

    def warm(self, interrupt: Interrupt | None = None) -> None:
        if self.length < self._engine.info.context_length:
            self.step(interrupt=interrupt)

    def _known_row(self) -> tuple[Float32, RankedRow] | None:
        if len(self._tokens) - self._resident > WORTH_COPYING:  # they have to be computed anyway
            return None
        return self._engine.known.get((self.scope, tuple(self._tokens)))

    def _keep_row(self, logits: Float32, ranked: RankedRow) -> None:
        if self._engine.exact:
            known = self._engine.known
            known[self.scope, tuple(self._tokens)] = logits.copy(), ranked
            if len(known) > KNOWN_ROWS:
                del known[next(iter(known))]

    def _keep_stream(self, start: int, count: int, rows: int) -> None:
        """Keep the stream of rows after which the next run may start: those of a draft, a few before."""
        if self._engine.spec.predictor:
            newest = self._engine.stream(count)[-rows - KEPT_STREAM :].copy()
            self.streams.replace(start, start + count, list(newest))

    def _resume(self, length: int) -> int:
        return length if self.buffers is None else self.buffers.reach(length)

    def _ensure_buffers(self, keep: int, length: int) -> None:
        """Make the buffers exclusive to this session and large enough, keeping the first `keep` tokens."""
        pool, held = self._engine.pool, self.buffers
        if held is not None and held.owners == 1 and held.capacity >= length:
            return
        self._binding = None  # it refers to the old memory
        if held is None:
            self.buffers = pool.allocate(length)
        elif held.owners == 1:
            pool.grow(held, keep, length)
        else:
            self.buffers = pool.copy(held, keep, length)
            pool.release(held)

    def _adopt(self, tokens: Sequence[int], own: int) -> int:
        engine = self._engine
        entry, shared = engine.cache.find(tokens, self.scope)
        if engine.disk_prefixes is not None and len(tokens) > max(own, shared) + WORTH_COPYING:
            engine.load_prefix(tokens, self.scope, max(own, shared))
            entry, shared = engine.cache.find(tokens, self.scope)
        donor: OnnxSession | None = None
        for other in engine.live:
            if other is self or other.scope != self.scope:
                continue
            if (length := common_prefix(other._held, tokens)) > shared:
                donor, shared = other, length
        own = self._resume(own)
        source = donor.buffers if donor is not None else entry.payload if entry is not None else None
        shared = source.reach(shared) if source is not None else shared
        if shared < own + WORTH_COPYING:
            return own
        if donor is None and entry is not None and self._should_adopt(entry, shared):
            buffers = engine.cache.remove(entry)
        else:
            lender = donor.buffers if donor is not None else entry.payload if entry is not None else None
            assert lender is not None
            try:  # copied now, so that the lending session does not have to copy later
                buffers = engine.pool.copy(lender, shared, len(tokens) + MIN_ATTENTION_ROWS)
            except NotEnoughMemory:
                return own
        self._drop_buffers()
        self.buffers = buffers
        self.streams.clear()
        self._held = list(tokens[:shared])
        return shared

    def _should_adopt(self, entry: CachedPrefix[KvBuffers], shared: int) -> bool:
        """Whether to adopt a prefix's memory instead of copying it. Its tokens beyond `shared` are lost then:
        fine after a keystroke, but not for another conversation with the same beginning."""
        lost = len(entry.tokens) - shared
        if lost >= WORTH_SPARING and self._engine.has_room_to_copy(entry.payload):
            return False
        return 2 * shared >= len(entry.tokens)

    def _release(self) -> None:
        self._engine.live.discard(self)
        self._drop_buffers()
        self._engine.release_memory()

    def _drop_buffers(self) -> None:
        """Move the buffers to the cache if they are worth keeping, else release them."""
        buffers, self.buffers, self._binding = self.buffers, None, None
        if buffers is None:
            return
        if buffers.owners == 1 and len(self._held) >= WORTH_COPYING:
            self._engine.cache.put(self._held, buffers, buffers.nbytes, self.scope)
            self._held = []
        else:
            self._engine.pool.release(buffers)


class SessionBinding:
    """A session's runtime binding and the shape that it was last bound for; or, with a plan, the addresses of
    its keys and values and for how many tokens they have room."""

    __slots__ = ("binding", "capacity", "shape")

    def __init__(self, binding: Any, capacity: int = 0) -> None:
        self.binding = binding
        self.capacity = capacity
        self.shape: tuple[int, int, int] | None = None


class _RunInputs:
    """The input tensors of runs with one number of rows, reused in place."""

    __slots__ = ("_asked", "address", "count", "ids", "value")

    def __init__(self, count: int) -> None:
        self.ids = np.zeros((1, count), dtype=np.int64)
        self.address = int(self.ids.ctypes.data)
        self.value = ort.OrtValue.ortvalue_from_numpy(self.ids)
        self.count = ort.OrtValue.ortvalue_from_numpy(np.array([count], dtype=np.int64))
        self._asked: dict[int, ort.OrtValue] = {}

    def last_rows(self, rows: int) -> ort.OrtValue:
        """The indices of the last `rows` rows."""
        value = self._asked.get(rows)
        if value is None:
            count = self.ids.shape[1]
            indices = np.arange(count - rows, count, dtype=np.int64)
            value = self._asked[rows] = ort.OrtValue.ortvalue_from_numpy(indices)
        return value


def _group_steps(
    steps: Sequence[tuple[OnnxSession, PreparedStep]],
) -> Iterator[list[tuple[OnnxSession, PreparedStep]]]:
    """The steps in their order, divided so that the logits of each group have room."""
    group: list[tuple[OnnxSession, PreparedStep]] = []
    rows = 0
    for session, step in steps:
        if group and rows + step.rows > LOGIT_ROWS:
            yield group
            group, rows = [], 0
        group.append((session, step))
        rows += step.rows
    yield group


def _adapter_inputs(adapter: AdapterFile) -> dict[str, np.ndarray]:
    """An adapter's matrices, transposed, by the names of the graph's inputs."""
    found: dict[str, np.ndarray] = {}
    for (layer, product), (down, up) in adapter.pairs.items():
        found[f"adapter.{layer}.{product}.down"] = np.ascontiguousarray(down.T)
        found[f"adapter.{layer}.{product}.up"] = np.ascontiguousarray(up.T)
    return found


def _open_session(model: Path, threads: int, stored: NativeWeights | None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Threads may spin inside a run but not between runs, so that an idle engine uses no CPU. With few cores
    # they spin only as long as waking a thread would take: the editor needs the processor too.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if usable_cores() <= FEW_CORES:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(BRIEF_SPIN_US))
    try:
        if stored is not None:
            options.register_custom_ops_library(str(stored.library))
        return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelDamaged(
            f"ONNX Runtime could not open the converted model {model}: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
