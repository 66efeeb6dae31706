/* Rows of a GGUF file's blocks moved into tiles and back, bit for bit; knows nothing of files.
 *
 * Both ways share one description of each type: 32 codes of a column are eight words of four bytes, a field of some bits
 * of which lies at the same place of as many bytes of the file, and in a few words of the tile.
 */
#include "gguf.h"

#include <string.h>

#include "exports.h"
#include "scratch.h"
#include "tile.h"

enum { WORDS = 8, MOST_RUNS = 8, TILE_RUN = LOWBIT_TILE * 4, NO_ROW = -1 };
/* Of a scale with which every code is finite in float32. */
enum { LARGEST_EXPONENT = 252 };

static const gguf_type types[] = {
    {GGUF_Q4_0, 32, 18, KIND_Q4_0, 4, 32},      {GGUF_Q4_1, 32, 20, KIND_Q4_1, 4, 32},
    {GGUF_Q5_0, 32, 22, KIND_Q5_0, 5, 32},      {GGUF_Q5_1, 32, 24, KIND_Q5_1, 5, 32},
    {GGUF_Q8_0, 32, 34, KIND_NONE, 8, 32},      {GGUF_Q2_K, 256, 84, KIND_Q2_K, 2, 32},
    {GGUF_Q3_K, 256, 110, KIND_Q3_K, 3, 32},    {GGUF_Q4_K, 256, 144, KIND_Q4_K, 4, 32},
    {GGUF_Q5_K, 256, 176, KIND_Q5_K, 5, 32},    {GGUF_Q6_K, 256, 210, KIND_Q6_K, 6, 32},
    {GGUF_IQ4_NL, 32, 18, KIND_IQ4_NL, 4, 32},  {GGUF_IQ4_XS, 256, 136, KIND_IQ4_XS, 4, 32},
    {GGUF_TQ1_0, 256, 54, KIND_NONE, 2, 128},   {GGUF_TQ2_0, 256, 66, KIND_NONE, 2, 128},
    {GGUF_MXFP4, 32, 17, KIND_MXFP4, 4, 32},    {GGUF_NVFP4, 64, 36, KIND_NVFP4, 4, 32},
    {GGUF_Q1_0, 128, 18, KIND_NONE, 2, 128},    {GGUF_Q2_0, 64, 18, KIND_NONE, 2, 64},
};

const gguf_type *gguf_find(int64_t number) {
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i].number == number) return &types[i];
    return NULL;
}

static uint32_t load(const uint8_t *at) {
    uint32_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

static void store(uint8_t *at, uint32_t word) { memcpy(at, &word, sizeof word); }

/* Moves bytes from the file to the tile, or back. */
INLINE void move(int back, uint8_t *file, uint8_t *tile, size_t bytes) { memcpy(back ? file : tile, back ? tile : file, bytes); }

/* A float16 likewise, with its sign turned where `turned` says so; whether it is finite. */
INLINE int move_half(int back, uint8_t *file, uint8_t *tile, int turned) {
    uint8_t half[2];
    memcpy(half, back ? tile : file, sizeof half);
    const int finite = (half[1] & 0x7c) != 0x7c;
    if (turned) half[1] ^= 0x80;
    memcpy(back ? file : tile, half, sizeof half);
    return finite;
}

/* A field of `bits` bits of some words: at `shift` of the file's bytes, at `up` of the codes. */
INLINE void field(int back, uint8_t *file, int shift, int bits, int up, uint32_t *codes, int count) {
    const uint32_t mask = ((1u << bits) - 1) * 0x01010101u;
    for (int i = 0; i < count; i++) {
        const uint32_t word = load(file + 4 * i);
        if (back)
            store(file + 4 * i, word | (codes[i] >> up & mask) << shift);
        else
            codes[i] |= (word >> shift & mask) << up;
    }
}

/* Nibbles of 2 * count words: the lower halves of the file's bytes, then the upper ones. */
INLINE void nibbles(int back, uint8_t *file, uint32_t *codes, int count) {
    field(back, file, 0, 4, 0, codes, count);
    field(back, file, 4, 4, 0, codes + count, count);
}

/* One bit of each of 32 codes, at `up`, in four bytes of the file. */
INLINE void single_bits(int back, uint8_t *file, int up, uint32_t *codes) {
    uint32_t bits = load(file);
    for (int i = 0; i < WORDS; i++)
        if (back)
            bits |= ((codes[i] >> up & 0x01010101u) * 0x01020408u >> 24 & 15) << 4 * i;
        else
            codes[i] |= ((bits >> 4 * i & 15) * 0x00204081u & 0x01010101u) << up;
    if (back) store(file, bits);
}

/* Two bits of each of 32 codes in eight bytes of the file. */
INLINE void double_bits(int back, uint8_t *file, uint32_t *codes) {
    for (int i = 0; i < WORDS; i++) {
        const uint32_t four = back ? codes[i] : file[i];
        if (back)
            file[i] = (uint8_t)((four & 3) | (four >> 6 & 12) | (four >> 12 & 48) | (four >> 18 & 192));
        else
            codes[i] = (four | four << 6 | four << 12 | four << 18) & 0x03030303u;
    }
}

/* Digit `place` of a ternary number in each of `count` bytes of the file; on the way back a number grows digit by digit. */
INLINE void digits(int back, uint8_t *file, int place, uint8_t *codes, int count) {
    static const uint8_t powers[] = {1, 3, 9, 27, 81};
    for (int i = 0; i < count; i++)
        if (back)
            file[i] = (uint8_t)(file[i] + codes[i] * powers[4 - place]);
        else
            codes[i] = (uint8_t)((uint8_t)(file[i] * powers[place]) * 3 >> 8);
}

/* A block of TQ1_0: 5 x 32 digits of 32 bytes, 5 x 16 of 16 bytes, 4 x 4 of 4 bytes. */
INLINE void ternary(int back, uint8_t *file, int64_t b, uint32_t *words) {
    uint8_t codes[LOWBIT_CHUNK];
    memcpy(codes, words, sizeof codes);
    if (b < 5) digits(back, file, (int)b, codes, 32);
    for (int half = 0; b >= 5 && half < 2; half++) {
        const int place = 2 * ((int)b - 5) + half;
        if (place < 5) digits(back, file + 32, place, codes + 16 * half, 16);
    }
    for (int place = 0; b == 7 && place < 4; place++) digits(back, file + 48, place, codes + 16 + 4 * place, 4);
    memcpy(words, codes, sizeof codes);
    /* A number of five digits is stored as a fraction of 243, rounded up to 256ths. */
    for (int i = 0; back && b == 7 && i < 52; i++) file[i] = (uint8_t)((file[i] * 256 + 242) / 243);
}

/* The codes of block b of 32 among 256 values that begin at `file`, as the file has them. */
INLINE void codes_of(int back, const gguf_type *type, uint8_t *file, int64_t b, uint32_t *codes) {
    const int64_t half = b / 4, quarter = b % 4, within = b % (type->values / 32);
    uint8_t *at = file + b * 32 / type->values * type->bytes;
    switch (type->number) {
        case GGUF_Q4_0:
        case GGUF_IQ4_NL: nibbles(back, at + 2, codes, 4); break;
        case GGUF_Q4_1: nibbles(back, at + 4, codes, 4); break;
        case GGUF_MXFP4: nibbles(back, at + 1, codes, 4); break;
        case GGUF_IQ4_XS: nibbles(back, at + 8 + 16 * b, codes, 4); break;
        case GGUF_Q5_0:
            nibbles(back, at + 6, codes, 4);
            single_bits(back, at + 2, 4, codes);
            break;
        case GGUF_Q5_1:
            nibbles(back, at + 8, codes, 4);
            single_bits(back, at + 4, 4, codes);
            break;
        case GGUF_NVFP4:
            nibbles(back, at + 4 + 16 * within, codes, 2);
            nibbles(back, at + 12 + 16 * within, codes + 4, 2);
            break;
        case GGUF_Q8_0: field(back, at + 2, 0, 8, 0, codes, WORDS); break;
        case GGUF_Q2_K: field(back, at + 16 + 32 * half, 2 * (int)quarter, 2, 0, codes, WORDS); break;
        case GGUF_TQ2_0: field(back, at + 32 * half, 2 * (int)quarter, 2, 0, codes, WORDS); break;
        case GGUF_Q3_K:
            field(back, at + 32 + 32 * half, 2 * (int)quarter, 2, 0, codes, WORDS);
            field(back, at, (int)b, 1, 2, codes, WORDS);
            break;
        case GGUF_Q4_K: field(back, at + 16 + 32 * (b / 2), 4 * (int)(b % 2), 4, 0, codes, WORDS); break;
        case GGUF_Q5_K:
            field(back, at + 48 + 32 * (b / 2), 4 * (int)(b % 2), 4, 0, codes, WORDS);
            field(back, at + 16, (int)b, 1, 4, codes, WORDS);
            break;
        case GGUF_Q6_K:
            field(back, at + 64 * half + 32 * (b % 2), 4 * (int)(quarter / 2), 4, 0, codes, WORDS);
            field(back, at + 128 + 32 * half, 2 * (int)quarter, 2, 4, codes, WORDS);
            break;
        case GGUF_TQ1_0: ternary(back, at, b, codes); break;
        case GGUF_Q1_0: single_bits(back, at + 2 + 4 * within, 1, codes); break;
        default: double_bits(back, at + 2 + 8 * within, codes); break;
    }
}

/* A field of one word of codes and one word of the tile. */
INLINE void part(int back, uint32_t *run, int shift, int bits, int up, uint32_t *codes) {
    const uint32_t mask = ((1u << bits) - 1) * 0x01010101u;
    if (back)
        *codes |= (*run >> shift & mask) << up;
    else
        *run |= (*codes >> up & mask) << shift;
}

/* Words of a column's block in a tile, by the places that spans.h describes. */
INLINE void arrange(int back, int bits, uint32_t *codes, uint32_t *runs) {
    for (int i = 0; i < WORDS; i++) {
        const int s = i / 4, v = i % 4;
        if (bits == 2) part(back, &runs[i % 2], 2 * (i / 2), 2, 0, &codes[i]);
        if (bits == 3) {
            part(back, &runs[s], 2 * v, 2, 0, &codes[i]);
            part(back, &runs[2], v / 2 * 4 + 2 * s + v % 2, 1, 2, &codes[i]);
        }
        if (bits >= 4) part(back, &runs[v], 4 * s, 4, bits == 8 ? 4 : 0, &codes[i]);
        if (bits == 5) part(back, &runs[4], i, 1, 4, &codes[i]);
        if (bits == 6) part(back, &runs[4 + v / 2], 2 * (2 * (v % 2) + s), 2, 4, &codes[i]);
        if (bits == 8) part(back, &runs[4 + v], 4 * s, 4, 0, &codes[i]);
    }
}

/* Six-bit scales of Q3_K less 32: four bits in eight bytes, two in four. */
static void scales3(int back, uint8_t *file, uint8_t *tile) {
    for (int g = 0; g < 16; g++) {
        uint8_t *low = &file[g % 8], *high = &file[8 + g % 4], *at = tile + g * SPAN_COLUMNS;
        const int low_shift = g / 8 * 4, high_shift = g / 4 * 2, scale = *at + 32;
        if (back) {
            *low |= (uint8_t)((scale & 15) << low_shift);
            *high |= (uint8_t)((scale >> 4 & 3) << high_shift);
        } else {
            *at = (uint8_t)((*low >> low_shift & 15) + (*high >> high_shift & 3) * 16 - 32);
        }
    }
}

/* Six-bit scales of IQ4_XS less 32: two bits in two bytes, four in the next four. */
static void scales4(int back, uint8_t *file, uint8_t *tile) {
    for (int b = 0; b < SPAN_BLOCKS; b++) {
        uint8_t *high = &file[b / 4], *low = &file[2 + b / 2], *at = tile + b * SPAN_COLUMNS;
        const int high_shift = b % 4 * 2, low_shift = b % 2 * 4, scale = *at + 32;
        if (back) {
            *low |= (uint8_t)((scale & 15) << low_shift);
            *high |= (uint8_t)((scale >> 4 & 3) << high_shift);
        } else {
            *at = (uint8_t)((*low >> low_shift & 15) + (*high >> high_shift & 3) * 16 - 32);
        }
    }
}

/* Bytes of a span's groups, one after the other in the file. */
INLINE void groups(int back, uint8_t *file, uint8_t *tile, int64_t count) {
    for (int64_t g = 0; g < count; g++) move(back, file + g, tile + g * SPAN_COLUMNS, 1);
}

/* Scales and minima of n blocks of a column; whether all are finite. */
static int head_of(int back, const gguf_type *type, uint8_t *file, uint8_t *head, int64_t n, int c) {
    const int32_t form = kinds[type->kind].head;
    uint8_t *halves = head + 2 * c, *bytes = head + 2 * SPAN_COLUMNS + c;
    int finite = 1;
    if (form == HEAD_SIXES) {
        finite = move_half(back, file, halves, 0) & move_half(back, file + 2, halves + 2 * SPAN_COLUMNS, 0);
        for (int w = 0; w < 3; w++) move(back, file + 4 + 4 * w, head + (4 + 4 * w) * SPAN_COLUMNS + 4 * c, 4);
    } else if (form == HEAD_NIBBLES) {
        groups(back, file, bytes + 2 * SPAN_COLUMNS, 2 * n);
        finite = move_half(back, file + 80, halves, 0) & move_half(back, file + 82, halves + 2 * SPAN_COLUMNS, 0);
    } else if (type->number == GGUF_Q6_K) {
        groups(back, file + 192, bytes, 2 * n);
        finite = move_half(back, file + 208, halves, 0);
    } else if (type->number == GGUF_Q3_K) {
        scales3(back, file + 96, bytes);
        finite = move_half(back, file + 108, halves, 0);
    } else if (type->number == GGUF_IQ4_XS) {
        scales4(back, file + 2, bytes);
        finite = move_half(back, file, halves, 0);
    } else if (form == HEAD_MINIFLOATS) {
        for (int64_t b = 0; b < n / 2; b++) groups(back, file + b * type->bytes, head + 4 * b * SPAN_COLUMNS + c, 4);
    } else {
        for (int64_t b = 0; b < n; b++, file += type->bytes) {
            if (form == HEAD_EXPONENTS) {
                move(back, file, head + b * SPAN_COLUMNS + c, 1);
                finite &= *file <= LARGEST_EXPONENT;
            } else {
                finite &= move_half(back, file, halves + 2 * b * SPAN_COLUMNS, 0);
            }
            if (form == HEAD_HALF_MINIMUM) finite &= move_half(back, file + 2, halves + 2 * (n + b) * SPAN_COLUMNS, 1);
        }
    }
    return finite;
}

/* Column c of a span of n blocks of a kind. */
INLINE int span_column(int back, const gguf_type *type, uint8_t *file, uint8_t *span, int64_t n, int c) {
    const kind_facts *kind = &kinds[type->kind];
    uint8_t *values = span + span_head(kind, n) + 4 * c;
    const int count = (int)(span_values(kind) / TILE_RUN);
    for (int64_t b = 0; b < n; b++, values += span_values(kind)) {
        uint32_t codes[WORDS] = {0}, runs[MOST_RUNS] = {0};
        if (back) {
            for (int r = 0; r < count; r++) runs[r] = load(values + r * TILE_RUN);
            arrange(back, type->bits, codes, runs);
        }
        codes_of(back, type, file, b, codes);
        if (!back) {
            arrange(back, type->bits, codes, runs);
            for (int r = 0; r < count; r++) store(values + r * TILE_RUN, runs[r]);
        }
    }
    return head_of(back, type, file, span, n, c);
}

/* What turns a file's code into ours, in each byte. */
INLINE uint32_t turned_by(const gguf_type *type) {
    return type->number == GGUF_Q8_0 ? 0x80808080u : type->number == GGUF_Q1_0 ? 0x01010101u : 0x03030303u;
}

/* Where the float16 scale of a file's block lies. */
INLINE int64_t scale_at(const gguf_type *type) {
    return type->number == GGUF_TQ1_0 || type->number == GGUF_TQ2_0 ? type->bytes - 2 : 0;
}

/* The words of a block of lowbit.h, of 8 or 2 bits. */
INLINE void arrange_plane(int back, const gguf_type *type, uint32_t *codes, uint32_t *runs) {
    const int sets = type->block / 4, apart = sets / 4;
    if (type->bits == 8) arrange(back, 8, codes, runs);
    for (int i = 0; type->bits == 2 && i < sets; i++) part(back, &runs[i % apart], 2 * (i / apart), 2, 0, &codes[i]);
}

/* Column c of a block of lowbit.h, number `at` of the matrix, and number `b` among 256 values that begin at `file`. */
INLINE int plane_column(int back, const gguf_type *type, const lowbit_matrix *w, uint8_t *file, int64_t b, int64_t at, int c) {
    const int sets = type->block / 4, count = type->bits == 8 ? WORDS : sets / 4;
    const uint32_t turned = turned_by(type);
    const int64_t place = at * (type->bits == 8 ? 4 : count) * TILE_RUN + 4 * c;
    uint8_t *data = (uint8_t *)(uintptr_t)w->data + place;
    uint8_t *low = type->bits == 8 ? (uint8_t *)(uintptr_t)w->low + place : data + 4 * TILE_RUN;
    uint32_t codes[4 * WORDS] = {0}, runs[MOST_RUNS] = {0};
    if (back) {
        for (int r = 0; r < count; r++) runs[r] = load((r < 4 ? data : low) + r % 4 * TILE_RUN);
        arrange_plane(back, type, codes, runs);
        for (int i = 0; i < sets; i++) codes[i] ^= turned;
    }
    for (int i = 0; i < sets; i += WORDS) codes_of(back, type, file, (b * sets + i) / WORDS, codes + i);
    if (!back) {
        for (int i = 0; i < sets; i++) codes[i] ^= turned;
        arrange_plane(back, type, codes, runs);
        for (int r = 0; r < count; r++) store((r < 4 ? data : low) + r % 4 * TILE_RUN, runs[r]);
    }
    uint8_t *scale = (uint8_t *)(uintptr_t)w->scales + 2 * (at * LOWBIT_TILE + c);
    uint8_t *own = file + b * type->block / type->values * type->bytes + scale_at(type);
    return move_half(back, own, scale, turned == 0x03030303u);
}

/* Moves rows (n, bytes of a row), gate before up where they are paired; the number of one whose scales are not finite. */
INLINE int64_t move_rows(int back, const gguf_type *type, const lowbit_matrix *w, uint8_t *rows) {
    const int64_t lanes = w->paired ? LOWBIT_GROUP : LOWBIT_TILE, count = w->paired ? w->n / 2 : w->n;
    const int64_t row_bytes = w->k / type->values * type->bytes, span_bytes_of_file = 256 / type->values * type->bytes;
    const int64_t blocks = w->k / LOWBIT_CHUNK, bytes = lowbit_tile_bytes(w);
    for (int64_t tile = 0; tile < lowbit_tiles(w); tile++)
        for (int64_t start = 0; start < blocks; start += SPAN_BLOCKS) {
            const int64_t n = blocks - start < SPAN_BLOCKS ? blocks - start : SPAN_BLOCKS;
            const int64_t first = (tile * blocks + start) * LOWBIT_CHUNK / w->block;
            for (int c = 0; c < LOWBIT_TILE; c++) {
                const int64_t within = tile * lanes + c % lanes, row = c / lanes * count + within;
                uint8_t *file = rows + row * row_bytes + start / SPAN_BLOCKS * span_bytes_of_file;
                int finite = 1;
                if (within >= count) continue;
                if (type->kind) {
                    uint8_t *span = (uint8_t *)(uintptr_t)w->data + tile * bytes;
                    span += start / SPAN_BLOCKS * span_bytes(&kinds[type->kind], SPAN_BLOCKS);
                    finite = span_column(back, type, file, span, n, c);
                }
                for (int64_t b = 0; !type->kind && b < n * LOWBIT_CHUNK / type->block; b++)
                    finite &= plane_column(back, type, w, file, b, first + b, c);
                if (!finite) return row;
            }
        }
    return NO_ROW;
}

/* A function of each type, of which the compiler knows the numbers: packing is what a user waits for. */
#define PACKED(place) \
    case place: return move_rows(0, &types[place], w, rows)

static int64_t to_tiles(const gguf_type *type, const lowbit_matrix *w, const uint8_t *given) {
    uint8_t *rows = (uint8_t *)(uintptr_t)given;
    switch (type - types) {
        PACKED(0);
        PACKED(1);
        PACKED(2);
        PACKED(3);
        PACKED(4);
        PACKED(5);
        PACKED(6);
        PACKED(7);
        PACKED(8);
        PACKED(9);
        PACKED(10);
        PACKED(11);
        PACKED(12);
        PACKED(13);
        PACKED(14);
        PACKED(15);
        PACKED(16);
        default: return move_rows(0, &types[17], w, rows);
    }
}

static int64_t to_rows(const gguf_type *type, const lowbit_matrix *w, uint8_t *rows) { return move_rows(1, type, w, rows); }

enum { IMPOSSIBLE = -2 };

/* Packs rows of a type's blocks as a matrix of its own into `bytes` (gguf_bytes), which are zero. -1, the number of the
 * first row found whose scales are not finite, or -2 where there is no such matrix. */
EDGEINFER_EXPORT int64_t edgeinfer_pack(int32_t number, const uint8_t *rows, int64_t n, int64_t k, int32_t paired,
                                        uint8_t *bytes) {
    const gguf_type *type = gguf_find(number);
    if (!type) return IMPOSSIBLE;
    const lowbit_matrix w = gguf_matrix(type, n, k, paired);
    if (matrix_fault(&w) || k % type->values) return IMPOSSIBLE;
    const lowbit_matrix placed = gguf_place(w, bytes);
    return to_tiles(type, &placed, rows);
}

/* Reverses edgeinfer_pack into `rows`, which are zero. */
EDGEINFER_EXPORT int64_t edgeinfer_unpack(int32_t number, const uint8_t *bytes, int64_t n, int64_t k, int32_t paired,
                                          uint8_t *rows) {
    const gguf_type *type = gguf_find(number);
    if (!type) return IMPOSSIBLE;
    const lowbit_matrix w = gguf_matrix(type, n, k, paired);
    if (matrix_fault(&w) || k % type->values) return IMPOSSIBLE;
    const lowbit_matrix placed = gguf_place(w, bytes);
    return to_rows(type, &placed, rows);
}

/* Rows of a type's blocks, dequantized: (n, k). Results as of edgeinfer_pack. */
EDGEINFER_EXPORT int64_t edgeinfer_dequantize(int32_t number, const uint8_t *rows, int64_t n, int64_t k, float *out) {
    const gguf_type *type = gguf_find(number);
    if (!type) return IMPOSSIBLE;
    lowbit_matrix w = gguf_matrix(type, LOWBIT_TILE, k, 0);
    if (matrix_fault(&w) || k % type->values) return IMPOSSIBLE;
    const size_t size = (size_t)gguf_bytes(&w);
    uint8_t *bytes = scratch_take(size);
    if (!bytes) return IMPOSSIBLE;
    int64_t wrong = NO_ROW;
    for (int64_t first = 0; first < n && wrong == NO_ROW; first += LOWBIT_TILE) {
        w.n = n - first < LOWBIT_TILE ? n - first : LOWBIT_TILE;
        const lowbit_matrix placed = gguf_place(w, bytes);
        memset(bytes, 0, size);
        wrong = to_tiles(type, &placed, rows + first * (k / type->values * type->bytes));
        if (wrong != NO_ROW) wrong += first;
        for (int64_t row = 0; wrong == NO_ROW && row < w.n; row++) lowbit_row(&placed, row, out + (first + row) * k);
    }
    scratch_give(bytes);
    return wrong;
}
