/* Reading pages: unpacking what is not float32, and gathering positions that lie apart; knows nothing of scores.
 *
 * Part of attention.inc.h.
 */

/* Sizes of one head's part of a page. */
typedef struct {
    int64_t h, v, padded, met;   /* channels; those of values with padding; those that a query meets */
    int integer_keys, integer_values; /* whether they are multiplied as integers */
    int64_t key_bytes, query_bytes, fours, eights, key_groups, value_groups;
    int64_t weights_at;          /* where the weights of positions begin; 0: they have none */
} head_layout;

static head_layout layout_of(const attention *a) {
    head_layout l = {.h = a->key_size, .v = a->value_size};
    l.padded = (l.v + ATTENTION_TILE - 1) / ATTENTION_TILE * ATTENTION_TILE;
    l.met = attention_query_size(a);
    l.integer_keys = a->key_type == ATTENTION_INT8 && !a->latent;
    l.integer_values = a->value_type == ATTENTION_INT8 && !a->latent;
    l.key_bytes = attention_key_bytes(a->key_type, a->key_size);
    l.query_bytes = attention_query_bytes(a);
    l.weights_at = a->weighed ? l.key_bytes + attention_value_bytes(a->value_type, a->value_size) : 0;
    l.fours = (l.h + 3) / 4, l.eights = (l.h + 7) / 8;
    l.key_groups = (l.h + 15) / 16, l.value_groups = (l.v + 15) / 16;
    return l;
}

/* Words of 16 groups: 4 bits q of a group stand for fma(q, scale, minimum), where product and sum are exact. Words
 * beyond `count` are taken for 0. */
static void read_words(const uint8_t *at, int64_t count, float *scales, float *minima) {
    uint16_t words[LANES] = {0}, halves[LANES];
    int8_t zeros[LANES];
    memcpy(words, at, (size_t)smaller(count, LANES) * sizeof *words);
    for (int i = 0; i < LANES; i++) halves[i] = words[i] >> 1 & 0x7fe0u, zeros[i] = (int8_t)(words[i] & 63);
    const vec scale = vec_halves((const uint8_t *)halves), zero = vec_int8(zeros);
    vec_store(scales, scale);
    vec_store(minima, vec_mul(vec_mul(zero, vec_set(-0.25f)), scale));
}

static void unpack_key_tile_int4(const head_layout *l, const uint8_t *keys, int64_t tile, intptr_t ahead, float *out) {
    const uint8_t *bytes = keys + tile * l->eights * 64;
    const uint8_t *words = keys + ATTENTION_PAGE * l->eights * 4 + tile * ATTENTION_TILE * l->key_groups * 2;
    for (int64_t group = 0; group < l->key_groups; group++) {
        uint8_t column[2 * ATTENTION_TILE];
        float scales[ATTENTION_TILE], minima[ATTENTION_TILE];
        for (int64_t i = 0; i < ATTENTION_TILE; i++) memcpy(column + 2 * i, words + (i * l->key_groups + group) * 2, 2);
        read_words(column, ATTENTION_TILE, scales, minima);
        const vec scale = vec_load(scales), minimum = vec_load(minima);
        for (int64_t c = group * 16; c < smaller(l->h, group * 16 + 16); c++) {
            const uint8_t *from = bytes + c / 8 * 64;
            if (c % 8 == 0) vec_fetch((intptr_t)from + ahead);
            vec q = vec_nibbles(from, (int)(c % 4), (int)(c % 8 / 4));
            vec_store(out + c * ATTENTION_TILE, vec_fma(q, scale, minimum));
        }
    }
}

static void unpack_key_tile_int8(const head_layout *l, const uint8_t *keys, int64_t tile, float *out) {
    const int8_t *levels = (const int8_t *)keys + tile * l->fours * 64;
    const vec scales = vec_load_bytes(keys + ATTENTION_PAGE * l->fours * 4 + tile * 64);
    for (int64_t c = 0; c < l->h; c++) {
        int8_t column[LANES];
        for (int i = 0; i < LANES; i++) column[i] = levels[c / 4 * 64 + i * 4 + c % 4];
        vec_store(out + c * ATTENTION_TILE, vec_mul(vec_int8(column), scales));
    }
}

/* Keys of tiles first..last-1 of a page as float32: (tiles, h, 16), each tile at the end of its own place. */
static void unpack_keys(int32_t type, const head_layout *l, const uint8_t *keys, int64_t first, int64_t last,
                        intptr_t ahead, float *out) {
    const int64_t tile_size = l->h * ATTENTION_TILE;
    for (int64_t tile = first; tile < last; tile++) {
        float *to = out + ((tile + 1) * l->met - l->h) * ATTENTION_TILE;
        if (type == ATTENTION_FLOAT16) {
            const uint8_t *from = keys + tile * tile_size * 2;
            for (int64_t i = 0; i < tile_size; i += ATTENTION_TILE) {
                vec_fetch((intptr_t)(from + i * 2) + ahead);
                vec_store(to + i, vec_halves(from + i * 2));
            }
        } else if (type == ATTENTION_INT4) {
            unpack_key_tile_int4(l, keys, tile, ahead, to);
        } else if (type == ATTENTION_INT8) {
            unpack_key_tile_int8(l, keys, tile, to);
        } else {
            memcpy(to, keys + tile * tile_size * 4, (size_t)tile_size * 4);
        }
    }
}

static void unpack_values_int4(const head_layout *l, const uint8_t *values, int64_t first, int64_t last, intptr_t ahead,
                               float *out) {
    const int64_t groups = l->value_groups, half = l->padded / 2;
    const uint8_t *words = values + ATTENTION_PAGE * half;
    float scales[LANES], minima[LANES];
    int64_t used = LANES;
    for (int64_t s = first; s < last; s++) {
        const uint8_t *bytes = values + s * half;
        vec_fetch((intptr_t)bytes + ahead);
        for (int64_t group = 0; group < groups; group++, used++) {
            const int64_t word = s * groups + group;
            if (used == LANES) read_words(words + word * 2, last * groups - word, scales, minima), used = 0;
            /* 16 channels of a run of 32 fill one half of its bytes, those of a run of 16 both of 8 bytes. */
            const uint8_t *run = bytes + group / 2 * 16;
            vec q = group % 2 == 0 && group + 1 == groups ? vec_eight(run) : vec_halves_of(run, (int)(group % 2));
            vec_store(out + s * l->padded + group * 16, vec_fma(q, vec_set(scales[used]), vec_set(minima[used])));
        }
    }
}

/* Values of positions first..last-1 of a page as float32: (positions, v with padding), each at its own place. */
static void unpack_values(int32_t type, const head_layout *l, const uint8_t *values, int64_t first, int64_t last,
                          intptr_t ahead, float *out) {
    const int64_t padded = l->padded;
    if (type == ATTENTION_INT4) {
        unpack_values_int4(l, values, first, last, ahead, out);
        return;
    }
    if (type == ATTENTION_INT8) {
        for (int64_t s = first; s < last; s++) {
            float scale;
            memcpy(&scale, values + ATTENTION_PAGE * padded + s * 4, sizeof scale);
            const uint8_t *row = values + s / 4 * padded * 4 + byte_of_four(s);
            for (int64_t c = 0; c < padded; c += LANES) {
                int8_t levels[LANES];
                for (int i = 0; i < LANES; i++) levels[i] = (int8_t)row[(c + i) * 4];
                vec_store(out + s * padded + c, vec_mul(vec_int8(levels), vec_set(scale)));
            }
        }
        return;
    }
    for (int64_t i = first * padded; i < last * padded; i += LANES) {
        vec_fetch((intptr_t)(values + i * 2) + ahead);
        vec_store(out + i, vec_halves(values + i * 2));
    }
}

/* What queries meet of tiles first..last-1 of a page where values are part of the keys: (tiles, v + h, 16). */
static void unpack_latent(const attention *a, const head_layout *l, const uint8_t *page, int64_t first, int64_t last,
                          intptr_t ahead, const attention_bench *w) {
    const float *values = (const float *)(const void *)(page + l->key_bytes);
    if (a->value_type != ATTENTION_FLOAT32) {
        unpack_values(a->value_type, l, page + l->key_bytes, first * ATTENTION_TILE, last * ATTENTION_TILE, ahead, w->values);
        values = w->values;
    }
    /* The last vectors of a tile reach into the place of its keys, or into the next tile, which are written after. */
    for (int64_t tile = first; tile < last; tile++)
        for (int64_t c = 0; c < l->v; c += LANES)
            vec_transpose(values + tile * ATTENTION_TILE * l->padded + c, l->padded,
                          w->keys + (tile * l->met + c) * ATTENTION_TILE);
    unpack_keys(a->key_type, l, page, first, last, ahead, w->keys);
}

/* Copies `count` pieces of `size` bytes, `step` apart in both. */
static void copy_pieces(uint8_t *to, const uint8_t *from, int64_t count, int64_t size, int64_t step) {
    for (int64_t i = 0; i < count; i++) memcpy(to + i * step, from + i * step, (size_t)size);
}

/* Copies the key and the value at place `from` of a head's page to place `to` of another, as they are stored. */
static void copy_position(const attention *a, const head_layout *l, const uint8_t *page, int64_t from, uint8_t *out,
                          int64_t to) {
    const int64_t f = from / ATTENTION_TILE, fl = from % ATTENTION_TILE, t = to / ATTENTION_TILE, tl = to % ATTENTION_TILE;
    const uint8_t *values = page + l->key_bytes;
    uint8_t *out_values = out + l->key_bytes;
    if (a->key_type == ATTENTION_FLOAT32 || a->key_type == ATTENTION_FLOAT16) {
        const int64_t size = a->key_type == ATTENTION_FLOAT32 ? 4 : 2;
        copy_pieces(out + (t * l->h * ATTENTION_TILE + tl) * size, page + (f * l->h * ATTENTION_TILE + fl) * size, l->h,
                    size, ATTENTION_TILE * size);
    } else {
        const int64_t groups = a->key_type == ATTENTION_INT8 ? l->fours : l->eights, end = ATTENTION_PAGE * groups * 4;
        const int64_t extra = a->key_type == ATTENTION_INT8 ? 4 : l->key_groups * 2;
        copy_pieces(out + t * groups * 64 + tl * 4, page + f * groups * 64 + fl * 4, groups, 4, 64);
        memcpy(out + end + to * extra, page + end + from * extra, (size_t)extra);
    }
    static const int64_t EIGHTHS[ATTENTION_TYPES] = {8 * 4, 8 * 2, 8, 4};
    const int64_t size = l->padded * EIGHTHS[a->value_type] / 8, end = ATTENTION_PAGE * size;
    const int64_t extra = a->value_type == ATTENTION_INT8 ? 4 : a->value_type == ATTENTION_INT4 ? l->value_groups * 2 : 0;
    if (a->value_type == ATTENTION_INT8)
        copy_pieces(out_values + to / 4 * size * 4 + byte_of_four(to), values + from / 4 * size * 4 + byte_of_four(from),
                    size, 1, 4);
    else
        memcpy(out_values + to * size, values + from * size, (size_t)size);
    memcpy(out_values + end + to * extra, values + end + from * extra, (size_t)extra);
    if (l->weights_at) memcpy(out + l->weights_at + to * 4, page + l->weights_at + from * 4, 4);
}

/* Gathers positions first..last-1 of a row's path, which all lie in one page of it, into a page of their own. */
static void gather(const attention *a, const head_layout *l, int64_t row, int64_t kv_head, int64_t first, int64_t last,
                   uint8_t *out) {
    const int32_t *r = a->rows + row * ATTENTION_ROW, *extras = a->extras + r[ATTENTION_FIRST_EXTRA];
    const int64_t prefix = r[ATTENTION_PREFIX];
    for (int64_t i = first; i < last; i++) {
        int64_t slot = i < prefix ? i : extras[i - prefix];
        copy_position(a, l, head_at(a, r[ATTENTION_SEQUENCE], slot, kv_head), slot % ATTENTION_PAGE, out,
                      i % ATTENTION_PAGE);
    }
}
