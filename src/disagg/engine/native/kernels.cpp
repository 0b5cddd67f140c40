// All operations but the AMX product. Compiled once per instruction set, with DISAGG_ISA as the namespace.
//
// Rule: a row's result does not depend on other rows, on threads, or on the instruction set. So sums over inputs run in
// order of the inputs, sums over keys in order of position in fixed tiles, and integer sums are exact.

#include "attention.h"
#include "int8_rows.h"
#include "kernels.h"
#include "packing.h"
#include "scratch.h"
#include "simd.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace disagg {
namespace DISAGG_ISA {

using namespace ::DISAGG_ISA;

// x in whole vectors; the last one padded with zeros
static inline Vec load_part(const float *x, int64_t present) {
    if (present >= LANES) return load(x);
    float part[LANES] = {};
    std::memcpy(part, x, present * sizeof(float));
    return load(part);
}

template <class Cell>
static inline void store_part(Cell *x, Vec a, int64_t present) {
    if (present >= LANES) return store(x, a);
    Cell part[LANES];
    store(part, a);
    std::memcpy(x, part, present * sizeof(Cell));
}

// --- products ----------------------------------------------------------------------------------------------------

constexpr int64_t FEW_ROWS = 2 * TILE_ROWS;        // up to here, packing rows and unpacking weights does not pay
constexpr int64_t BLOCK_ROWS = 16 * TILE_ROWS;     // rows of one job
constexpr int64_t BLOCK_INPUTS = 512;              // so that a tile's rows stay in the nearest cache
constexpr int64_t BLOCK_WEIGHTS = 96 * 1024;       // floats of one job: they stay in the second cache
constexpr int64_t MIN_PARALLEL = 1 << 17;          // multiplications below which threads do not pay

// One panel's columns for some rows, cut to the columns that exist.
template <class Weight>
static void panel_rows(int rows, const Product &p, int64_t row, int64_t panel) {
    float edge[TILE_ROWS * PANEL];
    int64_t columns = p.outputs - panel * PANEL;
    bool is_whole = columns >= PANEL;
    float *y = p.y + row * p.outputs + panel * PANEL, *c = is_whole ? y : edge;
    const Weight *weights = static_cast<const Weight *>(p.weights) + panel * PANEL * p.inputs;
    for (int64_t v = 0; v < PANEL; v += TILE_VECS * LANES)
        tile_of<TILE_ROWS, TILE_VECS, true>(rows, p.inputs, p.x + row * p.inputs, p.inputs, 1, weights + v, PANEL,
                                            p.bias ? p.bias + panel * PANEL + v : nullptr, 0, c + v,
                                            is_whole ? p.outputs : PANEL);
    if (!is_whole)
        for (int r = 0; r < rows; r++) std::memcpy(y + r * p.outputs, edge + r * PANEL, columns * sizeof(float));
}

template <class Weight>
static void few_rows(const Product &p) {
    int64_t num_panels = (p.outputs + PANEL - 1) / PANEL;
    int64_t parts = (p.rows + TILE_ROWS - 1) / TILE_ROWS, step = (p.rows + parts - 1) / parts;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (p.rows * p.inputs * p.outputs > MIN_PARALLEL)
    for (int64_t n = 0; n < num_panels; n++) {
        for (int64_t row = 0; row < p.rows; row += step)
            panel_rows<Weight>(int(std::min(step, p.rows - row)), p, row, n);
    }
}

// [rows][inputs] -> [tile of TILE_ROWS][input][TILE_ROWS], zero rows at the end
static void pack_rows(const Product &p, float *packed) {
    int64_t num_tiles = (p.rows + TILE_ROWS - 1) / TILE_ROWS;
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        const float *rows[TILE_ROWS];
        for (int64_t r = 0; r < TILE_ROWS; r++)
            rows[r] = tile * TILE_ROWS + r < p.rows ? p.x + (tile * TILE_ROWS + r) * p.inputs : nullptr;
        for (int64_t k = 0; k < p.inputs; k += LANES) {
            Vec square[LANES];
            for (int r = 0; r < LANES; r++)
                square[r] = r < TILE_ROWS && rows[r] ? load_part(rows[r] + k, p.inputs - k) : zero();
            float turned[LANES * LANES];
            transpose(square, turned, LANES);
            float *out = packed + (tile * p.inputs + k) * TILE_ROWS;
            for (int64_t i = 0; i < std::min<int64_t>(LANES, p.inputs - k); i++)
                std::memcpy(out + i * TILE_ROWS, turned + i * LANES, TILE_ROWS * sizeof(float));
        }
    }
}

static inline const float *unpacked(const float *weights, int64_t) { return weights; }

static inline const float *unpacked(const uint16_t *weights, int64_t count) {
    thread_local Scratch<float> scratch;
    float *out = scratch.take(count);
    for (int64_t i = 0; i < count; i += LANES) store(out + i, load(weights + i));
    return out;
}

// Panels [first, last) for the rows of one tile. Sums over more than BLOCK_INPUTS inputs go on where they were left.
static void row_tile(const Product &p, int rows, int64_t row, const float *packed, const float *weights, int64_t first,
                     int64_t last) {
    float edge[TILE_ROWS * PANEL];
    for (int64_t k = 0; k < p.inputs; k += BLOCK_INPUTS)
        for (int64_t n = first; n < last; n++) {
            bool is_whole = p.outputs - n * PANEL >= PANEL;
            float *c = is_whole ? p.y + row * p.outputs + n * PANEL : edge;
            int64_t c_row = is_whole ? p.outputs : PANEL;
            const float *init = k > 0 ? c : p.bias ? p.bias + n * PANEL : nullptr;
            const float *b = weights + (n - first) * PANEL * p.inputs + k * PANEL;
            for (int64_t v = 0; v < PANEL; v += TILE_VECS * LANES)
                tile_of<TILE_ROWS, TILE_VECS>(rows, std::min(BLOCK_INPUTS, p.inputs - k), packed + k * TILE_ROWS, 1,
                                              TILE_ROWS, b + v, PANEL, init ? init + v : nullptr, k > 0 ? c_row : 0, c + v,
                                              c_row);
        }
    int64_t columns = p.outputs - (last - 1) * PANEL;
    if (columns < PANEL)
        for (int r = 0; r < rows; r++)
            std::memcpy(p.y + (row + r) * p.outputs + (last - 1) * PANEL, edge + r * PANEL, columns * sizeof(float));
}

template <class Weight>
static void many_rows(const Product &p) {
    thread_local Scratch<float> scratch;
    int64_t num_panels = (p.outputs + PANEL - 1) / PANEL, num_blocks = (p.rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t fair = (num_panels * num_blocks + 4 * num_threads - 1) / (4 * num_threads);
    int64_t step = std::max<int64_t>(1, std::min(BLOCK_WEIGHTS / (PANEL * p.inputs), fair));
    int64_t num_groups = (num_panels + step - 1) / step;
    float *packed = scratch.take((p.rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS * p.inputs);
    pack_rows(p, packed);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
    for (int64_t job = 0; job < num_blocks * num_groups; job++) {
        int64_t first = job % num_groups * step, last = std::min(first + step, num_panels);
        int64_t row = job / num_groups * BLOCK_ROWS, end = std::min(row + BLOCK_ROWS, p.rows);
        const Weight *stored = static_cast<const Weight *>(p.weights) + first * PANEL * p.inputs;
        const float *weights = unpacked(stored, (last - first) * PANEL * p.inputs);
        for (; row < end; row += TILE_ROWS)
            row_tile(p, int(std::min<int64_t>(TILE_ROWS, end - row)), row, packed + row * p.inputs, weights, first, last);
    }
}

template <class Weight>
static void product(const Product &p) {
    p.rows <= FEW_ROWS ? few_rows<Weight>(p) : many_rows<Weight>(p);
}

// --- int8 products ---------------------------------------------------------------------------------------------------

#if defined(__AVX512VNNI__)

constexpr int INT8_ROWS = 8;

// Exact sums of one group: bytes of weights as unsigned (x + 128), so 128 times the sums of the
// rows has to be taken off again. FINE * coarse + fine rounds once: both are exact as floats.
template <int ROWS, int64_t SIZE>
static inline void group_sums(const int8_t *weights, const QuantizedRows<SIZE> &x, int64_t row, int64_t group, Vec *out) {
    __m512i coarse[ROWS], fine[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) coarse[r] = fine[r] = _mm512_setzero_si512();
    const __m512i flip = _mm512_set1_epi8(-128);
#pragma GCC unroll 4
    for (int k = 0; k < SIZE / 4; k++) {
        _mm_prefetch((const char *)weights + k * 64 + PREFETCH_BYTES, _MM_HINT_T0);
        __m512i w = _mm512_xor_si512(_mm512_loadu_si512(weights + k * 64), flip);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            int32_t four[2];
            std::memcpy(&four[0], x.at(row + r, group) + k * 4, 4);
            std::memcpy(&four[1], x.at(row + r, group) + SIZE + k * 4, 4);
            coarse[r] = _mm512_dpbusd_epi32(coarse[r], w, _mm512_set1_epi32(four[0]));
            fine[r] = _mm512_dpbusd_epi32(fine[r], w, _mm512_set1_epi32(four[1]));
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        const int32_t *extra = x.sums + ((row + r) * x.groups + group) * 2;
        Vec high = {_mm512_cvtepi32_ps(_mm512_sub_epi32(coarse[r], _mm512_set1_epi32(128 * extra[0])))};
        Vec low = {_mm512_cvtepi32_ps(_mm512_sub_epi32(fine[r], _mm512_set1_epi32(128 * extra[1])))};
        out[r] = fma(high, splat(float(FINE)), low);
    }
}

#else

constexpr int INT8_ROWS = 2;

static inline __m256i multiply_bytes(__m256i w, __m256i q) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

static inline __m256 joined(__m256i coarse, __m256i fine) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(coarse), _mm256_set1_ps(float(FINE)), _mm256_cvtepi32_ps(fine));
}

template <int ROWS, int64_t SIZE>
static inline void group_sums(const int8_t *weights, const QuantizedRows<SIZE> &x, int64_t row, int64_t group, Vec *out) {
    __m256i sums[ROWS][4];  // coarse and fine of the first eight columns, then of the others
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 4; i++) sums[r][i] = _mm256_setzero_si256();
    for (int k = 0; k < SIZE / 4; k++) {
        _mm_prefetch((const char *)weights + k * 64 + PREFETCH_BYTES, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                int32_t four;
                std::memcpy(&four, x.at(row + r, group) + i % 2 * SIZE + k * 4, 4);
                __m256i w = _mm256_loadu_si256((const __m256i *)(weights + k * 64 + i / 2 * 32));
                sums[r][i] = _mm256_add_epi32(sums[r][i], multiply_bytes(w, _mm256_set1_epi32(four)));
            }
    }
    for (int r = 0; r < ROWS; r++) out[r] = {joined(sums[r][0], sums[r][1]), joined(sums[r][2], sums[r][3])};
}

#endif

template <int ROWS, int64_t SIZE>
static void int8_tile(const QuantizedRows<SIZE> &x, int64_t row, const int8_t *weights, const float *scales, const float *bias,
                      float *out) {
    Vec totals[ROWS], sums[ROWS];
    for (int r = 0; r < ROWS; r++) totals[r] = bias ? load(bias) : zero();
    for (int64_t g = 0; g < x.groups; g++) {
        group_sums<ROWS>(weights + g * SIZE * INT8_PANEL, x, row, g, sums);
        Vec scale = load(scales + g * INT8_PANEL);
        for (int r = 0; r < ROWS; r++)
            totals[r] = fma(sums[r], mul(scale, splat(x.scales[(row + r) * x.groups + g])), totals[r]);
    }
    for (int r = 0; r < ROWS; r++) store(out + r * INT8_PANEL, totals[r]);
}

template <int ROWS, int64_t SIZE>
static void int8_tile_of(int rows, const QuantizedRows<SIZE> &x, int64_t row, const int8_t *weights, const float *scales,
                         const float *bias, float *out) {
    if (rows == ROWS) return int8_tile<ROWS>(x, row, weights, scales, bias, out);
    if constexpr (ROWS > 1) int8_tile_of<ROWS - 1>(rows, x, row, weights, scales, bias, out);
}

template <int64_t SIZE>
static void product_int8_in(const Int8Product &p) {
    thread_local Scratch<int8_t> values;
    thread_local Scratch<float> row_scales;
    thread_local Scratch<int32_t> row_sums;
    int64_t groups = (p.inputs + SIZE - 1) / SIZE, num_panels = (p.outputs + INT8_PANEL - 1) / INT8_PANEL;
    QuantizedRows<SIZE> x{p.rows, groups, values.take(p.rows * groups * 2 * SIZE), row_scales.take(p.rows * groups),
                          row_sums.take(p.rows * groups * 2)};
    bool is_parallel = p.rows * p.inputs * p.outputs > MIN_PARALLEL;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (is_parallel && p.rows > 1)
    for (int64_t r = 0; r < p.rows; r++) quantize_row(p.x + r * p.inputs, p.inputs, x, r);
#pragma omp parallel for num_threads(num_threads) schedule(static) if (is_parallel)
    for (int64_t n = 0; n < num_panels; n++) {
        float out[INT8_ROWS * INT8_PANEL];
        int64_t columns = std::min(INT8_PANEL, p.outputs - n * INT8_PANEL);
        for (int64_t r = 0; r < p.rows; r += INT8_ROWS) {
            int rows = int(std::min<int64_t>(INT8_ROWS, p.rows - r));
            int8_tile_of<INT8_ROWS>(rows, x, r, p.weights + n * groups * SIZE * INT8_PANEL,
                                    p.scales + n * groups * INT8_PANEL, p.bias ? p.bias + n * INT8_PANEL : nullptr, out);
            for (int i = 0; i < rows; i++)
                std::memcpy(p.y + (r + i) * p.outputs + n * INT8_PANEL, out + i * INT8_PANEL, columns * sizeof(float));
        }
    }
}

static void product_int8(const Int8Product &p) {
    p.group == GROUP ? product_int8_in<GROUP>(p) : product_int8_in<FINE_GROUP>(p);
}

// --- norm, rotation, gate ----------------------------------------------------------------------------------------------

static inline void norm_row(int64_t width, const float *x, const float *weight, float eps, float *y) {
    Vec squares = zero();
    for (int64_t k = 0; k < width; k += LANES) {
        Vec v = load_part(x + k, width - k);
        squares = fma(v, v, squares);
    }
    Vec factor = splat(1.0f / std::sqrt(sum(squares) / float(width) + eps));
    for (int64_t k = 0; k < width; k += LANES) {
        Vec scaled = mul(mul(load_part(x + k, width - k), factor), load_part(weight + k, width - k));
        store_part(y + k, scaled, width - k);
    }
}

static void add_norm(int64_t rows, int64_t width, float *x, const float *delta, const float *weight, float eps, float *y) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (rows * width > (1 << 15))
    for (int64_t r = 0; r < rows; r++) {
        float *row = x + r * width;
        if (delta)
            for (int64_t k = 0; k < width; k += LANES)
                store_part(row + k, add(load_part(row + k, width - k), load_part(delta + r * width + k, width - k)),
                           width - k);
        norm_row(width, row, weight, eps, y + r * width);
    }
}

static void gate(int64_t rows, int64_t width, const float *x, float *y) {
#pragma omp parallel for num_threads(num_threads) schedule(static) if (rows * width > (1 << 14))
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < width; k += LANES) {
            Vec g = load_part(x + r * 2 * width + k, width - k), u = load_part(x + r * 2 * width + width + k, width - k);
            Vec open = div(g, add(splat(1.0f), exponential(sub(zero(), g))));
            store_part(y + r * width + k, mul(open, u), width - k);
        }
}

template <class Cache>
static inline void turn(const float *head, const float *cos, const float *sin, int64_t half, Cache *to) {
    for (int64_t d = 0; d < half; d += LANES) {
        Vec a = load_part(head + d, half - d), b = load_part(head + half + d, half - d);
        Vec c = load_part(cos + d, half - d), s = load_part(sin + d, half - d);
        Vec low = fnma(b, s, mul(a, c)), high = fma(a, s, mul(b, c));
        store_part(to + d, low, half - d);
        store_part(to + half + d, high, half - d);
    }
}

template <class Cache>
static void rotate_store(const RotateStore &p) {
    int64_t half = p.head_dim / 2, width = (p.num_heads + 2 * p.num_kv_heads) * p.head_dim;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (p.rows * width > (1 << 15))
    for (int64_t r = 0; r < p.rows; r++) {
        float *row = p.qkv + r * width;
        const float *cos = p.cos + p.positions[r] * p.head_dim, *sin = p.sin + p.positions[r] * p.head_dim;
        int64_t place = p.slots[r] * p.num_kv_heads * p.head_dim;
        for (int64_t h = 0; h < p.num_heads + p.num_kv_heads; h++) {
            bool is_query = h < p.num_heads;
            float *head = row + h * p.head_dim;
            const float *weight = is_query ? p.query_norm : p.key_norm;
            if (weight) norm_row(p.head_dim, head, weight, p.eps, head);
            if (is_query)
                turn(head, cos, sin, half, head);
            else
                turn(head, cos, sin, half, static_cast<Cache *>(p.keys) + place + (h - p.num_heads) * p.head_dim);
        }
        const float *values = row + (p.num_heads + p.num_kv_heads) * p.head_dim;
        Cache *to = static_cast<Cache *>(p.values) + place;
        for (int64_t d = 0; d < p.num_kv_heads * p.head_dim; d += LANES) store(to + d, load(values + d));
    }
}

const Kernels kernels = {
    product<float>, product<uint16_t>, product_int8, pack<float>, pack<uint16_t>, pack_int8, unpack<float>, unpack<uint16_t>,
    attend<float>, attend<uint16_t>, rotate_store<float>, rotate_store<uint16_t>, add_norm, gate};

}  // namespace DISAGG_ISA
}  // namespace disagg
