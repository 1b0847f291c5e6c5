"""How a model is divided among thread blocks: sizes, splits and the layout of shared memory.

Pure arithmetic on a spec, which must agree with kernels/layout.cuh. Refuses models that the kernel cannot
run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from keystroke.engine.checkpoint.spec import DeltaSpec, ExpertsSpec, ModelSpec
from keystroke.engine.cuda.target import HOPPER, Target
from keystroke.errors import UnsupportedModel

Precision = Literal["bf16", "int8", "int4", "stored"]
KvPrecision = Literal["bf16", "int8"]
# What a kernel is compiled for: any rows; or a single row, with at most NEAR keys or any number.
StepShape = Literal["any", "near", "far"]

# Formats of packed blocks. From FOUR on they hold GGUF weights unchanged: codes of so many bits, and for each
# group of columns a scale and in some formats an offset. FLOAT_FOUR is MXFP4: 4-bit floats, powers of two.
# FOUR_K has the weights of FOUR in fewer bytes, for Q4_K only.
BF16, INT8, INT4, FOUR, SIX, SIX_OFFSET, EIGHT, EIGHT_OFFSET, FLOAT_FOUR, FOUR_K = range(10)
BLOCK_K = (32, 32, 64, 64, 64, 64, 64, 64, 64, 64)  # inner dimension of one packed block, by format
BLOCK_BYTES = (1024, 512, 576, 640, 896, 1024, 1152, 1280, 544, 592)
CODE_BITS = {FOUR: 4, SIX: 6, SIX_OFFSET: 6, EIGHT: 8, EIGHT_OFFSET: 8, FLOAT_FOUR: 4, FOUR_K: 4}
GROUP_K = {FOUR: 32, SIX: 16, SIX_OFFSET: 16, EIGHT: 16, EIGHT_OFFSET: 16, FLOAT_FOUR: 32, FOUR_K: 32}
WITH_OFFSETS = frozenset({FOUR, SIX_OFFSET, EIGHT_OFFSET, FOUR_K})
STEP_K = 256  # columns that share the two numbers of FOUR_K: an inner dimension is a multiple
TAIL_BYTES = 128  # every unit ends with 16 scales and 16 biases
MAX_ROWS = 32
MAX_BATCH = 16  # sequences of a step
PAGE = 64
CHUNK = 256
NEAR = 2048  # keys before this position form chunks of one page
CHOSEN_CHUNKS = 32  # per row of sparse attention
PAD = 32
_LARGEST_STAGE = 32_768 + TAIL_BYTES  # of the ring; larger stages leave too few
_SMALL_STAGE = 16_384  # smaller stages cost more in synchronisation than they save
MIN_STAGES = 3  # 2 if no page of keys passes through the ring
_ENOUGH_STAGES = 4
_LARGE_LAYER = 1_500_000  # bytes per block from which a layer is bound by bandwidth
_SMALL_LAYER = 262_144  # bytes per block up to which synchronisation dominates, so tagged values pay
WARPS = 8  # compute warps of a block
THREADS = 288  # of a block: those warps and one that streams; early scores have a warp of their own
CONTROL_WORDS = 7 + 16 * MAX_ROWS
FILTER_BINS = (6, 1024)  # top-k and top-p: three passes each, ten bits of a key per pass
_SELECTION_BYTES = 4_096
_SHARES_BYTES = 2 * 16 * 48  # attention work assigned to a block
_LONGEST_INNER = 3_712  # of a split unit: 16 rows of it leave room for the ring
_NARROW = 512
_BUCKETS = (1, 2, 4, 8, 16, 32)
EARLY_SCORES = 8  # that a block computes at a time
EARLY_COLUMNS = 32  # of the matrices that give them, in one piece
_EARLY_WARPS = 3  # at most, of a block
_EARLY_FEW = 2  # rows that every block normalises for itself
LOGGED_ROWS = 8  # of one sequence of a hybrid model in a step: as many as the next step may have to repeat


@dataclass(frozen=True)
class Matrix:
    """A packed weight matrix: `units` of 16 output rows over `inner` columns."""

    tiles: int
    split: int
    inner: int
    format: int

    @property
    def units(self) -> int:
        return self.tiles * self.split

    @property
    def blocks(self) -> int:
        return self.inner // BLOCK_K[self.format]

    @property
    def unit_bytes(self) -> int:
        return self.blocks * BLOCK_BYTES[self.format] + TAIL_BYTES

    @property
    def bytes(self) -> int:
        return self.units * self.unit_bytes


@dataclass(frozen=True)
class Formats:
    """The packed format of each matrix. The down projection may have a wider format in some layers, as files
    often have."""

    query_key: int
    value: int
    output: int
    gate_up: int
    down: int
    head: int
    wide: int  # of the down projection in `wide_layers`
    wide_layers: frozenset[int] = frozenset()
    delta_in: int | None = None  # of gated delta nets
    delta_out: int | None = None
    shared_gate_up: int | None = None  # of a shared expert; None: as the other experts
    shared_down: int | None = None
    all_q4_k: frozenset[str] = frozenset()  # of gate_up and down, those with nothing but Q4_K in format FOUR

    def compacted(self) -> Formats:
        """The same weights in fewer bytes: FOUR_K for the matrices that it holds."""
        gate_up = FOUR_K if "gate_up" in self.all_q4_k else self.gate_up
        down = FOUR_K if "down" in self.all_q4_k else self.down
        wide = down if self.wide == self.down else self.wide
        return replace(self, gate_up=gate_up, down=down, wide=wide)

    @property
    def largest(self) -> int:
        """Bytes of the largest block."""
        used = (self.query_key, self.value, self.output, self.gate_up, self.down, self.head, self.wide)
        others = (self.delta_in, self.delta_out, self.shared_gate_up, self.shared_down)
        return max(BLOCK_BYTES[each] for each in (*used, *others) if each is not None)


# The output head keeps at least 8 bits unless the file stores fewer.
FORMATS: dict[Precision, Formats] = {
    "bf16": Formats(BF16, BF16, BF16, BF16, BF16, BF16, BF16, delta_in=BF16, delta_out=BF16),
    "int8": Formats(INT8, INT8, INT8, INT8, INT8, INT8, INT8, delta_in=INT8, delta_out=INT8),
    "int4": Formats(INT4, INT4, INT4, INT4, INT4, INT8, INT4, delta_in=INT4, delta_out=INT4),
}
MAX_MARKED_LAYERS = 128  # layers of a model with two formats of the down projection, or with windows


@dataclass(frozen=True)
class Bucket:
    """One size of step: its rows, and how shared memory is divided for them."""

    rows: int
    tiles_n: int
    x_stride: int
    ring_offset: int
    stages: int


@dataclass(frozen=True)
class EarlyScores:
    """How blocks share the scores of experts that are computed before attention's output is in the residual
    stream (kernels/early_scores.cuh): each has a part of the columns, each of its warps at most one group of
    scores."""

    groups: int
    before: int  # columns of the row before attention in one part
    behind: int  # columns of what attention gives in one part, at most
    blocks: int  # that share a part's groups
    warps: int  # of each of them


@dataclass(frozen=True)
class Plan:
    spec: ModelSpec
    precision: Precision
    blocks: int  # multiprocessors, one block each
    kv_precision: KvPrecision = "bf16"
    stored: Formats | None = None  # only for precision "stored"
    target: Target = HOPPER
    resident: int | None = (
        None  # experts of each layer in GPU memory; None: all. The host computes the others
    )

    def __post_init__(self) -> None:
        spec = self.spec
        if (self.precision == "stored") != (self.stored is not None):
            raise UnsupportedModel(f"{spec.name} has no matrices that can be kept as stored; choose bf16")
        if self.formats.wide_layers and spec.layers > MAX_MARKED_LAYERS:
            raise UnsupportedModel(f"{spec.name} has more layers than stored weights may have; choose int8")
        if spec.windowed and spec.layers > MAX_MARKED_LAYERS:
            raise UnsupportedModel(
                f"{spec.name} has {spec.layers} layers, but the CUDA engine runs sliding windows in at most "
                f"{MAX_MARKED_LAYERS}; use the CPU engine for this model"
            )
        sizes = {
            "hidden size": spec.hidden,
            "intermediate size": spec.experts.width if spec.experts else spec.intermediate,
            "attention width": spec.heads * spec.head_dim,
        }
        wrong = [name for name, size in sizes.items() if size % 64]
        if spec.experts is not None and (spec.experts.count % 32 or spec.layers < 2):
            wrong.append("number of experts")
        plain = replace(
            spec, experts=None, windowed=frozenset(), sinks=False, gated_attention=False, rotary=0, delta=None
        )
        strange = plain.unsupported_feature()
        if strange is None and spec.delta is not None:
            wrong += self._uncut_delta(spec.delta)
            if spec.windowed or spec.sinks or self.kv_precision == "int8":
                strange = "linear attention beside windows, sinks or 8-bit keys"
        if strange is None and spec.experts is not None and not _runs(spec.experts):
            strange = "layers without experts, shared experts of another size or another router"
        if strange is not None:
            raise UnsupportedModel(
                f"the CUDA engine does not run {strange}, which {spec.name} has; use the CPU engine for "
                "this model"
            )
        if spec.head_dim not in (64, 128, 256):
            wrong.append("head size")
        if wrong:
            raise UnsupportedModel(
                f"the CUDA engine cannot cut the {wrong[0]} of {spec.name} into tiles (heads of 64, 128 or "
                "256, sizes in multiples of 64); use the CPU engine for this model"
            )

    def _uncut_delta(self, delta: DeltaSpec) -> list[str]:
        uneven = delta.key_size % 32 or delta.value_size % 32 or delta.values % 64
        far = self.spec.layers > MAX_MARKED_LAYERS
        return ["linear attention"] if uneven or delta.keys % 16 or far else []

    @property
    def formats(self) -> Formats:
        return self.stored or FORMATS[self.precision]

    @property
    def format(self) -> int:
        """The format of most weights."""
        return self.formats.gate_up

    @cached_property
    def query_key(self) -> Matrix:
        spec = self.spec
        rows = (spec.heads + spec.kv_heads + self.gate_heads) * spec.head_dim
        return Matrix(rows // 16, 1, spec.hidden, self.formats.query_key)

    @property
    def gate_heads(self) -> int:
        """Gates of attention's output, which lie behind the keys in `query_key`."""
        return self.spec.heads if self.spec.gated_attention else 0

    @cached_property
    def value(self) -> Matrix:
        spec = self.spec
        return Matrix(spec.kv_heads * spec.head_dim // 16, 1, spec.hidden, self.formats.value)

    @cached_property
    def output(self) -> Matrix:
        return self._output_of(self._head_split())

    @cached_property
    def delta_in(self) -> Matrix:
        """Queries, keys and values of a gated delta net before its convolution, then its gates."""
        delta, kind = self.spec.delta, self.formats.delta_in
        assert delta is not None
        assert kind is not None
        return Matrix((delta.channels + delta.values) // 16, 1, self.spec.hidden, kind)

    @cached_property
    def delta_out(self) -> Matrix:
        delta, kind = self.spec.delta, self.formats.delta_out
        assert delta is not None
        assert kind is not None
        split = self.output.split
        return Matrix(self.spec.hidden // 16, split, delta.values // split, kind)

    def is_delta(self, layer: int) -> bool:
        return self.spec.delta is not None and layer in self.spec.delta.layers

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return len(self.spec.attention_layers)

    @property
    def log_rows(self) -> int:
        """Rows of a log of inputs: those of two steps, and those that the convolution looks back to."""
        return 0 if self.spec.delta is None else 2 * LOGGED_ROWS + self.spec.delta.kernel - 1

    @property
    def state_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of one sequence's recurrent state and of its log."""
        delta = self.spec.delta
        if delta is None:
            return (0,), (0,)
        layers, width = len(delta.layers), delta.channels + 2 * delta.value_heads
        state = (layers, delta.value_heads, delta.key_size, delta.value_size)
        return state, (layers, self.log_rows, width)

    def state_bytes(self, slots: int) -> int:
        """Bytes of the recurrent states and logs of so many sequences."""
        state, log = self.state_sizes
        return 4 * ((slots + second_states(slots)) * math.prod(state) + slots * math.prod(log))

    @property
    def inner_width(self) -> int:
        """Activations of one row before the down projection, of all experts that it uses."""
        experts = self.spec.experts
        return used_experts(experts) * experts.width if experts else self.spec.intermediate

    @property
    def expert_slots(self) -> int:
        """Experts of a layer in GPU memory; a shared one is the last, if it has no matrices of its own."""
        experts = self.spec.experts
        assert experts is not None
        count = experts.count if self.resident is None else self.resident
        return count + (experts.shared > 0 and not self.shared_apart)

    @cached_property
    def shared_apart(self) -> tuple[Matrix, ...]:
        """The gate and up and the down matrix of a shared expert whose formats are not those of the
        others."""
        experts, formats = self.spec.experts, self.formats
        if experts is None or formats.shared_gate_up is None or formats.shared_down is None:
            return ()
        gate_up = Matrix(experts.shared // 8, 1, self.spec.hidden, formats.shared_gate_up)
        return gate_up, Matrix(self.spec.hidden // 16, 1, experts.shared, formats.shared_down)

    @cached_property
    def gate_up(self) -> Matrix:
        """Of a mixture: the matrices of its experts, concatenated; the down projection likewise."""
        experts = self.spec.experts
        width = self.expert_slots * experts.width if experts else self.spec.intermediate
        return Matrix(width // 8, 1, self.spec.hidden, self.formats.gate_up)

    @cached_property
    def down(self) -> Matrix:
        if (experts := self.spec.experts) is not None:
            tiles = self.expert_slots * self.spec.hidden // 16
            return Matrix(tiles, 1, experts.width, self.formats.down)
        split = self._split(self.spec.intermediate, 64)
        return Matrix(self.spec.hidden // 16, split, self.spec.intermediate // split, self.formats.down)

    @cached_property
    def head(self) -> Matrix:
        return Matrix((self.spec.vocab_size + 15) // 16, 1, self.spec.hidden, self.formats.head)

    def layer(self, index: int) -> dict[str, Matrix]:
        """The matrices of a layer, in memory order."""
        wide = index in self.formats.wide_layers
        mixer = {"query_key": self.query_key, "value": self.value, "output": self.output}
        if self.is_delta(index):
            mixer = {"delta_in": self.delta_in, "delta_out": self.delta_out}
        down = replace(self.down, format=self.formats.wide) if wide else self.down
        if not self.shared_apart:
            return {**mixer, "gate_up": self.gate_up, "down": down}
        shared_gate_up, shared_down = self.shared_apart
        return {
            **mixer,
            "gate_up": self.gate_up,
            "shared_gate_up": shared_gate_up,
            "down": down,
            "shared_down": shared_down,
        }

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Those of a layer of each kind."""
        delta = () if self.spec.delta is None else (self.delta_in, self.delta_out)
        return self.query_key, self.value, self.output, self.gate_up, self.down, *self.shared_apart, *delta

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """The offset of each packed layer, and the end of the last."""
        sizes = (sum(m.bytes for m in self.layer(i).values()) for i in range(self.spec.layers))
        return tuple(itertools.accumulate(sizes, initial=0))

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer that one row reads, on average."""
        return (self.streamed_bytes - self.head.bytes) // self.spec.layers

    def stage_bytes(self, tiles_n: int, shape: StepShape = "any") -> int:
        """Size of a stage of the ring: a whole unit of the largest matrix, or the largest even part of it of
        which four fit beside 16 rows, and at least a page of keys. Beyond eight rows, the part that leaves
        the least memory unused. The kernel's sums do not depend on it."""
        if shape == "near" and self._near_stage is not None:
            return self._near_stage[0]
        return max(
            self._small_stage(tiles_n) if self._small_shared_memory else self._stage(tiles_n),
            self._least_stage,
        )

    def stages(self, bucket: Bucket, shape: StepShape) -> int:
        """Stages of the ring in the kernel of this shape."""
        if shape != "near" or self._near_stage is None:
            return bucket.stages
        return min(16, self._room(bucket.rows) // self._near_stage[0])

    @cached_property
    def _near_stage(self) -> tuple[int, int] | None:
        """A stage of its own for a single row near the beginning, and what its number of blocks is a multiple
        of; None if it is that of other kernels. A page of large heads takes more than a unit of other
        matrices, which would leave much of the ring unused; near keys need not pass through it."""
        if self.spec.head_dim <= 128 or self.format < INT4 or self._small_shared_memory:
            return None
        matrix, block = self.gate_up, BLOCK_BYTES[self.formats.gate_up]
        for count in range(1, matrix.blocks // WARPS + 1):
            part = -(-matrix.blocks // count // WARPS) * WARPS
            size = _round_up(part * block + TAIL_BYTES)
            if self._least_stage <= size <= self._room(1) // _ENOUGH_STAGES:
                grain = 2 * WARPS if part % (2 * WARPS) == 0 else WARPS
                return size, grain
        return None

    @property
    def _grain(self) -> int:
        """A part of a unit has a multiple of so many blocks, the same number for every warp."""
        return WARPS * (1 if self.format < INT4 or self._small_shared_memory else 2)

    @cached_property
    def _least_stage(self) -> int:
        """The smallest stage: holds a unit of every matrix, or a part of one for every warp."""
        wide = replace(self.down, format=self.formats.wide)
        parts = [
            min(matrix.unit_bytes, self._grain * BLOCK_BYTES[matrix.format] + TAIL_BYTES)
            for matrix in (*self.matrices, wide, self.head)
        ]
        if self.spec.delta is not None:
            parts.append(4 * self.spec.hidden)
        if self.spec.experts is not None:
            parts.append(4 * self.spec.hidden)
            # A warp multiplies whole units of an expert's down projection, if they are short; longer ones
            # are whole where there is room.
            whole = (self.down, wide, *self.shared_apart[1:])
            room = not self._small_shared_memory
            parts += [each.unit_bytes for each in whole if each.blocks < 3 * WARPS or room]
        return _round_up(max(parts))

    def _stage(self, tiles_n: int) -> int:
        matrix, block = self.gate_up, BLOCK_BYTES[self.format]
        page, turns = self._page_bytes, self._grain
        grain = turns * block
        grains = -(-matrix.blocks * block // grain)
        whole = _round_up(matrix.unit_bytes)
        if self.stored is not None:  # other matrices may have larger blocks
            page = max(page, turns * self.formats.largest + TAIL_BYTES)
        if self.format >= INT4 and tiles_n == 1 and whole <= self._largest_whole():
            return max(whole, page)
        room = self.target.shared_bytes - self.operand_offset(16) - 16 * self._stride(16) * 2
        parts = [-(-grains // chunks) * grain + TAIL_BYTES for chunks in range(1, grains + 1)]
        sizes = [max(_round_up(min(part, matrix.unit_bytes)), page) for part in parts]
        fit = [size for size in sizes if size <= _LARGEST_STAGE and size * _ENOUGH_STAGES <= room]
        if not fit:
            return max(_round_up(grain + TAIL_BYTES), page)
        if tiles_n == 1:
            return fit[0]
        large = [size for size in fit if size >= _SMALL_STAGE] or fit
        return max(large, key=lambda size: (room // size * size, size))

    def _small_stage(self, tiles_n: int) -> int:
        """The stage where shared memory is smaller than Hopper's: the largest even part of a unit of which
        four fit beside the most rows that leave room for a ring. If it is less than a page of keys, keys do
        not pass through the ring; half a page always fits."""
        grain = self._grain * BLOCK_BYTES[self.format]
        grains = -(-self.gate_up.blocks // self._grain)
        least = max(self._least_stage, _round_up(PAGE * self.spec.head_dim + TAIL_BYTES))
        rooms = [self._room(rows) for rows in _BUCKETS if _tiles(rows) <= tiles_n]
        room = min((each for each in rooms if each >= self._min_stages(least) * least), default=0)
        parts = [-(-grains // chunks) * grain + TAIL_BYTES for chunks in range(1, grains + 1)]
        sizes = [_round_up(min(part, self.gate_up.unit_bytes)) for part in parts]
        fit = [n for n in sizes if least <= n <= _LARGEST_STAGE and n * _ENOUGH_STAGES <= room]
        return max(fit, default=least)

    @property
    def _page_bytes(self) -> int:
        """A stage for one page of 16-bit keys, or two of bytes."""
        return PAGE * self.spec.head_dim * 2 + TAIL_BYTES

    def _min_stages(self, stage: int) -> int:
        """The fewest stages of this size that a ring needs."""
        holds_pages = stage >= PAGE * self.spec.head_dim * 2
        return MIN_STAGES if holds_pages else 2

    def _room(self, rows: int) -> int:
        """Bytes left for the ring beside so many rows."""
        offset = _round_up(self.operand_offset(rows) + rows * self._stride(rows) * 2)
        return max(self.target.shared_bytes - offset, 0)

    def _largest_whole(self) -> int:
        """The largest unit that a stage holds whole. For stored formats, whose partial units are expensive,
        as large as leaves the fewest stages beside eight rows."""
        if self.stored is None:
            return _LARGEST_STAGE
        return (self.target.shared_bytes - self.operand_offset(8) - 8 * self._stride(8) * 2) // MIN_STAGES

    def lent_stages(self, tiles_n: int) -> int:
        """Stages of the ring that sparse attention uses for pages: half a page for every warp, if there is
        room. More would delay weights."""
        each = self.stage_bytes(tiles_n) // (PAGE * self.spec.head_dim * self.kv_bytes // 2)
        fewest = min(bucket.stages for bucket in self.buckets if bucket.tiles_n == tiles_n)
        return min(-(-WARPS // each), fewest)

    @property
    def ring_fits_sparse(self) -> bool:
        """Whether the ring has room for a page of keys and one of values, as sparse attention needs."""
        half = PAGE * self.spec.head_dim * self.kv_bytes // 2
        return all(
            self.lent_stages(tiles) * (self.stage_bytes(tiles) // half) >= 4
            for tiles in {bucket.tiles_n for bucket in self.buckets}
        )

    def value_parts(self, tiles_n: int) -> int:
        """Blocks that share a chosen chunk, each with part of the values: two for few rows, if every block
        then has at most one part of a row's chunks."""
        few = tiles_n == 1 and 2 * self.spec.kv_heads * CHOSEN_CHUNKS <= self.blocks
        return 2 if few and self.spec.head_dim == 128 else 1

    @property
    def in_flight(self) -> int:
        """Bytes that a block keeps in flight: more for bandwidth in large layers, fewer for latency in
        small."""
        if self.spec.experts is not None:
            return max(61_824, 2 * self.stage_bytes(1))
        if self.layer_bytes > _LARGE_LAYER * self.blocks:
            return 66_048
        return max(49_536, (2 if self.stored is None else 3) * self.stage_bytes(1))

    @property
    def streamed_bytes(self) -> int:
        """Weight bytes that a step of one row reads on the GPU, and those of recurrent states."""
        whole = self.packed_bytes
        if (delta := self.spec.delta) is not None:
            heads = 2 * delta.value_heads * self.spec.hidden
            whole += 4 * (len(delta.layers) * heads + 2 * math.prod(self.state_sizes[0]))
        if (experts := self.spec.experts) is None:
            return whole
        layers = range(self.spec.layers)
        matrices = sum(self.layer(index)[name].bytes for index in layers for name in ("gate_up", "down"))
        routers = self.spec.layers * all_experts(experts) * self.spec.hidden * 4
        if self.early_scores is not None:
            routers = self.early_bytes
        slots = self.expert_slots
        unread = slots * (experts.count - experts.top) // experts.count  # of experts used equally often
        if self.resident is None:
            unread = experts.count - experts.top
        return whole + routers - (matrices * unread // slots if slots else 0)

    @property
    def packed_bytes(self) -> int:
        return self.layer_offsets[-1] + self.head.bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of one number of a key or value."""
        return 1 if self.kv_precision == "int8" else 2

    @property
    def kv_bytes_per_token(self) -> int:
        return self.attention_layers * self.spec.kv_heads * self.spec.head_dim * 2 * self.kv_bytes

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        found = []
        for rows in _BUCKETS:
            bucket = self._bucket(rows)
            if bucket.stages < self._min_stages(self.stage_bytes(bucket.tiles_n)):
                break
            found.append(bucket)
        if not found:
            raise UnsupportedModel(
                f"one row of {self.spec.name} does not fit beside its weights in a multiprocessor's memory; "
                "use a smaller model"
            )
        return tuple(found)

    @property
    def max_rows(self) -> int:
        return self.buckets[-1].rows

    def bucket(self, rows: int) -> Bucket:
        return next(bucket for bucket in self.buckets if bucket.rows >= rows)

    def shape(self, rows: int, reach: int) -> StepShape:
        """Which kernel computes `rows` rows of which none is at a later position than `reach`. Kernels for a
        single row have fewer instructions, which gains nothing with 16-bit weights: memory limits those."""
        if rows > 1 or self.format == BF16:
            return "any"
        return "near" if reach < NEAR else "far"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS + (0 if self.early_scores is None else 32 * self.early_scores.warps)

    @cached_property
    def early_scores(self) -> EarlyScores | None:
        """How experts are scored early; None if they are not. Router biases need the norm first, the host
        needs the normalised rows, and more warps would leave fewer registers."""
        spec, experts, split = self.spec, self.spec.experts, self.output.split
        if experts is None or experts.router_bias or experts.bias or self.resident is not None:
            return None
        before, behind = spec.hidden // split, self._mixed_width // split
        if self.formats.query_key == BF16 or spec.hidden % (split * EARLY_COLUMNS) or behind % EARLY_COLUMNS:
            return None
        groups = -(-all_experts(experts) // EARLY_SCORES)
        blocks = min(*self._sharers(whole=True), *self._sharers(whole=False))
        if groups > blocks * _EARLY_WARPS:
            return None
        return EarlyScores(groups, before, behind, blocks, -(-groups // blocks))

    def _sharers(self, *, whole: bool) -> list[int]:
        """Of how many blocks each part of the O projection is the first that they have; `whole`: where
        shares do not cross parts, as in some of the kernels."""
        units, tiles, blocks = self.output.units, self.output.tiles, self.blocks
        together = WARPS if self._multiplied_alone(self.output) else 1
        each = _whole_share(units, tiles, together, blocks) if whole else 0
        found = [0] * self.output.split
        for block in range(blocks):
            low = block * each if each else block * units // blocks
            high = low + each if each else (block + 1) * units // blocks
            if low < min(high, units):
                found[low // tiles] += 1
        return found

    @property
    def early_bytes(self) -> int:
        """Bytes of the matrices that give early scores."""
        early = self.early_scores
        if early is None:
            return 0
        return (
            2
            * self.spec.layers
            * early.groups
            * EARLY_SCORES
            * (early.before + early.behind)
            * self.output.split
        )

    def macros(self, tiles_n: int, sparse: bool = False, shape: StepShape = "any") -> dict[str, str]:
        spec = self.spec
        formats = self.formats
        wide = sum(1 << layer for layer in formats.wide_layers)
        macros: dict[str, object] = {
            "HIDDEN": spec.hidden,
            "HEADS": spec.heads,
            "KV_HEADS": spec.kv_heads,
            "HEAD_DIM": spec.head_dim,
            "INTERMEDIATE": self.inner_width,
            "VOCAB": spec.vocab_size,
            "LAYERS": spec.layers,
            "TILES_N": tiles_n,
            "STAGE_BYTES": self.stage_bytes(tiles_n, shape),
            "SMALL_GRAIN": int(self._small_shared_memory or self._grain_of(shape) == WARPS),
            "FORMAT": formats.query_key,
            "VALUE_FORMAT": formats.value,
            "OUTPUT_FORMAT": formats.output,
            "GATE_UP_FORMAT": formats.gate_up,
            "DOWN_FORMAT": formats.down,
            "WIDE_FORMAT": formats.wide,
            "WIDE_LOW": f"{wide % (1 << 64)}ULL",
            "WIDE_HIGH": f"{wide >> 64}ULL",
            "HEAD_FORMAT": formats.head,
            "O_SPLIT": self.output.split,
            "O_ALONE": int(self._multiplied_alone(self.output)),
            "DOWN_SPLIT": used_experts(spec.experts) if spec.experts else self.down.split,
            "ACTIVATION_TAGS": int(self._tags_activations(shape)),
            "QUERY_TAGS": int(self._sends_queries(shape) and not sparse),
            "QK_NORM": int(spec.qk_norm),
            "NORM_EPS": f"{spec.norm_eps!r}f",
            "KV_BYTES": self.kv_bytes,
            "SPARSE": int(sparse),  # a separate kernel, as it needs more registers
            "LENT": self.lent_stages(tiles_n) if sparse else 0,
            "VALUE_PARTS": self.value_parts(tiles_n) if sparse else 1,
        }
        if (early := self.early_scores) is not None:
            macros |= {"EARLY": 1, "EARLY_WARPS": early.warps, "EARLY_BLOCKS": early.blocks}
            macros["BLOCK_THREADS"] = self.threads
        if shape != "any":
            whole = self.bucket(1).x_stride >= self.inner_width + PAD
            macros |= {"SINGLE": 1 + (shape == "far"), "WHOLE": int(whole)}
        if spec.windowed or spec.sinks:
            windowed = sum(1 << layer for layer in spec.windowed)
            macros |= {
                "WINDOW": spec.window if spec.windowed else 0,
                "WINDOWED_LOW": f"{windowed % (1 << 64)}ULL",
                "WINDOWED_HIGH": f"{windowed >> 64}ULL",
                "WINDOW_ROPE": self._rotary_tables - 1,
                "SINKS": int(spec.sinks),
            }
        if (experts := spec.experts) is not None:
            macros |= {
                "EXPERTS": experts.count,
                "TOP_EXPERTS": experts.top,
                "EXPERT_WIDTH": experts.width,
                "EXPERT_SCALE": "1.0f",
                "EXPERT_SOFTMAX_OF_ALL": int(not experts.normalised),
                "EXPERT_BIAS": int(experts.bias or experts.router_bias),
                "EXPERT_LIMIT": f"{experts.limit!r}f",
                "SHARED_EXPERT": int(experts.shared > 0),
            }
            if self.shared_apart:
                macros |= {
                    "SHARED_APART": 1,
                    "SHARED_GATE_UP_FORMAT": self.shared_apart[0].format,
                    "SHARED_DOWN_FORMAT": self.shared_apart[1].format,
                }
            if self.resident is not None:
                macros["HOST_EXPERTS"] = 1
        if spec.gated_attention:
            macros["GATED"] = 1
        if (delta := spec.delta) is not None:
            marked = sum(1 << layer for layer in delta.layers)
            macros |= {
                "DELTA_LAYERS": len(delta.layers),
                "DELTA_LOW": f"{marked % (1 << 64)}ULL",
                "DELTA_HIGH": f"{marked >> 64}ULL",
                "DELTA_KEY_HEADS": delta.key_heads,
                "DELTA_VALUE_HEADS": delta.value_heads,
                "DELTA_KEY": delta.key_size,
                "DELTA_VALUE": delta.value_size,
                "DELTA_TAPS": delta.kernel,
                "DELTA_COLUMNS": self._delta_columns(delta),
                "DELTA_TILED": int(delta.tiled),
                "DELTA_IN_FORMAT": self.delta_in.format,
                "DELTA_OUT_FORMAT": self.delta_out.format,
                "LOG_ROWS": self.log_rows,
            }
        return {name: str(value) for name, value in macros.items()}

    def prefill_macros(self, kv_bytes: int) -> dict[str, str]:
        """Macros of prefill.cu, for KV numbers of so many bytes."""
        names = ("HIDDEN", "HEADS", "KV_HEADS", "HEAD_DIM", "INTERMEDIATE", "QK_NORM", "NORM_EPS")
        macros = self.macros(1)
        return {**{name: macros[name] for name in names}, "KV_BYTES": str(kv_bytes)}

    def _grain_of(self, shape: StepShape) -> int | None:
        near = self._near_stage if shape == "near" else None
        return None if near is None else near[1]

    def _small_layers(self) -> bool:
        return self.layer_bytes <= _SMALL_LAYER * self.blocks

    def _tags_activations(self, shape: StepShape) -> bool:
        """Whether activations of few rows are tagged: not where the host computes some, whose places would
        keep old tags."""
        if self.spec.experts is not None:
            return self.resident is None
        return shape == "near" or self._small_layers()

    def _sends_queries(self, shape: StepShape) -> bool:
        """Whether queries, keys and values of few rows go directly to the attending blocks; not with 8-bit
        KV, which differs from the projection's output."""
        small = shape == "near" or self._small_layers() or self.spec.experts is not None
        return small and self.kv_precision == "bf16"

    @property
    def _longest_inner(self) -> int:
        """The longest inner dimension of a split unit. With small shared memory no longer than other rows,
        unless all parts would be narrower than pays."""
        spec, widest = self.spec, max(self.spec.hidden, self._mixed_width)
        wide = any(spec.intermediate % part == 0 for part in range(_NARROW, widest + 1, 64))
        return min(widest, _LONGEST_INNER) if self._small_shared_memory and wide else _LONGEST_INNER

    @property
    def _small_shared_memory(self) -> bool:
        """Whether shared memory is smaller than Hopper's."""
        return self.target.shared_bytes < HOPPER.shared_bytes

    @property
    def _mixed_width(self) -> int:
        """Columns of the widest output projection."""
        delta = self.spec.delta
        return max(self.spec.heads * self.spec.head_dim, 0 if delta is None else delta.values)

    def _delta_columns(self, delta: DeltaSpec) -> int:
        """Columns of a state that a block reads at a time: as many that a single row takes one turn, if that
        can be."""
        turns = -(-delta.values // 32 // self.blocks)
        return 64 if turns > 1 and delta.value_size % 64 == 0 else 32

    def _head_split(self) -> int:
        """Parts of the O projection, whole heads each: about three heads, as a block first combines the
        attention of the heads that it reads; one fewer or more if each warp then multiplies whole units."""
        heads = self.spec.heads
        most = self._longest_inner // self.spec.head_dim
        even = [s for s in range(1, heads + 1) if heads % s == 0 and heads // s <= most]
        if (delta := self.spec.delta) is not None:  # the out projections of both kinds have as many parts
            even = [s for s in even if delta.value_heads % s == 0 and delta.values // s % 64 == 0]
            even = [s for s in even if delta.values // s <= self._longest_inner] or [1]

        def preference(split: int) -> tuple[int, int, int]:
            off = abs(heads // split - 3)
            alone = self._multiplied_alone(self._output_of(split))
            return (0 if alone else 1) if off <= 1 else off, off, split

        return min(even, key=preference)

    def _output_of(self, split: int) -> Matrix:
        width = self.spec.heads * self.spec.head_dim
        return Matrix(self.spec.hidden // 16, split, width // split, self.formats.output)

    def _multiplied_alone(self, output: Matrix) -> bool:
        """Whether each warp multiplies whole units of the O projection: if they are narrow and many."""
        return output.blocks <= WARPS and output.units >= 4 * self.blocks

    def _split(self, width: int, grain: int) -> int:
        """Into how many parts, multiples of `grain`, the inner dimension of the down projection is split: the
        number that costs the least time."""
        tiles, kind = self.spec.hidden // 16, self.formats.down
        best, lowest = width // grain, float("inf")
        for split in range(1, width // grain + 1):
            inner = width // split
            uneven = inner % (STEP_K if kind == FOUR_K else 64)
            if width % (split * grain) or uneven or inner > self._longest_inner:
                continue
            rounds = -(-tiles * split // self.blocks)
            # Cycles: overhead of a unit, its arithmetic, and half of its transfer (the rest is hidden).
            each = 350 + inner / 256 * 55 + inner / BLOCK_K[kind] * BLOCK_BYTES[kind] / 18.5 / 2
            if rounds * each < lowest:
                best, lowest = split, rounds * each
        return best

    def _bucket(self, rows: int) -> Bucket:
        stride = self._stride(rows)
        ring_offset = _round_up(self.operand_offset(rows) + rows * stride * 2)
        tiles_n = _tiles(rows)
        stages = min(16, self._room(rows) // self.stage_bytes(tiles_n))
        return Bucket(rows, tiles_n, stride, ring_offset, stages)

    def operand_offset(self, rows: int) -> int:
        """Offset in shared memory of the rows of a step of this size."""
        columns = 8 * _tiles(rows)
        rope_at = _round_up(CONTROL_WORDS * 4) + 128 + 256 + 640 + _SHARES_BYTES + self._routing_bytes
        if (early := self.early_scores) is not None:
            assert self.spec.experts is not None
            rope_at += 128 + _round_up(4 * EARLY_SCORES * early.groups + 2 * _EARLY_FEW * early.before)
        scratch_at = rope_at + columns * self.spec.head_dim // 2 * 8 * self._rotary_tables
        buffers = {8: 4, 16: 3, 32: 2}[columns]
        sums = buffers * WARPS * 16 * (columns + 4) * 4
        selection = _SELECTION_BYTES * (2 if self.spec.head_dim > 128 else 1)
        return _round_up(scratch_at + max(sums, 2 * (16 * (CHUNK + PAD) * 2 + 2 * 8 * 16 * 4) + selection))

    @property
    def _rotary_tables(self) -> int:
        return 2 if self.spec.windowed and self.spec.window_rope is not None else 1

    @property
    def _routing_bytes(self) -> int:
        """Size of the structure Routing in kernels/layout.cuh."""
        if (experts := self.spec.experts) is None:
            return 0
        count = all_experts(experts)
        words = 4 * (2 + count // 32) + (2 * (count + 2) + 3) // 4 * 4
        if self.resident is not None:
            words += 4 + (2 * (count + 2) + 3) // 4 * 4
        return _round_up(words + MAX_ROWS * used_experts(experts) * (2 + 4))

    def _stride(self, rows: int) -> int:
        """Stride of an operand row: the widest whole row, if `rows` of them leave enough for the ring."""
        spec = self.spec
        need = max(spec.hidden, self._mixed_width, self.down.inner)
        whole = max(need, self.inner_width)
        enough = 49_152 * self.target.shared_bytes // HOPPER.shared_bytes
        return (whole if rows * (whole + PAD) * 2 <= enough else need) + PAD


def second_states(slots: int) -> int:
    """How many of so many slots for recurrent states have a second one (states.py): one for each of the few
    sequences that write alone."""
    return -(-slots // 4)


def _runs(experts: ExpertsSpec) -> bool:
    """Whether the kernel runs such experts: like Qwen3-MoE's, or with biases and clamped gates."""
    shared = experts.shared in (0, experts.width) and experts.shared_gate == (experts.shared > 0)
    shared = shared and used_experts(experts) <= 32  # a lane each
    biased = experts.bias or experts.router_bias
    plain = replace(experts, router_bias=False, bias=False, limit=0.0, shared=0, shared_gate=False)
    return plain.is_plain and shared and not (experts.shared and biased)


def _whole_share(units: int, part: int, together: int, blocks: int) -> int:
    """The same as in kernels/worker.cuh."""
    least = -(-units // blocks)
    rounds = -(-least // together)
    for each in range(least, (5 * least + 4) // 4 + 1):
        if -(-each // together) != rounds:
            break
        if part % each == 0:
            return each
    return 0


def all_experts(experts: ExpertsSpec) -> int:
    """A shared expert is stored behind the others."""
    return experts.count + (experts.shared > 0)


def used_experts(experts: ExpertsSpec) -> int:
    return experts.top + (experts.shared > 0)


def _tiles(rows: int) -> int:
    """Tiles of eight rows of the operand."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def _round_up(value: int) -> int:
    return -(-value // 128) * 128
