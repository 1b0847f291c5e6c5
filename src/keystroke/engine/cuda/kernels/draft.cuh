// The structures and sizes of a draft head, shared with the host (draft.py). Built over layout.cuh with the head's own sizes: one
// layer, VOCAB rows of its own vocabulary, eight bits per weight, and FEATURES layers of the target that it reads.

typedef Matrix<HIDDEN / 16, FEATURES * HIDDEN, 1> Fuse;
typedef Matrix<QKV_ROWS / 16, 2 * HIDDEN, 1> Joined;  // queries, keys, values of a token's embedding beside the stream
static_assert(O_SPLIT == 1 && DOWN_SPLIT == 1 && FORMAT == 1 && HEAD_FORMAT == 1 && TILES_N == 1, "a draft head is not cut");
enum { FUSE = MATRICES, JOINED = QKV };

constexpr int MOST_DRAFTED = 8;
constexpr int WINDOW_PAGES = 32;  // of the past, that the head attends to
constexpr int TOGETHER = 8;       // rows whose keys and values are computed at once
enum { OF_TOKEN, OF_STREAM, OF_MLP, OF_RESULT };  // norms

struct DraftParameters {
  Parameters base;          // control, next, embedding, rope, tables, barrier, stop, features; and the ring's sizes
  const u8* fuse;
  const u8* pair;
  const u8* output;
  const u8* gate_up;
  const u8* down;
  const u8* out;
  const float* norms;       // [4][HIDDEN]
  const int* vocabulary;    // [VOCAB] the target's tokens
  u16* keys;                // [pages][KV_HEADS][PAGE][HEAD_DIM] of the token at each position with the feature before it
  u16* values;              // the same
  float* stream;            // [TOGETHER][HIDDEN] fused features
  float* queries;           // [QUERY_WIDTH]
  u16* partial;             // [WINDOW_PAGES][QUERY_WIDTH]
  float2* partial_norm;     // [WINDOW_PAGES][HEADS] largest score, sum
  float* middle;            // [HIDDEN] behind attention
  u16* activated;           // [INTERMEDIATE]
  float* result;            // [HIDDEN] of the layer
  float* logits;            // [VOCAB]
  double* best_score;       // [blocks]
  float4* best;             // [blocks] the best row (bits), its logit, the largest logit, the sum of exponentials
  int* drafted;             // host memory: ticket, count, tokens[MOST_DRAFTED], chances[MOST_DRAFTED]
  int ticket;
  int depth;                // tokens to draft, at most; 0: only read the step's features
  int context;
  float least;              // the chance of the whole draft below which it ends
};
