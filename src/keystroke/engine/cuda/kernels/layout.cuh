// Sizes and structures that the host and the kernel share, and the layout of shared memory.
// plan.py and step.py define the same in Python: change both together.

// Sizes come as macros (plan.py): HIDDEN HEADS KV_HEADS HEAD_DIM INTERMEDIATE VOCAB LAYERS TILES_N FORMAT VALUE_FORMAT
// OUTPUT_FORMAT GATE_UP_FORMAT DOWN_FORMAT WIDE_FORMAT WIDE_LOW WIDE_HIGH HEAD_FORMAT O_SPLIT O_ALONE DOWN_SPLIT ACTIVATION_TAGS QUERY_TAGS QK_NORM NORM_EPS SPARSE
// STAGE_BYTES SMALL_GRAIN KV_BYTES LENT VALUE_PARTS.

// A kernel for any number of rows, or (SINGLE) for one row that has at most GROUPS partial results (1) or more (2). The results
// have the same bits. A layer's instructions run once and come from far away, so a kernel with fewer is faster.
#ifndef SINGLE
#define SINGLE 0
#define WHOLE 0  // of SINGLE: whether the operand holds a whole row of activations
#endif

constexpr int WARPS = 8;
constexpr int COMPUTE = 256;
constexpr int MAX_ROWS = 32;
constexpr int PAGE = 64;
constexpr int NEAR = 2048;             // keys up to here come in chunks of one page, so that many blocks share them;
constexpr int NEAR_CHUNKS = NEAR / PAGE;
constexpr int CHUNK = 256;             // later ones in chunks of this many. A key's chunk depends on its place alone.
constexpr int PAD = 32;     // staggers the rows of an operand over the banks of shared memory
constexpr int GROUP = HEADS / KV_HEADS;
constexpr int QUERY_WIDTH = HEADS * HEAD_DIM;
constexpr int QKV_ROWS = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
constexpr int COLUMNS = 8 * TILES_N;
// The residual stream is fixed point in units of 2**-28, above a counter of the sums added to it: the order of the sums does
// not matter, and a reader can tell whether all have arrived.
constexpr float FIXED_ONE = 268435456.0f;
constexpr int COUNT_BITS = 12;
constexpr float LARGEST_TERM = 1.0e6f;  // eight of these would overflow
constexpr float LARGEST = 1.0e9f;
constexpr int SUMS_PER_LAYER = O_SPLIT + DOWN_SPLIT;
static_assert(1 + LAYERS * SUMS_PER_LAYER < 1 << COUNT_BITS, "the count of a number's sums overflows");
constexpr bool HALF = FORMAT != 0;            // quantised weights meet float16 activations
constexpr float ACTIVATION_SCALE = HALF ? 0.015625f : 1.0f;  // keeps float16 far from overflow

// Packed weights. A unit is 16 output rows over a range of the inner dimension, divided into blocks whose bytes are in the
// order of a warp's registers, then 16 scales and 16 biases.
constexpr int TAIL = 128;
constexpr int STAGE = STAGE_BYTES;  // of the ring
// Formats: 0 bf16; 1 bytes with a scale per row; 2 nibbles with scale and zero per 64 columns; from 3 on the codes of GGUF
// files, with a scale and, if the format has minima, an offset per group of columns.
constexpr int MXFP4 = 8;  // 4-bit floats with a power of two per group
// As 3, but a group's scale and offset are a byte each, times two numbers of the row for 256 columns, which are thus four blocks.
constexpr int FOUR_K = 9;
constexpr bool four_bits(int format) { return format == 3 || format == MXFP4 || format == FOUR_K; }
constexpr bool stored(int format) { return format >= 3; }
constexpr int code_bits(int format) { return four_bits(format) ? 4 : format <= 5 ? 6 : 8; }
constexpr bool minima(int format) { return format % 2; }
constexpr int group_k(int format) { return four_bits(format) ? 32 : 16; }
constexpr int grid_bytes(int format) {
  return format == FOUR_K ? 80 : 64 / group_k(format) * 16 * (format == MXFP4 ? 1 : minima(format) ? 4 : 2);
}
constexpr int block_k(int format) { return format >= 2 ? 64 : 32; }
constexpr int block_bytes(int format) {
  return format == 0 ? 1024 : format == 1 ? 512 : format == 2 ? 576 : 128 * code_bits(format) + grid_bytes(format);
}

// A chunk holds a multiple of so many blocks. With blocks of 64 columns every warp has an even number of turns, so that the
// loop over chunks need not be unrolled (multiply.cuh); with small shared memory (SMALL_GRAIN) a stage may hold too few.
constexpr int GRAIN = FORMAT >= 2 && !SMALL_GRAIN ? 2 * WARPS : WARPS;

template <int UNITS, int INNER, int FMT>
struct Matrix {
  static constexpr int units = UNITS;
  static constexpr int inner = INNER;
  static constexpr int format = FMT;
  static constexpr int blocks = INNER / block_k(FMT);
  static constexpr s64 unit_bytes = (s64)blocks * block_bytes(FMT) + TAIL;
  // A stage of the ring holds one or more units; larger units are split into chunks with an equal share for each warp.
  static constexpr int together = STAGE / unit_bytes;
  static constexpr int even = (STAGE - TAIL) / block_bytes(FMT) / GRAIN * GRAIN;
  static constexpr int chunks = together ? 1 : (blocks + even - 1) / even;
  static constexpr int per_chunk = together ? blocks : even;
  static constexpr s64 bytes = unit_bytes * UNITS;
};
// Queries, keys and values are one matrix; if values are stored in another format, they are its second part.
constexpr bool VALUES_APART = VALUE_FORMAT != FORMAT;
// Gates of the attended heads (GATED) lie between keys and values.
#ifndef GATED
#define GATED 0
#endif
constexpr int GATE_HEADS = GATED ? HEADS : 0;
constexpr int QKV_UNITS = (QKV_ROWS + GATE_HEADS * HEAD_DIM) / 16;
constexpr int QK_UNITS = VALUES_APART ? (HEADS + KV_HEADS + GATE_HEADS) * HEAD_DIM / 16 : QKV_UNITS;
typedef Matrix<QK_UNITS, HIDDEN, FORMAT> Qkv;
typedef Matrix<QKV_UNITS - QK_UNITS, HIDDEN, VALUE_FORMAT> ValueRows;
// Blocks share those units by what they cost, not by their number: values often have more bits than queries and keys.
constexpr int QK_COST = block_bytes(FORMAT), VALUE_COST = block_bytes(VALUE_FORMAT);
constexpr s64 QKV_COST = (s64)QK_UNITS * QK_COST + (s64)(QKV_UNITS - QK_UNITS) * VALUE_COST;
typedef Matrix<HIDDEN / 16 * O_SPLIT, QUERY_WIDTH / O_SPLIT, OUTPUT_FORMAT> Output;
// A mixture has EXPERTS feed-forward networks of EXPERT_WIDTH each, stored consecutively; every row uses TOP_EXPERTS of them.
// INTERMEDIATE is then the total width of all experts of one row, and DOWN_SPLIT their number.
#ifndef EXPERTS
#define EXPERTS 0
#define TOP_EXPERTS 1
#define EXPERT_WIDTH 0
#define EXPERT_SCALE 1.0f
#define EXPERT_SOFTMAX_OF_ALL 0
#define EXPERT_BIAS 0
#define EXPERT_LIMIT 0.0f
#endif
#ifndef SHARED_EXPERT
#define SHARED_EXPERT 0
#endif
#ifndef SHARED_APART
#define SHARED_APART 0
#define SHARED_GATE_UP_FORMAT GATE_UP_FORMAT
#define SHARED_DOWN_FORMAT DOWN_FORMAT
#endif
#ifndef HOST_EXPERTS
#define HOST_EXPERTS 0
#endif
// Whether experts are scored before attention's output is in the residual stream (early_scores.cuh).
#ifndef EARLY
#define EARLY 0
#endif
constexpr bool MIXTURE = EXPERTS > 0;
// An expert that every row uses (SHARED_EXPERT) is stored after the others, in formats of its own if SHARED_APART. Its weight is
// the sigmoid of one more score.
constexpr int ALL_EXPERTS = EXPERTS + SHARED_EXPERT, USED_EXPERTS = TOP_EXPERTS + SHARED_EXPERT;
// In some layers a row sees only its last WINDOW keys; these layers may have a rotary table of their own (WINDOW_ROPE).
#ifndef WINDOW
#define WINDOW 0
#define WINDOWED_LOW 0
#define WINDOWED_HIGH 0
#define WINDOW_ROPE 0
#define SINKS 0
#endif
// Some layers are gated delta nets (delta.cuh), DELTA_LAYERS of them; keys and values are then stored of the others only.
#ifndef DELTA_LAYERS
#define DELTA_LAYERS 0
#define DELTA_LOW 0
#define DELTA_HIGH 0
#else
#ifndef DELTA_COLUMNS  // of a value head that a block reads at a time
#define DELTA_COLUMNS 32
#endif
constexpr int DELTA_VALUES = DELTA_VALUE_HEADS * DELTA_VALUE;
constexpr int DELTA_CHANNELS = 2 * DELTA_KEY_HEADS * DELTA_KEY + DELTA_VALUES;  // that pass the convolution
constexpr int DELTA_IN_ROWS = DELTA_CHANNELS + DELTA_VALUES;
constexpr int LOG_WIDTH = DELTA_CHANNELS + 2 * DELTA_VALUE_HEADS;
typedef Matrix<DELTA_IN_ROWS / 16, HIDDEN, DELTA_IN_FORMAT> DeltaIn;
typedef Matrix<HIDDEN / 16 * O_SPLIT, DELTA_VALUES / O_SPLIT, DELTA_OUT_FORMAT> DeltaOut;
#endif
constexpr int DOWN_UNITS = HIDDEN / 16 * (MIXTURE ? 1 : DOWN_SPLIT);  // of one expert
typedef Matrix<(MIXTURE ? EXPERT_WIDTH : INTERMEDIATE) / 8, HIDDEN, GATE_UP_FORMAT> GateUp;  // 8 rows of gate, then the same 8 of up
typedef Matrix<DOWN_UNITS, INTERMEDIATE / DOWN_SPLIT, DOWN_FORMAT> Down;
typedef Matrix<DOWN_UNITS, INTERMEDIATE / DOWN_SPLIT, WIDE_FORMAT> WideDown;  // of some layers
typedef Matrix<GateUp::units, HIDDEN, SHARED_GATE_UP_FORMAT> SharedGateUp;  // these two only if SHARED_APART
typedef Matrix<DOWN_UNITS, INTERMEDIATE / DOWN_SPLIT, SHARED_DOWN_FORMAT> SharedDown;
typedef Matrix<(VOCAB + 15) / 16, HIDDEN, HEAD_FORMAT> Head;
constexpr int NORMED = 32;  // in `barrier`: not in its first line
// Whether a layer's down projection has the wide format, and whether the layer has a window: one bit per layer.
DEVICE bool layer_bit(int layer, u64 low, u64 high) { return (LAYERS > 64 && layer >= 64 ? high : low) >> (layer % 64) & 1; }
DEVICE bool wide_down(int layer) { return DOWN_FORMAT != WIDE_FORMAT && layer_bit(layer, WIDE_LOW, WIDE_HIGH); }
DEVICE bool windowed(int layer) { return WINDOW && layer_bit(layer, WINDOWED_LOW, WINDOWED_HIGH); }
DEVICE int oldest_key(int layer, int position) { return windowed(layer) ? position - WINDOW + 1 : 0; }

// Keys and values in pages: bf16, or bytes of 128 + v in steps whose size depends on the dimension (scales.py). Queries are
// then scaled by the step sizes, and the products use float16, in which bytes are exact.
template <int BYTES> struct StoredAs { typedef u16 Type; };
template <> struct StoredAs<1> { typedef u8 Type; };
typedef StoredAs<KV_BYTES>::Type Stored;
constexpr bool KV8 = KV_BYTES == 1;

struct Control {
  int rows, sequences, sampled, ticket;
  int filtered;  // whether top-k or top-p narrows the draw of some row
  int sparse;    // whether some row attends to chosen chunks only
  u32 masked;    // rows that may choose only what their mask has, one bit each
  int token[MAX_ROWS], position[MAX_ROWS], sequence[MAX_ROWS];
  int first[MAX_ROWS], count[MAX_ROWS], pending[MAX_ROWS], table[MAX_ROWS];  // of each sequence
  float inverse_temperature[MAX_ROWS], log_min_p[MAX_ROWS];
  u32 seed_low[MAX_ROWS], seed_high[MAX_ROWS];
  int top_k[MAX_ROWS];    // 0: off
  float top_p[MAX_ROWS];  // 1: off
  int budget[MAX_ROWS];   // chunks of keys that a row of the sequence attends to; 0: all
  int state[MAX_ROWS], replay[MAX_ROWS];  // of delta nets: where the state is, and how many rows before the first it lacks
};
constexpr int CONTROL_WORDS = sizeof(Control) / 4;
constexpr int MASK_WORDS = (VOCAB + 31) / 32;

constexpr int FEATURE_LAYERS = 4;  // at most
#if DELTA_LAYERS
constexpr int GATE_WIDTH = DELTA_VALUES > QUERY_WIDTH ? DELTA_VALUES : QUERY_WIDTH;
#else
constexpr int GATE_WIDTH = QUERY_WIDTH;
#endif
constexpr bool HYBRID = GATED || DELTA_LAYERS;
constexpr int KV_LAYERS = LAYERS - DELTA_LAYERS;
constexpr bool DELTA_TAGS = SINGLE && DELTA_LAYERS > 1;

struct Parameters {
  const u8* layers;
  const u8* head;
  const u16* embedding;
  const float* norms;     // [2 LAYERS + 1][HIDDEN]
  const float* qk_norms;  // [LAYERS][2][HEAD_DIM]
  const float2* rope;     // [context][HEAD_DIM / 2] cosine, sine
  const int* tables;      // [slots][table_stride] pages of each sequence
  Stored* keys;           // [LAYERS][pages][KV_HEADS][PAGE][HEAD_DIM]
  Stored* values;          // [LAYERS][pages][KV_HEADS][HEAD_DIM][PAGE]
  const float* value_steps;  // [LAYERS][KV_HEADS][HEAD_DIM] size of a step where values are bytes
  s64* residual;          // [MAX_ROWS][HIDDEN]
  u16* normed;            // [MAX_ROWS][HIDDEN]
  float* raw;             // [MAX_ROWS][QKV_ROWS]
  u16* queries;           // [MAX_ROWS][QUERY_WIDTH]
  u32* sent;              // [MAX_ROWS][QKV_ROWS] queries, keys and values above the layer's tag, where rows are few
  float* partial;         // [MAX_ROWS][HEADS][partial_stride][HEAD_DIM]
  float2* partial_norm;   // [MAX_ROWS][HEADS][partial_stride] largest score, sum
  u16* attended;          // [MAX_ROWS][QUERY_WIDTH]
  u32* attended_tagged;   // the same above the layer's tag, where rows are many and their chunks few
  u16* activated;         // [MAX_ROWS][INTERMEDIATE]
  u32* tagged;            // [MAX_ROWS][INTERMEDIATE] the same above the layer's tag, where rows are few
  float* logits;          // [MAX_ROWS][VOCAB]
  float* best_value;      // [blocks][MAX_ROWS]
  int* best_token;        // [blocks][MAX_ROWS]
  double* best_score;     // [blocks][MAX_ROWS]
  u32* barrier;           // arrivals, departures, fault; from NORMED on, how often each row was normalised
  const u16* bounds;      // [LAYERS][pages][KV_HEADS][2][HEAD_DIM] largest, then smallest of each page's keys
  float* chunk_bounds;    // [MAX_ROWS][HEADS][partial_stride] log2 of the most weight a chunk may have
  float* omitted;         // [MAX_ROWS][HEADS] log2 of the most weight that chunks left out may have
  int* doubt;             // [MAX_ROWS] sequences that left out more than they may
  u64* histogram;         // [2 filters][3 passes][MAX_ROWS][1024 bins]
  const Control* control;
  Control* next;          // where the step after this one finds its rows, if it follows without the host
  int* result;            // host memory: ticket, fault, accepted[MAX_ROWS], chosen[MAX_ROWS], doubt[MAX_ROWS]
  const int* stop;        // host memory
  const u32* masks;       // host memory: [MAX_ROWS][MASK_WORDS] tokens that a row may choose, one bit each
  const int* masks_ready; // host memory: the ticket of the launch whose masks are there
  const float* routers;   // [LAYERS][ALL_EXPERTS][HIDDEN] of a mixture
  const float* router_biases;  // [LAYERS][EXPERTS], if EXPERT_BIAS
  float* expert_scores;   // [MAX_ROWS][ALL_EXPERTS] of the layer at hand, each with the layer's tag
  const float* sinks;     // [LAYERS][HEADS] log2 of the weight that each head gives to no key, if SINKS
  const float2* window_rope;  // the rotary table of windowed layers, if WINDOW_ROPE
  s64* profile;           // [blocks][PROFILE] clock readings around every barrier, where compiled in
  s64 kv_layer_stride, bound_layer_stride;
  int table_stride, partial_stride;
  int x_stride, stages, ring_offset;
  int in_flight;     // bytes the streaming warp keeps under way: enough for bandwidth, few enough for latency
  int direct_rows;   // up to this many rows every block normalises for itself
  int fused_rows;    // up to this many rows every block combines partial results for itself
  float most_omitted;  // log2 of the largest ratio of weight left out to weight taken that raises no doubt
  u16* features;       // [MAX_ROWS][feature_count][HIDDEN] for a draft head (features.cuh), if there is one
  int feature_count, feature_layers[FEATURE_LAYERS];  // behind how many layers each is taken
  float* gates;        // [MAX_ROWS][GATE_WIDTH] factors of what attention gives, if GATED; of a delta net: gates before SiLU
  const float* delta_heads;   // [DELTA_LAYERS][b, a][DELTA_VALUE_HEADS][HIDDEN]
  const float* convolutions;  // [DELTA_LAYERS][DELTA_CHANNELS][DELTA_TAPS]
  const float* delta_decays;  // [DELTA_LAYERS][DELTA_VALUE_HEADS]
  const float* delta_biases;  // the same
  const float* delta_norms;   // [DELTA_LAYERS][DELTA_VALUE]
  float* states;              // [state_slots + second_states][DELTA_LAYERS][DELTA_VALUE_HEADS][DELTA_KEY][DELTA_VALUE]
  float* logs;                // [state_slots][DELTA_LAYERS][LOG_ROWS][LOG_WIDTH]
  float* delta_results;       // [MAX_ROWS][DELTA_VALUES], with a single row's tag
  u32* delta_sent;            // [DELTA_IN_ROWS + 2 DELTA_VALUE_HEADS] of a single row, with the layer's tag: inputs, gates, b and a
  int state_slots, second_states;  // of sequences; the first ones have a second state each (delta.cuh)
  // Experts that the host computes (host_experts.cuh), if HOST_EXPERTS.
  const u16* placement;       // [LAYERS][ALL_EXPERTS] an expert's position among those in GPU memory, or ON_HOST
  u32* uses;                  // [LAYERS][EXPERTS] how often each was chosen
  int* mail;                  // host memory, the next two as well: see the MAIL_ constants
  u16* mail_rows;             // [MAX_ROWS][HIDDEN] activations
  const s64* mail_sums;       // [MAX_ROWS][HIDDEN] numbers to add to the residual stream, sums counted
  int resident;               // experts of a layer in GPU memory, a shared one included unless SHARED_APART
  // Experts that are scored early (early_scores.cuh), if EARLY.
  const u16* early_before;    // [LAYERS][O_SPLIT][groups] routers of eight experts, for a part of the row before attention,
  const u16* early_behind;    // and for a part of what attention gives
  const float* early_scales;  // [LAYERS][both][EARLY_STRIDE] a factor of each score
  float* early_scores;        // [MAX_ROWS][O_SPLIT][EARLY_STRIDE] parts of the scores of the layer at hand, each with the layer's tag
  u16* early_rows;            // [MAX_ROWS][HIDDEN] rows before attention, divided by their norm, where rows are many
  float2* early_norms;        // [2][MAX_ROWS] 1 / norm and norm of those rows, and of the rows behind attention
};

// Shared memory, in this order: control, page of each row, barriers, rotary table, scratch, operand, ring.
constexpr int PAGES_AT = (CONTROL_WORDS * 4 + 127) / 128 * 128;
constexpr int BARRIERS_AT = PAGES_AT + 128;
constexpr int SMALL_AT = BARRIERS_AT + 256;
constexpr int NORMS_AT = 16;                  // of `small`: norms of few rows, for early scores
constexpr int ZEROS_AT = 32;                  // of `small`: 32 words that stay 0
constexpr int MEETINGS_AT = SMALL_AT + 384;  // barriers of the sums: ready, then free
constexpr int SPANS_AT = MEETINGS_AT + 64;
constexpr int TAKEN_AT = SPANS_AT + 56;       // barrier of a layer's experts: the streaming warp has asked for all of them
constexpr int ARRIVAL_AT = SMALL_AT + 512;    // barrier of rows on their way into the operand
constexpr int BROUGHT_AT = ARRIVAL_AT + 8;    // barriers of what computing warps ask for: one each, one for each page of values,
constexpr int BROUGHT = WARPS + CHUNK / PAGE + 1;  // one for the keys of a chunk of one page
constexpr int ROUTED_AT = BROUGHT_AT + BROUGHT * 8;  // barrier of the experts that a layer's rows use: chosen
constexpr int PLACE_AT = ROUTED_AT + 8;       // this block's place among those that attend (`place_block`)
static_assert(PLACE_AT + 8 <= SMALL_AT + 640, "barriers fit their memory");
constexpr int LISTED = 16;                    // shares of attention that a block looks up once for all layers
constexpr int SHARE_BYTES = 48;
constexpr int SHARES_AT = SMALL_AT + 640;
constexpr int ROUTING_AT = SHARES_AT + 2 * LISTED * SHARE_BYTES;  // after as many that are looked up as they are needed
// The experts that the rows of a step use in one layer.
struct Routing {
  int slots;                              // distinct experts of all rows
  u32 used[ALL_EXPERTS / 32 + 1];         // one bit for each expert
  u16 listed[ALL_EXPERTS + 2];                // the expert of each slot, in ascending order
  u16 expert[MAX_ROWS][USED_EXPERTS];     // of each row, the highest score first, the shared one last
  float weight[MAX_ROWS][USED_EXPERTS];
#if HOST_EXPERTS
  int sent;                               // whether the host computes some of a layer's experts
  u16 place[ALL_EXPERTS + 2];             // of each slot: the expert's position in GPU memory
#endif
};
// Whether a single row's b and a of delta nets are computed by the last of the warps for early scores: only their tags say that they
// are there.
#if EARLY
constexpr bool DELTA_ASIDE = DELTA_TAGS && EARLY_WARPS > 1;
#else
constexpr bool DELTA_ASIDE = false;
#endif
// Of early scores: barriers and numbers, a row's scores, and the block's part of few rows before attention.
constexpr int EARLY_AT = ROUTING_AT + (MIXTURE ? ((int)sizeof(Routing) + 127) / 128 * 128 : 0);
constexpr int EARLY_SCORES_AT = EARLY_AT + 128;
constexpr int EARLY_STRIDE = (ALL_EXPERTS + 7) / 8 * 8;
constexpr int EARLY_ROWS_AT = EARLY_SCORES_AT + EARLY_STRIDE * 4;
constexpr int EARLY_FEW = 2;                      // rows at most that every block normalises for itself
constexpr int EARLY_COLUMNS = HIDDEN / O_SPLIT;   // of that part
constexpr int ROPE_AT = EARLY ? (EARLY_ROWS_AT + EARLY_FEW * EARLY_COLUMNS * 2 + 127) / 128 * 128 : EARLY_AT;
constexpr int ROPE_ENTRIES = COLUMNS * HEAD_DIM / 2;  // of one table
constexpr int SCRATCH_AT = ROPE_AT + ROPE_ENTRIES * 8 * (1 + WINDOW_ROPE);
constexpr int SUM_STRIDE = COLUMNS + 4;              // keeps the rows of a sum in different banks
constexpr int SUM_COLUMNS = SINGLE ? 1 : SUM_STRIDE;  // a single row stores no others
constexpr int REDUCTION = WARPS * 16 * SUM_COLUMNS;   // floats of one unit's partial sums
constexpr int BUFFERS = TILES_N == 1 ? 4 : TILES_N == 2 ? 3 : 2;  // units whose sums may be under way
constexpr int LAG = TILES_N == 1 && !SINGLE ? 2 : 1;  // units that are multiplied before an earlier one's sums are added
constexpr int ADDERS = TILES_N;                      // warps that add a unit's sums, eight columns each
constexpr int SCORE_STRIDE = CHUNK + PAD;
constexpr int ATTENTION_BYTES = 16 * SCORE_STRIDE * 2 + 2 * WARPS * 16 * 4;  // there is room for two units
constexpr int SENT_AT = 16 * (PAGE + PAD) * 2 + 2 * WARPS * 16 * 4;  // of a unit's scratch: behind what one page of keys needs
constexpr int SENT_STRIDE = HEAD_DIM + 8;
constexpr int SENT_ROWS = ((ATTENTION_BYTES - SENT_AT) / (2 * SENT_STRIDE) - (SINGLE && GROUP <= 8 ? 8 : 16)) / 2;  // beside the queries
// Whether a single row passes everything between blocks with tags. Then only norms wait for the end of other phases; but a block
// adds to the residual stream only when all have read what was there before (`check_readers`).
constexpr bool ALL_TAGS = SINGLE == 1 && KV_LAYERS > 1 && QUERY_TAGS && ACTIVATION_TAGS && WHOLE && !HOST_EXPERTS && SENT_ROWS > 0;
constexpr bool TAGS = HYBRID ? ALL_TAGS : LAYERS > 1;  // hybrids tag all (beside what delta nets pass, and activations), or announce
constexpr bool GUARDED = TAGS && ALL_TAGS;
constexpr int SELECTION_BYTES = HEAD_DIM > 128 ? 8192 : 4096;
constexpr int SUMS_BYTES = BUFFERS * WARPS * 16 * SUM_STRIDE * 4;  // the same for a single row, so that one plan serves both
constexpr int SCRATCH_BYTES = SUMS_BYTES > 2 * ATTENTION_BYTES + SELECTION_BYTES ? SUMS_BYTES : 2 * ATTENTION_BYTES + SELECTION_BYTES;
constexpr int OPERAND_AT = (SCRATCH_AT + SCRATCH_BYTES + 127) / 128 * 128;

DEVICE void mma_weights(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (HALF) mma_f16(c, a0, a1, a2, a3, b0, b1);
  else mma_bf16(c, a0, a1, a2, a3, b0, b1);
}
DEVICE u32 pack_activation(float low, float high) {
  if (HALF) return pack_f16(low * ACTIVATION_SCALE, high * ACTIVATION_SCALE);
  return pack_bf16(low, high);
}
DEVICE u16 activation(float v) { return (u16)pack_activation(v, 0.0f); }
DEVICE int chunks_to(int position) {  // chunks that hold keys 0 ... position
  return position < NEAR ? position / PAGE + 1 : NEAR_CHUNKS + (position - NEAR) / CHUNK + 1;
}
DEVICE u16 bf16(float v) { return (u16)pack_bf16(v, 0.0f); }
// The operands of attention: queries, keys, weights of keys, values.
DEVICE void mma_attention(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (KV8) mma_f16(c, a0, a1, a2, a3, b0, b1);
  else mma_bf16(c, a0, a1, a2, a3, b0, b1);
}
DEVICE u32 pack_attention(float low, float high) { return KV8 ? pack_f16(low, high) : pack_bf16(low, high); }
DEVICE u16 query(float v) { return (u16)pack_attention(v, 0.0f); }
DEVICE void store(u16* to, float v) { *to = bf16(v); }
DEVICE void store(u8* to, float v) { *to = to_byte(v + 128.0f); }
