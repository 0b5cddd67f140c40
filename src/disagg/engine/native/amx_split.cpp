// Products of float32 rows with float16 or float32 weights on AMX, whose tiles multiply bfloat16 (8 bits).
//
// A float32 is exactly the sum of three bfloat16 of falling size, a float16 of two. So x w is a sum of products of
// parts, each of them exact. The smallest are left out (below 2^-22 of x w): five are done for a float16, six for a
// float32.
//
// A row's sums take inputs and parts in one order, whatever the number of rows: 32 inputs at a time, for each product of
// parts the even and the odd inputs apart, their sum onto the row's. That is what a tile instruction does; it takes
// numbers below 2^-126 as 0, and an infinite input makes its row's results NaN. Other instruction sets do not do it so.

#include "amx_tiles.h"
#include "kernels.h"
#include "scratch.h"

#include <algorithm>
#include <cstring>

namespace disagg {
namespace amx {

constexpr int64_t STEP = 32;                    // inputs of one tile instruction
constexpr int64_t TILE = 16 * 32;               // bfloat16 in a tile
constexpr int64_t ROW_PARTS = 3;                // parts of a float32
constexpr int64_t BLOCK_BYTES = 768 * 1024;     // of parts of weights of one job: they stay in the second cache
constexpr int64_t BLOCK_ROWS = 2 * TILE_ROWS;   // done together
constexpr int64_t MIN_PARALLEL = 1 << 17;       // multiplications below which threads do not pay
constexpr int64_t PREFETCH_BYTES = 16 * 1024;   // how far ahead weights are asked for, into the second cache

static inline __m512 load(const float *p) { return _mm512_loadu_ps(p); }
static inline __m512 load(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

template <class Weight>
constexpr int64_t num_parts = sizeof(Weight) == 2 ? 2 : 3;

// The upper 8 bits of each, and what is left. Cut off, not rounded: nothing overflows.
static inline __m512i upper(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0xFFFF0000)); }
static inline __m512 rest(__m512 x) { return _mm512_sub_ps(x, _mm512_castsi512_ps(upper(x))); }

// Parts of 32 weights to 32 words each, TILE apart: in pairs of inputs, as tiles want them.
template <int64_t PARTS>
static inline void split_pairs(__m512 even, __m512 odd, uint16_t *out) {
#pragma GCC unroll 3
    for (int64_t part = 0; part < PARTS; part++) {
        __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
        // low | (odd & mask), in one
        __m512i both = _mm512_ternarylogic_epi32(low, _mm512_castps_si512(odd), _mm512_set1_epi32(0xFFFF0000), 0xF8);
        _mm512_store_si512(out + part * TILE, both);
        if (part + 1 < PARTS) even = rest(even), odd = rest(odd);
    }
}

// Inputs [first, last) of a step of a panel: weights [STEP][PANEL] -> parts [half of the panel][part][TILE].
template <class Weight>
static inline void split_weights(const Weight *weights, int64_t first, int64_t last, uint16_t *out) {
    constexpr int64_t PARTS = num_parts<Weight>;
#pragma GCC unroll 4
    for (int64_t k = first; k < last; k += 2) {
        const Weight *even = weights + k * PANEL, *odd = even + PANEL;
        for (size_t byte = 0; byte < 2 * PANEL * sizeof(Weight); byte += 64)
            _mm_prefetch((const char *)even + byte + PREFETCH_BYTES, _MM_HINT_T1);
        for (int64_t half = 0; half < 2; half++)
            split_pairs<PARTS>(load(even + half * 16), load(odd + half * 16), out + half * PARTS * TILE + k * 16);
    }
}

// Weights [STEP][PANEL] of a panel's step. Those of inputs past the last are 0: `padded` holds them then.
template <class Weight>
static inline const Weight *step_of(const Product &p, int64_t panel, int64_t s, Weight *padded) {
    const Weight *weights = static_cast<const Weight *>(p.weights) + (panel * p.inputs + s * STEP) * PANEL;
    int64_t present = p.inputs - s * STEP;
    if (present >= STEP) return weights;
    std::memset(padded, 0, STEP * PANEL * sizeof(Weight));
    std::memcpy(padded, weights, present * PANEL * sizeof(Weight));
    return padded;
}

// Rows as parts: [tile of rows][step][part][row][STEP], zeros at the ends.
struct SplitRows {
    int64_t rows, steps;
    uint16_t *parts;

    uint16_t *at(int64_t row, int64_t step) const {
        return parts + (row / TILE_ROWS * steps + step) * ROW_PARTS * TILE + row % TILE_ROWS * STEP;
    }
    int64_t tile_stride() const { return steps * ROW_PARTS * TILE; }
};

static inline __m512i words(__m512 low, __m512 high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(low), 16))),
                              _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(high), 16)), 1);
}

static void split_row(const Product &p, const SplitRows &x, int64_t row) {
    for (int64_t s = 0; s < x.steps; s++) {
        float values[STEP] = {};
        int64_t present = row < p.rows ? std::min(STEP, p.inputs - s * STEP) : 0;
        if (present > 0) std::memcpy(values, p.x + row * p.inputs + s * STEP, present * sizeof(float));
        __m512 low = load(values), high = load(values + 16);
        for (int64_t part = 0; part < ROW_PARTS; part++) {
            _mm512_store_si512(x.at(row, s) + part * TILE, words(low, high));
            low = rest(low), high = rest(high);
        }
    }
}

// sums [rows][PANEL] + bias to a panel's columns of y
static void write_out(const Product &p, int64_t row, int64_t rows, int64_t panel, const float *sums) {
    int64_t columns = std::min(PANEL, p.outputs - panel * PANEL);
    for (int64_t r = 0; r < rows; r++) {
        float *to = p.y + (row + r) * p.outputs + panel * PANEL;
        for (int64_t c = 0; c < columns; c += 16) {
            __mmask16 present = columns - c >= 16 ? 0xFFFF : __mmask16((1u << (columns - c)) - 1);
            __m512 bias = p.bias ? load(p.bias + panel * PANEL + c) : _mm512_setzero_ps();
            _mm512_mask_storeu_ps(to + c, present, _mm512_add_ps(load(sums + r * PANEL + c), bias));
        }
    }
}

// Of every tile but the weights', which are 6 and 7.
static TileShapes shapes_of(int64_t rows) {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = 64;
        shapes.rows[i] = uint8_t(i < 6 ? rows : 16);
    }
    return shapes;
}

// Up to TILE_ROWS rows. Tiles 0 and 1 are sums of the halves of the panel, 2 to 4 parts of rows, 6 and 7 weights.

static inline void add_left(const uint16_t *w, int64_t part) {
    _tile_loadd(6, w, 64);
    if (part == 0) _tile_dpbf16ps(0, 3, 6);
    _tile_dpbf16ps(0, 2, 6);
    if (part == 1) _tile_dpbf16ps(0, 3, 6);
    if (part == 0) _tile_dpbf16ps(0, 4, 6);
}

static inline void add_right(const uint16_t *w, int64_t part) {
    _tile_loadd(7, w, 64);
    if (part == 0) _tile_dpbf16ps(1, 3, 7);
    _tile_dpbf16ps(1, 2, 7);
    if (part == 1) _tile_dpbf16ps(1, 3, 7);
    if (part == 0) _tile_dpbf16ps(1, 4, 7);
}

// Adds one step, and between its instructions splits the next one's weights (unless null): both at the same time.
template <class Weight, int64_t I = 0>
static inline void add_and_split(const uint16_t *now, const Weight *weights, uint16_t *next) {
    constexpr int64_t PARTS = num_parts<Weight>, PIECES = 2 * PARTS, PART = PARTS - 1 - I / 2;
    settle();
    if constexpr (I % 2 == 0)
        add_left(now + PART * TILE, PART);
    else
        add_right(now + (PARTS + PART) * TILE, PART);
    if (weights) split_weights(weights, I * 16 / PIECES * 2, (I + 1) * 16 / PIECES * 2, next);
    if constexpr (I + 1 < PIECES) add_and_split<Weight, I + 1>(now, weights, next);
}

template <class Weight>
static void few_rows(const Product &p, const SplitRows &x) {
    constexpr int64_t PARTS = num_parts<Weight>;
    alignas(64) uint16_t parts[2][2 * PARTS * TILE];
    alignas(64) float sums[TILE_ROWS * PANEL];
    Weight padded[STEP * PANEL];
    int64_t num_panels = (p.outputs + PANEL - 1) / PANEL;
    shape_tiles(shapes_of(p.rows));
#pragma omp for schedule(static)
    for (int64_t n = 0; n < num_panels; n++) {
        split_weights(step_of<Weight>(p, n, 0, padded), 0, STEP, parts[0]);
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t s = 0; s < x.steps; s++) {
            _tile_loadd(2, x.at(0, s), 64);
            _tile_loadd(3, x.at(0, s) + TILE, 64);
            _tile_loadd(4, x.at(0, s) + 2 * TILE, 64);
            const Weight *next = s + 1 < x.steps ? step_of<Weight>(p, n, s + 1, padded) : nullptr;
            add_and_split(parts[s % 2], next, parts[(s + 1) % 2]);
        }
        _tile_stored(0, sums, PANEL * 4);
        _tile_stored(1, sums + 16, PANEL * 4);
        write_out(p, 0, p.rows, n, sums);
    }
}

// More rows, two tiles of them at a time (IS_PAIR) or one. Tiles 0 to 3 are sums ([tile of rows][half of the panel]),
// 4 and 5 rows, 6 and 7 weights.

template <bool IS_PAIR>
static inline void load_rows(const uint16_t *x, int64_t tile_stride, int64_t part) {
    _tile_loadd(4, x + part * TILE, 64);
    if (IS_PAIR) _tile_loadd(5, x + tile_stride + part * TILE, 64);
}

template <int64_t PARTS>
static inline void load_weights(const uint16_t *w, int64_t part) {
    _tile_loadd(6, w + part * TILE, 64);
    _tile_loadd(7, w + (PARTS + part) * TILE, 64);
}

template <bool IS_PAIR>
static inline void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    if (IS_PAIR) _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (IS_PAIR) _tile_dpbf16ps(3, 5, 7);
}

// In the order of add_and_split; each product shares a part with the one before.
template <bool IS_PAIR, int64_t PARTS>
static inline void add_step(const uint16_t *x, int64_t tile_stride, const uint16_t *w) {
    load_rows<IS_PAIR>(x, tile_stride, 0);
    if (PARTS == 3) {
        load_weights<PARTS>(w, 2);
        multiply<IS_PAIR>();
    }
    load_weights<PARTS>(w, 1);
    multiply<IS_PAIR>();
    load_rows<IS_PAIR>(x, tile_stride, 1);
    multiply<IS_PAIR>();
    load_weights<PARTS>(w, 0);
    multiply<IS_PAIR>();
    load_rows<IS_PAIR>(x, tile_stride, 0);
    multiply<IS_PAIR>();
    load_rows<IS_PAIR>(x, tile_stride, 2);
    multiply<IS_PAIR>();
}

// A panel, whose parts are w [step][half][part][TILE].
template <bool IS_PAIR, int64_t PARTS>
static void add_panel(const SplitRows &x, int64_t row, const uint16_t *w, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < x.steps; s++)
        add_step<IS_PAIR, PARTS>(x.at(row, s), x.tile_stride(), w + s * 2 * PARTS * TILE);
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    _tile_stored(2, sums + TILE_ROWS * PANEL, PANEL * 4);
    _tile_stored(3, sums + TILE_ROWS * PANEL + 16, PANEL * 4);
}

template <class Weight>
static void many_rows(const Product &p, const SplitRows &x) {
    constexpr int64_t PARTS = num_parts<Weight>;
    thread_local Scratch<uint16_t> scratch;
    alignas(64) float sums[BLOCK_ROWS * PANEL];
    Weight padded[STEP * PANEL];
    int64_t num_panels = (p.outputs + PANEL - 1) / PANEL, step_parts = 2 * PARTS * TILE, panel_parts = x.steps * step_parts;
    int64_t most = std::max<int64_t>(1, BLOCK_BYTES / (panel_parts * 2)), share = 2 * num_threads;
    int64_t num_jobs = std::min(num_panels, ((num_panels + most - 1) / most + share - 1) / share * share);
    shape_tiles(shapes_of(TILE_ROWS));
#pragma omp for schedule(dynamic, 1)
    for (int64_t job = 0; job < num_jobs; job++) {
        int64_t first = job * num_panels / num_jobs, last = (job + 1) * num_panels / num_jobs;
        uint16_t *w = scratch.take((last - first) * panel_parts);
        for (int64_t n = first; n < last; n++)
            for (int64_t s = 0; s < x.steps; s++)
                split_weights(step_of<Weight>(p, n, s, padded), 0, STEP, w + (n - first) * panel_parts + s * step_parts);
        settle();
        for (int64_t row = 0; row < p.rows; row += BLOCK_ROWS)
            for (int64_t n = first; n < last; n++) {
                const uint16_t *panel = w + (n - first) * panel_parts;
                p.rows - row > TILE_ROWS ? add_panel<true, PARTS>(x, row, panel, sums)
                                         : add_panel<false, PARTS>(x, row, panel, sums);
                write_out(p, row, std::min(BLOCK_ROWS, p.rows - row), n, sums);
            }
    }
}

template <class Weight>
static void product(const Product &p) {
    thread_local Scratch<uint16_t> scratch;
    int64_t steps = (p.inputs + STEP - 1) / STEP, tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS;
    SplitRows x{tiles * TILE_ROWS, steps, scratch.take(tiles * steps * ROW_PARTS * TILE)};
    int64_t rows = p.rows <= TILE_ROWS ? p.rows : x.rows;
#pragma omp parallel num_threads(num_threads) if (p.rows * p.inputs * p.outputs > MIN_PARALLEL)
    {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) split_row(p, x, r);
        settle();
        p.rows <= TILE_ROWS ? few_rows<Weight>(p, x) : many_rows<Weight>(p, x);
        _tile_release();
    }
}

void product_f16(const Product &p) { product<uint16_t>(p); }
void product_f32(const Product &p) { product<float>(p); }

}  // namespace amx
}  // namespace disagg
