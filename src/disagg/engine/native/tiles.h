// The inner loop of products and attention: sums that stay in registers.
#pragma once

#include "simd.h"

namespace disagg {
namespace DISAGG_ISA {

using namespace ::DISAGG_ISA;

constexpr int64_t PREFETCH_BYTES = 2048;  // how far ahead weights are asked for; past their end it does no harm

// c [ROWS][VECS * LANES] = init + a b, inputs in order. a(r, k) = a[r * a_row + k * a_input]. IS_FAR: b is in memory,
// not in a cache, and read front to back.
template <int ROWS, int VECS, bool IS_FAR = false, class Weight>
static inline void tile(int64_t inputs, const float *a, int64_t a_row, int64_t a_input, const Weight *b, int64_t b_input,
                        const float *init, int64_t init_row, float *c, int64_t c_row) {
    Vec sums[ROWS][VECS];
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sums[r][v] = init ? load(init + r * init_row + v * LANES) : zero();
    for (int64_t k = 0; k < inputs; k++) {
        for (int v = 0; IS_FAR && v < VECS; v++)
            if (v * LANES * sizeof(Weight) % 64 == 0)  // once per line
                _mm_prefetch((const char *)(b + k * b_input + v * LANES) + PREFETCH_BYTES, _MM_HINT_T0);
        Vec weights[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) weights[v] = load(b + k * b_input + v * LANES);
#pragma GCC unroll 24
        for (int r = 0; r < ROWS; r++) {
            Vec factor = splat(a[r * a_row + k * a_input]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sums[r][v] = fma(factor, weights[v], sums[r][v]);
        }
    }
#pragma GCC unroll 24
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) store(c + r * c_row + v * LANES, sums[r][v]);
}

template <int ROWS, int VECS, bool IS_FAR = false, class Weight>
static inline void tile_of(int rows, int64_t inputs, const float *a, int64_t a_row, int64_t a_input, const Weight *b,
                           int64_t b_input, const float *init, int64_t init_row, float *c, int64_t c_row) {
    if (rows == ROWS) return tile<ROWS, VECS, IS_FAR>(inputs, a, a_row, a_input, b, b_input, init, init_row, c, c_row);
    if constexpr (ROWS > 1)
        tile_of<ROWS - 1, VECS, IS_FAR>(rows, inputs, a, a_row, a_input, b, b_input, init, init_row, c, c_row);
}

}  // namespace DISAGG_ISA
}  // namespace disagg
