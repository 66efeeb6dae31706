/* Attention over pages of a cache: the contract between the kernels of every instruction set and their callers.
 *
 * Knows nothing of ONNX Runtime, threads or files. No allocation and no global state in the kernels. A caller checks
 * rows and pages before it calls: nothing here does.
 *
 * A page holds 64 positions of one sequence. In it, the part of a layer holds for each kv head its keys, then its
 * values, each rounded up to 64 bytes. With key size h, value size v, vp = v rounded up to 16, tiles of 16 positions:
 *     float32  keys (4 tiles, h, 16) float32; values (64, vp) float32
 *     float16  the same in IEEE half
 *     int8     keys (4, ceil(h / 4), 16, 4) int8, then scales (64) float32; values (16, vp, 4) int8: byte (i, channel, c)
 *              is of position 4 i + (0, 2, 1, 3)[c], then scales (64) float32
 *     int4     keys (4, ceil(h / 8), 16, 4): byte (tile, i, position, c) holds channel 8 i + c low, 8 i + 4 + c high;
 *              then (64, ceil(h / 16)) uint16, the word of 16 channels. values (64, vp / 2): in a run of 32 channels
 *              byte c holds c low and 16 + c high, in a last run of 16 c low and 8 + c high; then (64, ceil(v / 16))
 *              uint16. A word has 10 bits of scale, a half without its sign and lowest 5 bits, then 6 of zero point in
 *              quarters of a level: a number is (4 q - zero) * (scale / 4), exactly
 * Where positions are weighed, 64 float32 follow the values of each head: what is added to a position's score, in nats.
 * A row that is written gets 0. A row that stands for c tokens has log(c), which gives it the share of c equal keys.
 * Keys are stored after norm and rotation. Of int8 and int4 they are stored less what their bias gives channels that
 * hardly turn, as it does at position 0: what all keys have in common adds the same to all scores of a query, which no
 * softmax sees, but would take most of the levels. Keys of int8 and int4, and the queries they meet, and values of int8 and
 * int4 are turned by a Hadamard transform of the largest power of two, at most 128, that divides their size; results
 * over such values are turned back.
 *
 * The path of a row is the slots it sees, ascending, its own last: 0 to n - 1 and then its extras; a row of -1 extras
 * sees the first n alone and names its own slot, which is any. Arithmetic, the
 * same in every path to the last bit: path positions are cut into blocks of 256. In a block, a score is a chain of
 * fmaf over the channels, times scale, soft-capped, in units of log2(e), which is part of the scale where nothing is
 * capped; of weighed positions fmaf(weight, log2(e), score); positions outside the window are left out. m is the
 * greatest, p = 2^(score - m) by a polynomial, 0 where the difference is below -125; l sums p in 16 lanes, folded in
 * halves; o is a chain of fmaf over the positions. int8 goes through integers: a query is quantized like a key, a score is
 * ((float)dot * key scale) * (query scale * scale). Probabilities times value scales, w, are levels u, the nearest
 * integers to w * (32767 / W), W being the block's greatest w, and o is (float)(sum of u * value) * (W / 32767).
 * Blocks are merged in order:
 *     M' = max(M, m), a = 2^(M - M'), b = 2^(m - M'), L' = L a + l b, O' = fmaf(b, o, O a)
 * and the result is O * (1 / L). So a row's result does not depend on other rows, threads or where pages lie.
 *
 * With `latent` (multi-head latent attention) there is one kv head, and what a query meets is a position's value and then
 * its key, v + h channels in one chain. The value is stored once. Everything is float32 then, whatever is stored.
 */
#ifndef EDGEINFER_ATTENTION_H
#define EDGEINFER_ATTENTION_H

#include "activation.h"
#include "floats.h"
#include "lowbit.h"
#include "recurrence.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ATTENTION_PAGE = 64, ATTENTION_TILE = 16, ATTENTION_BLOCK = 256, ATTENTION_TILES = 4 };
enum { ATTENTION_FLOAT32, ATTENTION_FLOAT16, ATTENTION_INT8, ATTENTION_INT4, ATTENTION_TYPES };
/* Added to the type of keys in a layout of pages whose positions are weighed. */
enum { ATTENTION_WEIGHED = 16 };
/* Columns of `rows`. */
enum { ATTENTION_SEQUENCE, ATTENTION_PREFIX, ATTENTION_FIRST_EXTRA, ATTENTION_EXTRAS, ATTENTION_ROW };

/* One layer's attention of one pass. */
typedef struct {
    int32_t heads, kv_heads, key_size, value_size; /* heads is a multiple of kv_heads */
    int32_t key_type, value_type;
    int32_t rotary;      /* channels that are rotated, even, at most key_size; 0: none */
    int32_t interleaved; /* neighbours are rotated together, not halves */
    int32_t norm_whole;  /* of the norms: 1 all heads of a row together, 0 each head */
    int32_t norm_after;  /* queries and keys are normalised after the rotation, which must be head by head */
    int32_t value_norm;  /* values are normalised head by head, without a weight */
    int32_t shared;      /* keys and values are those that an earlier layer wrote: rows bring queries alone */
    int32_t latent;      /* values are part of the keys; k_norm, (v), is theirs */
    int32_t weighed;     /* each position of a head has a number that is added to its scores; not with latent */
    int32_t still;       /* of the rotated pairs, the first that hardly turns; what follows turns no faster */
    int64_t window;      /* 0: none */
    float scale, softcap, norm_epsilon;

    uint8_t *pool;
    int64_t page_bytes, offset; /* offset of the layer in a page */
    const int32_t *pages;       /* (sequences, columns): page of each 64 slots */
    int64_t columns;

    int64_t count;            /* rows of the pass */
    const float *qkv;         /* (count, attention_row_width) */
    const int32_t *rows;      /* (count, 4): sequence, prefix n, first extra, extras; of -1 extras: its slot */
    const int32_t *extras;    /* slots */
    const int64_t *positions; /* (count): rows of the tables */
    const float *cosines, *sines; /* (positions, rotary / 2), or NULL */
    const float *q_norm, *k_norm; /* (h), of norm_whole (heads h) and (kv_heads h); or NULL */
    const float *sinks;           /* (heads) or NULL */
    const float *qkv_bias;        /* (attention_row_width): its keys' part is taken off keys; or NULL */
    float *out;                   /* (count, heads v) */
} attention;

/* How a pass is cut into jobs, and its working memory. */
typedef struct {
    int64_t jobs;   /* of attend */
    int64_t merges; /* of merge, to be done after all of attend; 0: attend leaves nothing to merge */
    size_t bytes;   /* of working memory, to be 64-byte aligned */
    /* The rest is the kernels' own. */
    void *memory;
    int64_t tile_rows, tiles, blocks, split, gathered;
    size_t queries_at, rows_at, tiles_at, busy_at, partials_at, slots_at, slot_bytes;
} attention_plan;

/* Floats from one query's scores of a block to the next one's, apart by more than whole blocks for the cache's sake;
 * floats that a result has beside its channels: the greatest score and the sum. */
enum { ATTENTION_STRIDE = ATTENTION_BLOCK + ATTENTION_TILE, ATTENTION_STATE = 2 };

/* Working memory of one job. */
typedef struct {
    float *scores, *results; /* (queries, ATTENTION_STRIDE), (queries, v rounded up to 16): of a block */
    float *merged, *state;   /* the results of all blocks so far, and (queries, 2): greatest score and sum */
    float *greatest, *sums;  /* (queries): of a block */
    float *factors;          /* (queries): what the levels of its weights stand for, of int8 values */
    int64_t (*seen)[2];      /* (rows): what they see of a block */
    float *keys, *values;    /* a page as float32 */
    uint8_t *gathered;       /* pages of a head, as they are stored */
} attention_bench;

typedef struct {
    const char *name;
    /* Normalises, rotates and transforms rows first..last-1: queries into working memory, keys and values into the
     * pages, quantized. All rows are written before any attends. */
    void (*write)(const attention *a, const attention_plan *plan, int64_t first, int64_t last);
    /* Does job 0..jobs-1, in any order and on any threads. */
    void (*attend)(const attention *a, const attention_plan *plan, int64_t job);
    /* Does merge 0..merges-1, likewise. */
    void (*merge)(const attention *a, const attention_plan *plan, int64_t job);
    /* Float matrices, which take the same vectors: x / rms(x) * weight of rows first..last-1 of (m, k), */
    void (*normalise_floats)(const lowbit_input *in, int64_t k, float *out, int64_t first, int64_t last);
    /* and the columns of tiles first..last-1 for all rows. */
    void (*multiply_floats)(const float_matrix *w, const float_rows *rows, int64_t first, int64_t last);
    /* Activation functions: pieces first..last-1. */
    void (*activate)(const activation *a, int64_t first, int64_t last);
    const recurrence_path *recurrences;
} attention_path;

/* Bytes of keys, or of values, of one head in a page: a multiple of 64. */
int64_t attention_key_bytes(int32_t type, int32_t key_size);
int64_t attention_value_bytes(int32_t type, int32_t value_size);

static inline int64_t attention_head_bytes(const attention *a) {
    int64_t weights = a->weighed ? ATTENTION_PAGE * (int64_t)sizeof(float) : 0;
    return attention_key_bytes(a->key_type, a->key_size) + attention_value_bytes(a->value_type, a->value_size) + weights;
}

/* Channels of a query, and of what it meets. */
static inline int64_t attention_query_size(const attention *a) { return a->key_size + (a->latent ? a->value_size : 0); }

/* Floats of a row of `qkv`: heads h + kv_heads h + kv_heads v; of latent heads v, heads h, v, h; of shared heads h. */
static inline int64_t attention_row_width(const attention *a) {
    int64_t own = a->shared ? 0 : (int64_t)a->kv_heads * (a->key_size + a->value_size);
    return a->heads * attention_query_size(a) + own;
}

/* What write needs for one row, a query, a key or a value and its quantized bytes: a multiple of 64. */
static inline int64_t attention_row_bytes(const attention *a) {
    int64_t query = attention_query_size(a), size = query > a->value_size ? query : a->value_size;
    return (size + 63) / 64 * 64 * 5;
}

/* Bytes of a query in working memory: its channels, of int8 keys after a scale and a sum. */
static inline int64_t attention_query_bytes(const attention *a) {
    if (a->key_type == ATTENTION_INT8 && !a->latent) return 8 + ((int64_t)a->key_size + 3) / 4 * 4;
    return attention_query_size(a) * 4;
}

/* What a pass costs, as bytes that could be read in its time: what a caller weighs threads by. */
int64_t attention_cost(const attention *a);
/* A pass cut into at most `wanted` jobs. Its memory is still to be given. */
attention_plan attention_plan_of(const attention *a, int64_t wanted);
/* Gives a plan its memory, plan->bytes of it, before the first write. */
void attention_start(const attention *a, attention_plan *plan, void *memory);

/* Lays out a job's memory; returns its bytes. For the kernels. */
size_t attention_lay_out(const attention *a, const attention_plan *plan, char *memory, attention_bench *out);

/* The functions for an instruction set: its own, or the portable ones. */
const attention_path *attention_path_of(const lowbit_isa *isa);

extern const attention_path attention_portable;

#ifdef __cplusplus
}
#endif
#endif
