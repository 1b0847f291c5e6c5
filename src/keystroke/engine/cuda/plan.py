"""How a model's work is cut: sizes, splits and the layout of shared memory, decided before anything runs.

Pure arithmetic on a spec; the one place where Python and kernels/layout.cuh must agree, and nothing here
touches a device. A model the kernel cannot run is refused here, in one sentence.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from keystroke.engine.checkpoint.spec import ModelSpec
from keystroke.engine.cuda.target import HOPPER, Target
from keystroke.errors import UnsupportedModel

Precision = Literal["bf16", "int8", "int4", "stored"]
KvPrecision = Literal["bf16", "int8"]

# Of packed blocks. From FOUR on as files store weights: codes of so many bits; a scale, and in every second
# format an offset, for each group of columns.
BF16, INT8, INT4, FOUR, SIX, SIX_OFFSET, EIGHT, EIGHT_OFFSET = range(8)
BLOCK_K = (32, 32, 64, 64, 64, 64, 64, 64)  # inner dimension of one packed block, by format
BLOCK_BYTES = (1024, 512, 576, 640, 896, 1024, 1152, 1280)
CODE_BITS = {FOUR: 4, SIX: 6, SIX_OFFSET: 6, EIGHT: 8, EIGHT_OFFSET: 8}
GROUP_K = {FOUR: 32, SIX: 16, SIX_OFFSET: 16, EIGHT: 16, EIGHT_OFFSET: 16}
WITH_OFFSETS = frozenset({FOUR, SIX_OFFSET, EIGHT_OFFSET})
TAIL_BYTES = 128  # 16 scales and 16 biases end every unit
MAX_ROWS = 32
PAGE = 64
CHUNK = 256
NEAR = 2048  # keys up to here come in chunks of one page
CHOSEN_CHUNKS = 32  # that a row of sparse attention attends to
PAD = 32
_LARGEST_STAGE = 32_768 + TAIL_BYTES  # of the ring; larger ones leave too few
_SMALL_STAGE = 16_384  # smaller ones cost more meetings than they save room
FEWEST_STAGES = 3  # two where no page of keys comes through the ring
_ENOUGH_STAGES = 4
_LARGE_LAYER = 1_500_000  # bytes of it that fall to one block
_SMALL_LAYER = 262_144  # up to here a layer is a matter of meetings, and those without a fence pay
WARPS = 8  # that compute
CONTROL_WORDS = 7 + 14 * MAX_ROWS
FILTER_BINS = (6, 1024)  # of top-k and top-p: three passes each over ten bits of a key
_SELECTION_BYTES = 4_096
_SHARES_BYTES = 2 * 16 * 48  # of attention, that a block looks up
_LONGEST_INNER = 3_712  # of a split unit: 16 rows of it still leave room for the ring
_NARROW = 512
_BUCKETS = (1, 2, 4, 8, 16, 32)


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
    """What each matrix of a model is packed as. The down projection may have another format in some layers:
    files often give it more bits there."""

    query_key: int
    value: int
    output: int
    gate_up: int
    down: int
    head: int
    wide: int  # of the down projection in `wide_layers`
    wide_layers: frozenset[int] = frozenset()

    @property
    def largest(self) -> int:
        """Bytes of the largest block."""
        used = (self.query_key, self.value, self.output, self.gate_up, self.down, self.head, self.wide)
        return max(BLOCK_BYTES[each] for each in used)


# The head decides the token: it is never below 8 bits unless the file has it so.
FORMATS: dict[Precision, Formats] = {
    "bf16": Formats(BF16, BF16, BF16, BF16, BF16, BF16, BF16),
    "int8": Formats(INT8, INT8, INT8, INT8, INT8, INT8, INT8),
    "int4": Formats(INT4, INT4, INT4, INT4, INT4, INT8, INT4),
}
MOST_LAYERS = 128  # of a model with two formats


@dataclass(frozen=True)
class Bucket:
    """One size of step: how many rows fit and how shared memory is divided for them."""

    rows: int
    tiles_n: int
    x_stride: int
    ring_offset: int
    stages: int


@dataclass(frozen=True)
class Plan:
    spec: ModelSpec
    precision: Precision
    blocks: int  # multiprocessors, one block each
    kv_precision: KvPrecision = "bf16"
    stored: Formats | None = None  # of precision "stored": what the file's types fit in
    target: Target = HOPPER

    def __post_init__(self) -> None:
        spec = self.spec
        if (self.precision == "stored") != (self.stored is not None):
            raise UnsupportedModel(f"{spec.name} has no matrices that can be kept as stored; choose bf16")
        if self.formats.wide_layers and spec.layers > MOST_LAYERS:
            raise UnsupportedModel(f"{spec.name} has more layers than stored weights may have; choose int8")
        wrong = [
            name
            for name, value, multiple in (
                ("hidden size", spec.hidden, 64),
                ("intermediate size", spec.experts.width if spec.experts else spec.intermediate, 64),
                ("attention width", spec.heads * spec.head_dim, 64),
            )
            if value % multiple
        ]
        if spec.experts is not None and (spec.experts.count % 32 or spec.layers < 2):
            wrong.append("number of experts")
        if (strange := replace(spec, experts=None).unsupported_feature()) is not None:
            raise UnsupportedModel(
                f"the CUDA engine does not run {strange}, which {spec.name} has; use the CPU engine for "
                "this model"
            )
        if spec.head_dim not in (64, 128):
            wrong.append("head size")
        if wrong:
            raise UnsupportedModel(
                f"the CUDA engine cannot cut the {wrong[0]} of {spec.name} into tiles (heads of 64 or 128, "
                "sizes in multiples of 64); use the CPU engine for this model"
            )

    @property
    def formats(self) -> Formats:
        return self.stored or FORMATS[self.precision]

    @property
    def format(self) -> int:
        """That of the most weights."""
        return self.formats.gate_up

    @cached_property
    def query_key(self) -> Matrix:
        spec = self.spec
        rows = (spec.heads + spec.kv_heads) * spec.head_dim
        return Matrix(rows // 16, 1, spec.hidden, self.formats.query_key)

    @cached_property
    def value(self) -> Matrix:
        spec = self.spec
        return Matrix(spec.kv_heads * spec.head_dim // 16, 1, spec.hidden, self.formats.value)

    @cached_property
    def output(self) -> Matrix:
        width = self.spec.heads * self.spec.head_dim
        split = self._head_split()
        return Matrix(self.spec.hidden // 16, split, width // split, self.formats.output)

    @property
    def inner_width(self) -> int:
        """Activations of one row between the up and the down projection, of all experts that it uses."""
        experts = self.spec.experts
        return experts.top * experts.width if experts else self.spec.intermediate

    @cached_property
    def gate_up(self) -> Matrix:
        """Of a mixture: those of all experts, one behind the other; the down projection likewise."""
        experts = self.spec.experts
        width = experts.count * experts.width if experts else self.spec.intermediate
        return Matrix(width // 8, 1, self.spec.hidden, self.formats.gate_up)

    @cached_property
    def down(self) -> Matrix:
        if (experts := self.spec.experts) is not None:
            return Matrix(experts.count * self.spec.hidden // 16, 1, experts.width, self.formats.down)
        split = self._split(self.spec.intermediate, 64)
        return Matrix(self.spec.hidden // 16, split, self.spec.intermediate // split, self.formats.down)

    @cached_property
    def head(self) -> Matrix:
        return Matrix((self.spec.vocab_size + 15) // 16, 1, self.spec.hidden, self.formats.head)

    def layer(self, index: int) -> dict[str, Matrix]:
        """The matrices of a layer, in the order in which they lie and are read."""
        wide = index in self.formats.wide_layers
        return {
            "query_key": self.query_key,
            "value": self.value,
            "output": self.output,
            "gate_up": self.gate_up,
            "down": replace(self.down, format=self.formats.wide) if wide else self.down,
        }

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where each layer begins among the packed ones, and where the last ends."""
        sizes = (sum(m.bytes for m in self.layer(i).values()) for i in range(self.spec.layers))
        return tuple(itertools.accumulate(sizes, initial=0))

    @property
    def layer_bytes(self) -> int:
        """That one row reads, on average."""
        return (self.streamed_bytes - self.head.bytes) // self.spec.layers

    def stage_bytes(self, tiles_n: int) -> int:
        """Of the ring: a whole unit of the largest matrix, or the largest even part of it for every warp of
        which four fit beside 16 rows; and a page of keys always fits (of bytes, two do). Beside more than
        eight rows that part which leaves the least room unused. At four bits a whole unit pays where rows are
        few. The kernel's sums do not depend on any of it."""
        return max(self._small_stage(tiles_n) if self._scarce else self._stage(tiles_n), self._least_stage)

    @property
    def _grain(self) -> int:
        """Blocks of a unit's part, of which every warp has as many."""
        return WARPS * (1 if self.format < INT4 or self._scarce else 2)

    @cached_property
    def _least_stage(self) -> int:
        """Of which every matrix has a whole unit, or a part of one for every warp."""
        wide = replace(self.down, format=self.formats.wide)
        parts = [
            min(matrix.unit_bytes, self._grain * BLOCK_BYTES[matrix.format] + TAIL_BYTES)
            for matrix in (*self.layer(0).values(), wide, self.down, self.head)
        ]
        if self.spec.experts is not None:  # a warp multiplies whole units of an expert's down projection
            parts += [4 * self.spec.hidden, self.down.unit_bytes, wide.unit_bytes]
        return _up(max(parts))

    def _stage(self, tiles_n: int) -> int:
        matrix, block = self.gate_up, BLOCK_BYTES[self.format]
        page, turns = self._page_bytes, self._grain
        grain = turns * block
        grains = -(-matrix.blocks * block // grain)
        whole = _up(matrix.unit_bytes)
        if self.stored is not None:  # other matrices may have larger blocks
            page = max(page, turns * self.formats.largest + TAIL_BYTES)
        if self.format >= INT4 and tiles_n == 1 and whole <= self._largest_whole():
            return max(whole, page)
        room = self.target.shared_bytes - self.operand_at(16) - 16 * self._stride(16) * 2
        parts = [-(-grains // chunks) * grain + TAIL_BYTES for chunks in range(1, grains + 1)]
        sizes = [max(_up(min(part, matrix.unit_bytes)), page) for part in parts]
        fit = [size for size in sizes if size <= _LARGEST_STAGE and size * _ENOUGH_STAGES <= room]
        if not fit:
            return max(_up(grain + TAIL_BYTES), page)
        if tiles_n == 1:
            return fit[0]
        large = [size for size in fit if size >= _SMALL_STAGE] or fit
        return max(large, key=lambda size: (room // size * size, size))

    def _small_stage(self, tiles_n: int) -> int:
        """Where shared memory is smaller than Hopper's: the largest even part of a unit, for every warp, of
        which four fit beside as many rows as leave room for a ring at all. It may be less than a page of
        keys, none of which comes through the ring then; half a page fits always."""
        grain = self._grain * BLOCK_BYTES[self.format]
        grains = -(-self.gate_up.blocks // self._grain)
        least = max(self._least_stage, _up(PAGE * self.spec.head_dim + TAIL_BYTES))
        rooms = [self._room(rows) for rows in _BUCKETS if _tiles(rows) <= tiles_n]
        room = min((each for each in rooms if each >= self._fewest(least) * least), default=0)
        parts = [-(-grains // chunks) * grain + TAIL_BYTES for chunks in range(1, grains + 1)]
        sizes = [_up(min(part, self.gate_up.unit_bytes)) for part in parts]
        fit = [n for n in sizes if least <= n <= _LARGEST_STAGE and n * _ENOUGH_STAGES <= room]
        return max(fit, default=least)

    @property
    def _page_bytes(self) -> int:
        """Of a stage that holds a page of keys, or two of bytes."""
        return PAGE * self.spec.head_dim * 2 + TAIL_BYTES

    def _fewest(self, stage: int) -> int:
        """Stages without which a ring of this size does not work."""
        holds_pages = stage >= PAGE * self.spec.head_dim * 2
        return FEWEST_STAGES if holds_pages else 2

    def _room(self, rows: int) -> int:
        """For the ring, beside so many rows."""
        offset = _up(self.operand_at(rows) + rows * self._stride(rows) * 2)
        return max(self.target.shared_bytes - offset, 0)

    def _largest_whole(self) -> int:
        """Of a unit that a stage holds whole. Stored ones are larger than those of four bits a weight, and
        parts of them cost more than stages do: as many must be left as a ring needs, beside eight rows."""
        if self.stored is None:
            return _LARGEST_STAGE
        return (self.target.shared_bytes - self.operand_at(8) - 8 * self._stride(8) * 2) // FEWEST_STAGES

    def lent_stages(self, tiles_n: int) -> int:
        """Of the ring, for chosen pages of keys and values: room for half a page for every warp, as far
        as the ring has it. More would keep weights out."""
        each = self.stage_bytes(tiles_n) // (PAGE * self.spec.head_dim * self.kv_bytes // 2)
        fewest = min(bucket.stages for bucket in self.buckets if bucket.tiles_n == tiles_n)
        return min(-(-WARPS // each), fewest)

    @property
    def can_choose(self) -> bool:
        """Whether the ring can lend room for a page of keys and one of values, as sparse attention asks."""
        half = PAGE * self.spec.head_dim * self.kv_bytes // 2
        return all(
            self.lent_stages(tiles) * (self.stage_bytes(tiles) // half) >= 4
            for tiles in {bucket.tiles_n for bucket in self.buckets}
        )

    def value_parts(self, tiles_n: int) -> int:
        """Blocks that share a chosen chunk: each scores its keys and gathers a part of the values.
        Two where rows are few and a block still has at most one part of a row's chunks."""
        few = tiles_n == 1 and 2 * self.spec.kv_heads * CHOSEN_CHUNKS <= self.blocks
        return 2 if few and self.spec.head_dim == 128 else 1

    @property
    def in_flight(self) -> int:
        """Bytes that a block keeps under way. Large layers are a matter of bandwidth, small ones of latency,
        which every byte in flight lengthens."""
        if self.spec.experts is not None:
            return 2 * self.stage_bytes(1)
        if self.layer_bytes > _LARGE_LAYER * self.blocks:
            return 66_048
        return max(49_536, (2 if self.stored is None else 3) * self.stage_bytes(1))

    @property
    def streamed_bytes(self) -> int:
        """Weight bytes that a step of one row reads."""
        whole = self.layer_offsets[-1] + self.head.bytes
        if (experts := self.spec.experts) is None:
            return whole
        matrices = [
            self.layer(index)[name] for index in range(self.spec.layers) for name in ("gate_up", "down")
        ]
        routers = self.spec.layers * experts.count * self.spec.hidden * 4
        return (
            whole
            + routers
            - sum(matrix.bytes for matrix in matrices) * (experts.count - experts.top) // experts.count
        )

    @property
    def packed_bytes(self) -> int:
        """Of all weights."""
        return self.layer_offsets[-1] + self.head.bytes

    @property
    def kv_bytes(self) -> int:
        """Of one number of a key or value."""
        return 1 if self.kv_precision == "int8" else 2

    @property
    def kv_bytes_per_token(self) -> int:
        return self.spec.layers * self.spec.kv_heads * self.spec.head_dim * 2 * self.kv_bytes

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        found = []
        for rows in _BUCKETS:
            bucket = self._bucket(rows)
            if bucket.stages < self._fewest(self.stage_bytes(bucket.tiles_n)):
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

    def macros(self, tiles_n: int, sparse: bool = False) -> dict[str, str]:
        spec = self.spec
        wide = sum(1 << layer for layer in self.formats.wide_layers)
        mixture = {}
        if (experts := spec.experts) is not None:
            mixture = {
                "EXPERTS": str(experts.count),
                "TOP_EXPERTS": str(experts.top),
                "EXPERT_WIDTH": str(experts.width),
                "EXPERT_SCALE": "1.0f",
                "EXPERT_SOFTMAX_OF_ALL": str(int(not experts.normalised)),
            }
        return {
            **mixture,
            "HIDDEN": str(spec.hidden),
            "HEADS": str(spec.heads),
            "KV_HEADS": str(spec.kv_heads),
            "HEAD_DIM": str(spec.head_dim),
            "INTERMEDIATE": str(self.inner_width),
            "VOCAB": str(spec.vocab_size),
            "LAYERS": str(spec.layers),
            "TILES_N": str(tiles_n),
            "STAGE_BYTES": str(self.stage_bytes(tiles_n)),
            "SMALL_GRAIN": str(int(self._scarce)),
            "FORMAT": str(self.formats.query_key),
            "VALUE_FORMAT": str(self.formats.value),
            "OUTPUT_FORMAT": str(self.formats.output),
            "GATE_UP_FORMAT": str(self.formats.gate_up),
            "DOWN_FORMAT": str(self.formats.down),
            "WIDE_FORMAT": str(self.formats.wide),
            "WIDE_LOW": f"{wide % (1 << 64)}ULL",
            "WIDE_HIGH": f"{wide >> 64}ULL",
            "HEAD_FORMAT": str(self.formats.head),
            "O_SPLIT": str(self.output.split),
            "O_ALONE": str(int(self._output_alone())),
            "DOWN_SPLIT": str(spec.experts.top if spec.experts else self.down.split),
            "ACTIVATION_TAGS": str(int(self._small() or spec.experts is not None)),
            "QUERY_TAGS": str(int(self._sends_queries() and not sparse)),
            "QK_NORM": str(int(spec.qk_norm)),
            "NORM_EPS": f"{spec.norm_eps!r}f",
            "KV_BYTES": str(self.kv_bytes),
            "SPARSE": str(int(sparse)),  # a kernel of its own: what it adds takes registers from all else
            "LENT": str(self.lent_stages(tiles_n) if sparse else 0),
            "VALUE_PARTS": str(self.value_parts(tiles_n) if sparse else 1),
        }

    def prefill_macros(self, kv_bytes: int) -> dict[str, str]:
        """Of prefill.cu, where a number of a key or value takes so many bytes."""
        names = ("HIDDEN", "HEADS", "KV_HEADS", "HEAD_DIM", "INTERMEDIATE", "QK_NORM", "NORM_EPS")
        macros = self.macros(1)
        return {**{name: macros[name] for name in names}, "KV_BYTES": str(kv_bytes)}

    def _small(self) -> bool:
        return self.layer_bytes <= _SMALL_LAYER * self.blocks

    def _sends_queries(self) -> bool:
        """Whether few rows' queries, keys and values go straight to the blocks that attend. Keys that are
        bytes are not what the projection computes."""
        small = self._small() or self.spec.experts is not None
        return small and self.kv_precision == "bf16"

    @property
    def _longest_inner(self) -> int:
        """Of a split unit: rows of it take no more room than others where there is little, unless all parts
        would be so narrow that they cost more than they save."""
        spec, widest = self.spec, max(self.spec.hidden, self.spec.heads * self.spec.head_dim)
        wide = any(spec.intermediate % part == 0 for part in range(_NARROW, widest + 1, 64))
        return min(widest, _LONGEST_INNER) if self._scarce and wide else _LONGEST_INNER

    @property
    def _scarce(self) -> bool:
        """Whether shared memory is smaller than Hopper's."""
        return self.target.shared_bytes < HOPPER.shared_bytes

    def _head_split(self) -> int:
        """Parts of the O projection, whole heads each. A block first combines the attention of the heads it
        reads, so few heads matter more than few units: about three, where that divides."""
        heads = self.spec.heads
        even = [
            s
            for s in range(1, heads + 1)
            if heads % s == 0 and heads // s * self.spec.head_dim <= self._longest_inner
        ]
        return min(even, key=lambda s: (abs(heads // s - 3), s))

    def _output_alone(self) -> bool:
        """Whether each warp multiplies whole units of the O projection: narrow ones, of which a block has
        many. Sharing each would cost more than the product."""
        return self.output.blocks <= WARPS and self.output.units >= 4 * self.blocks

    def _split(self, width: int, grain: int) -> int:
        """Into how many parts the inner dimension of a matrix that adds to the residual stream is cut, in
        multiples of `grain`: the blocks' shares should be even, and a block should do few units."""
        tiles, kind = self.spec.hidden // 16, self.formats.down
        best, lowest = width // grain, float("inf")
        for split in range(1, width // grain + 1):
            inner = width // split
            if width % (split * grain) or inner % 64 or inner > self._longest_inner:
                continue
            rounds = -(-tiles * split // self.blocks)
            # In cycles: a unit's own overhead, its share of arithmetic, and half of its time on the bus (the
            # other half is hidden by what was streamed ahead).
            each = 350 + inner / 256 * 55 + inner / BLOCK_K[kind] * BLOCK_BYTES[kind] / 18.5 / 2
            if rounds * each < lowest:
                best, lowest = split, rounds * each
        return best

    def _bucket(self, rows: int) -> Bucket:
        stride = self._stride(rows)
        ring_offset = _up(self.operand_at(rows) + rows * stride * 2)
        tiles_n = _tiles(rows)
        stages = min(16, self._room(rows) // self.stage_bytes(tiles_n))
        return Bucket(rows, tiles_n, stride, ring_offset, stages)

    def operand_at(self, rows: int) -> int:
        """Where in shared memory the rows of a step of this size begin."""
        columns = 8 * _tiles(rows)
        rope_at = _up(CONTROL_WORDS * 4) + 128 + 256 + 640 + _SHARES_BYTES + self._routing_bytes
        scratch_at = rope_at + columns * self.spec.head_dim // 2 * 8
        buffers = {8: 4, 16: 3, 32: 2}[columns]
        sums = buffers * WARPS * 16 * (columns + 4) * 4
        return _up(scratch_at + max(sums, 2 * (16 * (CHUNK + PAD) * 2 + 2 * 8 * 16 * 4) + _SELECTION_BYTES))

    @property
    def _routing_bytes(self) -> int:
        """Of the structure Routing in kernels/layout.cuh."""
        if (experts := self.spec.experts) is None:
            return 0
        words = 4 * (2 + experts.count // 32) + 2 * (experts.count + 2)
        return _up(words + MAX_ROWS * experts.top * (2 + 4))

    def _stride(self, rows: int) -> int:
        """Of a row of the operand: the whole of the widest, if `rows` of them leave enough to the ring."""
        spec = self.spec
        need = max(spec.hidden, spec.heads * spec.head_dim, self.down.inner)
        whole = max(need, self.inner_width)
        enough = 49_152 * self.target.shared_bytes // HOPPER.shared_bytes
        return (whole if rows * (whole + PAD) * 2 <= enough else need) + PAD


def _tiles(rows: int) -> int:
    """Tiles of eight rows that the operand has."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def _up(value: int) -> int:
    return -(-value // 128) * 128
