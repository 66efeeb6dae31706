/* Writing rows: norm, rotation, transform, quantization, storing; knows nothing of blocks and scores.
 *
 * Part of attention.inc.h.
 */

/* The Hadamard transform of blocks of the largest power of two that divides n, at most 128. */
static void transform(float *x, int64_t n) {
    int64_t block = n & -n;
    if (block > 128) block = 128;
    if (block == 1) return;
    for (int64_t span = 1; span < block; span *= 2)
        for (int64_t start = 0; start < n; start += 2 * span)
            for (int64_t i = start; i < start + span; i++) {
                float a = x[i], b = x[i + span];
                x[i] = a + b;
                x[i + span] = a - b;
            }
    const float factor = (float)(1.0 / sqrt((double)block));
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

static inline int transformed(int32_t type) { return type == ATTENTION_INT8 || type == ATTENTION_INT4; }

static void rotate(const attention *a, int64_t row, float *x) {
    const int64_t half = a->rotary / 2, at = half ? a->positions[row] * half : 0;
    const int64_t step = a->interleaved ? 2 : 1, apart = a->interleaved ? 1 : half;
    for (int64_t i = 0; i < half; i++) {
        float c = a->cosines[at + i], s = a->sines[at + i], *left = x + i * step, *right = left + apart;
        float l = *left, r = *right;
        *left = l * c - r * s;
        *right = r * c + l * s;
    }
}

static void scale_by(float *x, int64_t n, float factor, const float *weight) {
    for (int64_t i = 0; i < n; i++) x[i] = x[i] * factor * weight[i];
}

/* Takes the bias of a key off its channels that hardly turn, as it is at position 0. */
static void centre(const attention *a, const float *bias, float *x) {
    const int64_t half = a->rotary / 2, step = a->interleaved ? 2 : 1, apart = a->interleaved ? 1 : half;
    for (int64_t i = a->still; i < half; i++) {
        x[i * step] -= bias[i * step] * a->cosines[i];
        x[i * step + apart] -= bias[i * step + apart] * a->cosines[i];
    }
    for (int64_t i = a->rotary; i < a->key_size; i++) x[i] -= bias[i];
}

/* Head `head` of `count` of a row's queries or keys `x`, normalised, rotated, less what keys of a bias have in common,
 * and turned. `whole` is the inverse norm of all of them. */
static void prepare(const attention *a, int64_t row, const float *x, int64_t head, const float *norm, float whole,
                    const float *bias, float *out) {
    const int64_t h = a->key_size;
    memcpy(out, x + head * h, (size_t)h * sizeof(float));
    if (norm && !a->norm_after) {
        float inverse = a->norm_whole ? whole : inverse_norm(out, h, a->norm_epsilon);
        scale_by(out, h, inverse, a->norm_whole ? norm + head * h : norm);
    }
    if (a->cosines) rotate(a, row, out);
    if (norm && a->norm_after) scale_by(out, h, inverse_norm(out, h, a->norm_epsilon), norm);
    if (!transformed(a->key_type)) return;
    if (bias) centre(a, bias + head * h, out);
    transform(out, h);
}

enum { QUANT_GROUP = 16 };

/* 16 channels as 4 bits each with a scale and a zero point in levels; returns the squared error. */
static float quantize_range(const float *x, float scale, float inverse, float zero, uint8_t *q) {
    const float shift = zero * 0.25f;
    float errors[QUANT_GROUP];
    for (int i = 0; i < QUANT_GROUP; i++) {
        float level = x[i] * inverse + shift;
        level = level < 0.0f ? 0.0f : level > 15.0f ? 15.0f : level;
        level = level + ROUNDER - ROUNDER;
        q[i] = (uint8_t)(int32_t)level;
        float error = x[i] - (level - shift) * scale;
        errors[i] = error * error;
    }
    for (int half = QUANT_GROUP / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) errors[i] += errors[i + half];
    return errors[0];
}

/* 16 channels as 4 bits each; returns their word: 10 bits of scale, 6 of zero point. Of nine ranges, each a little
 * narrower than the channels at one end or both, the one of the least squared error is taken. */
static uint16_t quantize_group(const float *x, uint8_t *q) {
    static const float SHARES[5] = {(float)(1.0 / 15.0), (float)(0.98 / 15.0), (float)(0.96 / 15.0),
                                    (float)(0.94 / 15.0), (float)(0.92 / 15.0)};
    static const float RAISES[3] = {0.0f, 0.02f, 0.04f};
    float low = 0.0f, high = 0.0f;
    uint32_t top = 0;
    for (int i = 0; i < QUANT_GROUP; i++) {
        uint32_t magnitude = float_bits(x[i]) & 0x7fffffffu;
        top = magnitude > top ? magnitude : top;
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    const float width = high - low;
    memset(q, 0, QUANT_GROUP);
    /* Whatever its queries are, the score of a value that is not finite is not a number. */
    if (top >= 0x7f800000u || (float_bits(width) & 0x7fffffffu) >= 0x7f800000u) return 0xffc0u;
    float scales[5], inverses[5];
    uint32_t halves[5];
    for (int k = 0; k < 5; k++) {
        float scale = width * SHARES[k];
        uint32_t bits = (half_of(scale > 65472.0f ? 65472.0f : scale) + 16u) & 0x7fe0u;
        halves[k] = bits > 0x7be0u ? 0x7be0u : bits;
        scales[k] = float_of((uint16_t)halves[k]);
        inverses[k] = halves[k] ? 1.0f / scales[k] : 0.0f;
    }
    uint16_t word = 0;
    float least = 0.0f;
    for (int range = 0; range < 9; range++) {
        const int k = range / 3 + range % 3;
        const float scale = scales[k], inverse = inverses[k];
        float zero = -(low + width * RAISES[range / 3]) * inverse * 4.0f;
        zero = zero < 0.0f ? 0.0f : zero > 63.0f ? 63.0f : zero;
        zero = zero + ROUNDER - ROUNDER;
        uint8_t levels[QUANT_GROUP];
        const float error = quantize_range(x, scale, inverse, zero, levels);
        if (range == 0 || error < least) {
            least = error;
            memcpy(q, levels, QUANT_GROUP);
            word = (uint16_t)(halves[k] << 1 | (uint32_t)(int32_t)zero);
        }
    }
    return word;
}

/* A row quantized to 4 bits: its groups' words at `words`; q has room for a multiple of 16, its padding becomes 0. */
static void quantize_groups(const float *x, int64_t n, uint8_t *q, uint8_t *words) {
    for (int64_t start = 0; start < n; start += QUANT_GROUP) {
        const int64_t count = smaller(n - start, QUANT_GROUP);
        float group[QUANT_GROUP] = {0};
        memcpy(group, x + start, (size_t)count * sizeof(float));
        const uint16_t word = quantize_group(group, q + start);
        for (int64_t i = count; i < QUANT_GROUP; i++) q[start + i] = 0;
        memcpy(words + start / QUANT_GROUP * 2, &word, sizeof word);
    }
}

static void put_float(uint8_t *at, float x) { memcpy(at, &x, sizeof x); }
static void put_half(uint8_t *at, float x) {
    uint16_t half = half_of(x);
    memcpy(at, &half, sizeof half);
}

/* Stores a key of h channels at position `s` of the keys of a head; `q` is room for as many bytes, rounded up to 64. */
static void store_key(int32_t type, uint8_t *keys, int64_t s, const float *x, int64_t h, uint8_t *q) {
    const int64_t tile = s / ATTENTION_TILE, lane = s % ATTENTION_TILE, fours = (h + 3) / 4, eights = (h + 7) / 8;
    if (type == ATTENTION_FLOAT32) {
        for (int64_t c = 0; c < h; c++) put_float(keys + ((tile * h + c) * ATTENTION_TILE + lane) * 4, x[c]);
    } else if (type == ATTENTION_FLOAT16) {
        for (int64_t c = 0; c < h; c++) put_half(keys + ((tile * h + c) * ATTENTION_TILE + lane) * 2, x[c]);
    } else if (type == ATTENTION_INT8) {
        float scale;
        int32_t sum;
        quantize_block(x, (int32_t)h, (int8_t *)q, &scale, &sum);
        for (int64_t i = h; i % 4; i++) q[i] = 0;
        for (int64_t g = 0; g < fours; g++) memcpy(keys + ((tile * fours + g) * ATTENTION_TILE + lane) * 4, q + g * 4, 4);
        put_float(keys + ATTENTION_PAGE * fours * 4 + s * 4, scale);
    } else {
        uint8_t *words = keys + ATTENTION_PAGE * eights * 4 + s * ((h + 15) / 16) * 2;
        quantize_groups(x, h, q, words);
        for (int64_t g = 0; g < eights; g++)
            for (int64_t c = 0; c < 4; c++)
                keys[((tile * eights + g) * ATTENTION_TILE + lane) * 4 + c] = (uint8_t)(q[g * 8 + c] | q[g * 8 + 4 + c] << 4);
    }
}

/* Where the int8 of a position lies among those of its four: 0, 2, 1, 3, so that the first and the third byte make the
 * first pair of 16 bits, and the others the second. */
static inline int64_t byte_of_four(int64_t s) { return s % 2 * 2 + s / 2 % 2; }

/* Stores a value of v channels at position `s` of the values of a head. */
static void store_value(int32_t type, uint8_t *values, int64_t s, const float *x, int64_t v, uint8_t *q) {
    const int64_t padded = (v + ATTENTION_TILE - 1) / ATTENTION_TILE * ATTENTION_TILE;
    if (type == ATTENTION_FLOAT32) {
        memcpy(values + s * padded * 4, x, (size_t)v * 4);
    } else if (type == ATTENTION_FLOAT16) {
        for (int64_t c = 0; c < v; c++) put_half(values + (s * padded + c) * 2, x[c]);
    } else if (type == ATTENTION_INT8) {
        float scale;
        int32_t sum;
        quantize_block(x, (int32_t)v, (int8_t *)q, &scale, &sum);
        uint8_t *at = values + s / 4 * padded * 4 + byte_of_four(s);
        for (int64_t c = 0; c < v; c++) at[c * 4] = q[c];
        put_float(values + ATTENTION_PAGE * padded + s * 4, scale);
    } else {
        uint8_t *bytes = values + s * (padded / 2);
        quantize_groups(x, v, q, values + ATTENTION_PAGE * padded / 2 + s * ((v + 15) / 16) * 2);
        for (int64_t run = 0; run < padded; run += 32) {
            int64_t half = smaller(padded - run, 32) / 2;
            for (int64_t c = 0; c < half; c++) bytes[run / 2 + c] = (uint8_t)(q[run + c] | q[run + half + c] << 4);
        }
    }
}

/* The slot of a row: the last of its path, or the one that it names. */
static int64_t own_slot(const attention *a, int64_t row) {
    const int32_t *r = a->rows + row * ATTENTION_ROW;
    int32_t extras = r[ATTENTION_EXTRAS];
    if (extras < 0) return r[ATTENTION_FIRST_EXTRA];
    return extras ? a->extras[r[ATTENTION_FIRST_EXTRA] + extras - 1] : r[ATTENTION_PREFIX] - 1;
}

/* The keys of a head, followed by its values, of the page that holds a slot. */
static uint8_t *head_at(const attention *a, int64_t sequence, int64_t slot, int64_t kv_head) {
    int64_t page = a->pages[sequence * a->columns + slot / ATTENTION_PAGE];
    return a->pool + page * a->page_bytes + a->offset + kv_head * attention_head_bytes(a);
}

/* Before the channels of a query in int8: its scale and the sum of its values. */
typedef struct {
    float scale;
    int32_t sum;
} query_head;

static uint8_t *queries_at(const attention *a, const attention_plan *plan, int64_t kv_head, int64_t row) {
    int64_t group = a->heads / a->kv_heads;
    return (uint8_t *)plan->memory + plan->queries_at + (kv_head * a->count + row) * group * attention_query_bytes(a);
}

/* Keeps a query for the products to come: as it is, or as its scale, its sum and int8, padded with zeros. */
static void store_query(const attention *a, const float *x, uint8_t *out) {
    const int64_t h = a->key_size;
    if (a->key_type != ATTENTION_INT8 || a->latent) {
        memcpy(out, x, (size_t)attention_query_size(a) * sizeof(float));
        return;
    }
    query_head head;
    uint8_t *values = out + sizeof head;
    quantize_block(x, (int32_t)h, (int8_t *)values, &head.scale, &head.sum);
    memcpy(out, &head, sizeof head);
    for (int64_t i = h; i % 4; i++) values[i] = 0;
}

/* Where values are part of the keys: each part of a query is turned like what it meets. */
static void write_latent_row(const attention *a, const attention_plan *plan, int64_t row) {
    const int64_t h = a->key_size, v = a->value_size, slot = own_slot(a, row), s = slot % ATTENTION_PAGE;
    const float *q = a->qkv + row * attention_row_width(a), *turning = q + a->heads * v, *value = turning + a->heads * h;
    uint8_t *room = (uint8_t *)plan->memory + plan->rows_at + (size_t)(row * attention_row_bytes(a));
    float *x = (float *)(void *)room;
    uint8_t *bytes = room + attention_row_bytes(a) / 5 * 4, *out = queries_at(a, plan, 0, row);
    for (int64_t i = 0; i < a->heads; i++) {
        memcpy(x, q + i * v, (size_t)v * sizeof(float));
        if (transformed(a->value_type)) transform(x, v);
        prepare(a, row, turning, i, NULL, 1.0f, NULL, x + v);
        store_query(a, x, out + i * attention_query_bytes(a));
    }
    uint8_t *at = head_at(a, a->rows[row * ATTENTION_ROW + ATTENTION_SEQUENCE], slot, 0);
    prepare(a, row, value + v, 0, NULL, 1.0f, NULL, x);
    store_key(a->key_type, at, s, x, h, bytes);
    memcpy(x, value, (size_t)v * sizeof(float));
    if (a->k_norm) scale_by(x, v, inverse_norm(x, v, a->norm_epsilon), a->k_norm);
    if (transformed(a->value_type)) transform(x, v);
    store_value(a->value_type, at + attention_key_bytes(a->key_type, a->key_size), s, x, v, bytes);
}

static void write_row(const attention *a, const attention_plan *plan, int64_t row) {
    const int64_t h = a->key_size, v = a->value_size, group = a->heads / a->kv_heads;
    const float *q = a->qkv + row * attention_row_width(a);
    const float *keys = q + a->heads * h, *values = keys + a->kv_heads * h;
    const float *bias = a->qkv_bias ? a->qkv_bias + a->heads * h : NULL;
    uint8_t *room = (uint8_t *)plan->memory + plan->rows_at + (size_t)(row * attention_row_bytes(a));
    float *x = (float *)(void *)room;
    uint8_t *bytes = room + attention_row_bytes(a) / 5 * 4;
    int whole = a->norm_whole;
    float q_inverse = a->q_norm && whole ? inverse_norm(q, a->heads * h, a->norm_epsilon) : 1.0f;
    float k_inverse = a->k_norm && whole && !a->shared ? inverse_norm(keys, a->kv_heads * h, a->norm_epsilon) : 1.0f;
    const int64_t sequence = a->rows[row * ATTENTION_ROW + ATTENTION_SEQUENCE], slot = own_slot(a, row);
    const int64_t s = slot % ATTENTION_PAGE, key_bytes = attention_key_bytes(a->key_type, a->key_size);
    for (int64_t kv = 0; kv < a->kv_heads; kv++) {
        uint8_t *out = queries_at(a, plan, kv, row);
        for (int64_t i = 0; i < group; i++) {
            prepare(a, row, q, kv * group + i, a->q_norm, q_inverse, NULL, x);
            store_query(a, x, out + i * attention_query_bytes(a));
        }
        if (a->shared) continue;
        uint8_t *at = head_at(a, sequence, slot, kv);
        prepare(a, row, keys, kv, a->k_norm, k_inverse, bias, x);
        store_key(a->key_type, at, s, x, h, bytes);
        memcpy(x, values + kv * v, (size_t)v * sizeof(float));
        if (a->value_norm) {
            float inverse = inverse_norm(x, v, a->norm_epsilon);
            for (int64_t i = 0; i < v; i++) x[i] *= inverse;
        }
        if (transformed(a->value_type)) transform(x, v);
        store_value(a->value_type, at + key_bytes, s, x, v, bytes);
        if (a->weighed) put_float(at + key_bytes + attention_value_bytes(a->value_type, a->value_size) + s * 4, 0.0f);
    }
}

static void write_rows(const attention *a, const attention_plan *plan, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++)
        if (a->latent) write_latent_row(a, plan, row);
        else write_row(a, plan, row);
}
