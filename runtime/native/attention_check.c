/* Whether a pass of attention can be computed: sizes, layout of pages, tables; knows nothing of values. */
#include "attention_check.h"

#include <stdio.h>

/* Beyond any model, and small enough that no product of two sizes overflows. */
enum { MOST_HEADS = 1 << 14, MOST_SIZE = 1 << 14 };
static const int64_t MOST_BYTES = (int64_t)1 << 48;

/* What is known of a page that a table names. */
typedef struct {
    uint64_t written; /* a bit for each position that a row of the pass writes */
    int64_t holders;  /* entries of tables that name it */
} page_state;

const char *attention_sizes_fault(const attention *a) {
    if (a->heads < 1 || a->heads > MOST_HEADS) return "num_heads must be between 1 and 2^14";
    if (a->kv_heads < 1 || a->heads % a->kv_heads) return "num_heads must be a multiple of kv_num_heads";
    if (a->key_size < 1 || a->key_size > MOST_SIZE || a->value_size < 1 || a->value_size > MOST_SIZE)
        return "key_size and value_size must be between 1 and 2^14";
    if (a->rotary < 0 || a->rotary % 2 || a->rotary > a->key_size)
        return "rotary_dim must be even, and at most key_size";
    if (a->still < 0 || a->still > a->rotary / 2) return "still must be a rotated pair";
    if (a->latent && (a->kv_heads != 1 || a->norm_after || a->value_norm))
        return "latent attention has one kv head, and no norm_after or value_norm";
    if (a->window < 0) return "window must not be negative";
    if (!(a->softcap >= 0)) return "softcap must not be negative";
    return NULL;
}

const char *attention_set_layout(attention *a, const int64_t *layout, int64_t count, int64_t layer,
                                 const attention_bounds *bounds) {
    if (count < 3 || layer < 0 || layer >= count - 3) return "layout does not have the layer";
    const int64_t keys = layout[0] & ~(int64_t)ATTENTION_WEIGHED;
    if (keys < 0 || keys >= ATTENTION_TYPES || layout[1] < 0 || layout[1] >= ATTENTION_TYPES)
        return "layout names a type that is not known";
    a->weighed = keys != layout[0];
    if (a->weighed && a->latent) return "positions of latent attention cannot be weighed";
    a->key_type = (int32_t)keys, a->value_type = (int32_t)layout[1];
    a->page_bytes = layout[2], a->offset = layout[3 + layer];
    if (a->page_bytes < 1 || a->page_bytes % 4096 || a->page_bytes > MOST_BYTES)
        return "page_bytes must be a multiple of 4096";
    int64_t bytes = a->kv_heads * attention_head_bytes(a);
    if (a->offset < 0 || a->offset % 64 || bytes > a->page_bytes || a->offset > a->page_bytes - bytes)
        return "the layer does not fit into a page";
    if ((uintptr_t)a->pool % 64) return "the pool must begin at a multiple of 64 bytes";
    /* Tables name pages by 32 bits. */
    return bounds->pool / a->page_bytes > INT32_MAX ? "the pool has more than 2^31 pages" : NULL;
}

static int64_t pool_pages(const attention *a, const attention_bounds *bounds) { return bounds->pool / a->page_bytes; }

size_t attention_check_bytes(const attention *a, const attention_bounds *bounds) {
    return (size_t)pool_pages(a, bounds) * sizeof(page_state) + (size_t)bounds->sequences * sizeof(int64_t);
}

/* The page of a slot of a sequence, -1 where there is none. */
static int32_t page_of(const attention *a, int64_t sequence, int64_t slot) {
    return slot < a->columns * ATTENTION_PAGE ? a->pages[sequence * a->columns + slot / ATTENTION_PAGE] : -1;
}

/* Counts who holds each page, and the slots of each sequence before the first that has no page. Returns the index of an
 * entry that names a page outside the pool, -1 if none does. */
static int64_t count_holders(const attention *a, const attention_bounds *bounds, page_state *states, int64_t *leading) {
    int64_t pages = pool_pages(a, bounds);
    /* The pool may be far larger than what the tables name: only those pages have a state. */
    for (int64_t i = 0; i < bounds->sequences * a->columns; i++) {
        if (a->pages[i] < -1 || a->pages[i] >= pages) return i;
        if (a->pages[i] >= 0) states[a->pages[i]] = (page_state){0, 0};
    }
    for (int64_t s = 0; s < bounds->sequences; s++) {
        leading[s] = a->columns * ATTENTION_PAGE;
        for (int64_t p = a->columns - 1; p >= 0; p--) {
            int32_t page = a->pages[s * a->columns + p];
            if (page < 0) leading[s] = p * ATTENTION_PAGE;
            if (page >= 0) states[page].holders++;
        }
    }
    return -1;
}

static const char *extras_fault(const attention *a, const attention_bounds *bounds, const int32_t *row) {
    int64_t first = row[ATTENTION_FIRST_EXTRA], count = row[ATTENTION_EXTRAS], before = row[ATTENTION_PREFIX] - 1;
    if (count == -1) {
        int known = first >= 0 && page_of(a, row[ATTENTION_SEQUENCE], first) >= 0;
        return known ? NULL : "names a slot that has no page";
    }
    if (count < 0) return "has a negative number of extras";
    if (count && (first < 0 || first > bounds->extras - count)) return "has extras outside the list of extras";
    for (int64_t i = 0; i < count; i++) {
        int64_t slot = a->extras[first + i];
        if (slot <= before) return "has extras that do not ascend after its prefix";
        if (page_of(a, row[ATTENTION_SEQUENCE], slot) < 0) return "has an extra that has no page";
        before = slot;
    }
    return NULL;
}

static const char *row_fault(const attention *a, const attention_bounds *bounds, const int64_t *leading, int64_t r) {
    const int32_t *row = a->rows + r * ATTENTION_ROW;
    int64_t sequence = row[ATTENTION_SEQUENCE], prefix = row[ATTENTION_PREFIX];
    if (sequence < 0 || sequence >= bounds->sequences) return "is of a sequence that has no table";
    if (prefix < 0) return "has a negative prefix";
    if (prefix > leading[sequence]) return "has a prefix that goes beyond its pages";
    if (!prefix && row[ATTENTION_EXTRAS] <= 0) return "has no slot of its own";
    if (a->cosines && (a->positions[r] < 0 || a->positions[r] >= bounds->positions))
        return "has a position outside cos and sin";
    return extras_fault(a, bounds, row);
}

/* Notes what a row writes: its own slot. */
static const char *write_fault(const attention *a, page_state *states, int64_t r) {
    const int32_t *row = a->rows + r * ATTENTION_ROW;
    int64_t slot = row[ATTENTION_PREFIX] - 1, count = row[ATTENTION_EXTRAS];
    if (count < 0) slot = row[ATTENTION_FIRST_EXTRA];
    if (count > 0) slot = a->extras[row[ATTENTION_FIRST_EXTRA] + count - 1];
    page_state *state = &states[page_of(a, row[ATTENTION_SEQUENCE], slot)];
    uint64_t bit = (uint64_t)1 << slot % ATTENTION_PAGE;
    if (state->holders > 1) return "writes to a page that is held twice";
    if (state->written & bit) return "writes to a slot that another row writes";
    state->written |= bit;
    return NULL;
}

int attention_check(const attention *a, const attention_bounds *bounds, void *memory, char message[ATTENTION_MESSAGE]) {
    page_state *states = memory;
    int64_t *leading = (int64_t *)(void *)(states + pool_pages(a, bounds));
    int64_t entry = count_holders(a, bounds, states, leading);
    if (entry >= 0) {
        snprintf(message, ATTENTION_MESSAGE, "page %d of sequence %lld is outside the pool", (int)a->pages[entry],
                 (long long)(entry / a->columns));
        return 0;
    }
    for (int64_t r = 0; r < a->count; r++) {
        const char *fault = row_fault(a, bounds, leading, r);
        if (!fault) fault = write_fault(a, states, r);
        if (fault) return snprintf(message, ATTENTION_MESSAGE, "row %lld %s", (long long)r, fault), 0;
    }
    return 1;
}
