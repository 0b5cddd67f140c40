// Weights in the forms that products read. The same bits on every instruction set.
#pragma once

#include "blocks.h"
#include "int8_rows.h"
#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <cstring>

namespace DISAGG_ISA {

// A panel, BLOCK inputs at a time: they stay in the nearest cache while they are turned.
template <class Weight>
static void pack(const disagg::Packing &p) {
    using disagg::BLOCK, disagg::PANEL, disagg::num_threads;
    static_assert(BLOCK % LANES == 0 && PANEL % LANES == 0);
    const disagg::Rows &from = p.from;
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t n = 0; n < (from.outputs + PANEL - 1) / PANEL; n++) {
        Weight *panel = static_cast<Weight *>(p.weights) + n * from.inputs * PANEL;
        for (int64_t k = 0; k < from.inputs; k += BLOCK) {
            float block[PANEL * BLOCK], turned[LANES * LANES];
            for (int64_t i = 0; i < PANEL; i++) read_row(from, n * PANEL + i, k, block + i * BLOCK);
            for (int64_t part = 0; part < std::min(BLOCK, from.inputs - k); part += LANES)
                for (int64_t first = 0; first < PANEL; first += LANES) {
                    Vec rows[LANES];
                    for (int64_t i = 0; i < LANES; i++) rows[i] = load(block + (first + i) * BLOCK + part);
                    transpose(rows, turned, LANES);
                    for (int64_t i = 0; i < std::min<int64_t>(LANES, from.inputs - k - part); i++)
                        store(panel + (k + part + i) * PANEL + first, load(turned + i * LANES));
                }
        }
    }
}

constexpr int64_t MANY_ELEMENTS = 1 << 17;  // elements below which threads do not pay

// Row by row.
template <class Weight>
static void unpack(const disagg::Packing &p) {
    using disagg::BLOCK, disagg::num_threads;
    const disagg::Rows &from = p.from;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (from.outputs * from.inputs > MANY_ELEMENTS)
    for (int64_t n = 0; n < from.outputs; n++) {
        Weight *to = static_cast<Weight *>(p.weights) + n * from.inputs;
        for (int64_t k = 0; k < from.inputs; k += BLOCK) {
            float block[BLOCK];
            Weight cells[BLOCK];
            read_row(from, n, k, block);
            for (int64_t i = 0; i < BLOCK; i += LANES) store(cells + i, load(block + i));
            std::memcpy(to + k, cells, std::min(BLOCK, from.inputs - k) * sizeof(Weight));
        }
    }
}

constexpr int NUM_SCALES = 16;              // tried per group
constexpr float FINEST = 127.45f;           // steps of the largest value with the first of them: it still rounds to 127
constexpr float COARSEST = 102.0f;          // and with the last

// Squared error of a group with so many steps in its largest value.
template <int64_t SIZE>
static inline float error_of(const float *from, float limit, float steps) {
    Vec inverse = splat(steps / limit), scale = splat(limit / steps), total = zero();
    for (int64_t i = 0; i < SIZE; i += LANES) {
        Vec value = load(from + i);
        Vec off = fnma(nearest(mul(value, inverse)), scale, value);
        total = fma(off, off, total);
    }
    return sum(total);
}

// A group as whole numbers; returns its scale. Not the largest value's place on the grid counts but the sum of squares:
// values that came from a coarser grid often fall onto a finer one.
template <int64_t SIZE>
static inline float quantize_group(const float *from, int8_t *out) {
    float limit = largest_of<SIZE>(from);
    if (!(limit > SMALLEST_INT8)) {
        std::memset(out, 0, SIZE);
        return 0.0f;
    }
    float best = FINEST, least = error_of<SIZE>(from, limit, FINEST);
    for (int i = 1; i < NUM_SCALES; i++) {
        float steps = FINEST - i * ((FINEST - COARSEST) / (NUM_SCALES - 1)), error = error_of<SIZE>(from, limit, steps);
        if (error < least) least = error, best = steps;
    }
    Vec inverse = splat(best / limit);
    for (int64_t i = 0; i < SIZE; i += LANES)
        store_bytes(out + i, nearest(mul(load(from + i), inverse)));
    return limit / best;
}

template <int64_t SIZE>
static void pack_int8_in(const disagg::Int8Packing &p) {
    using disagg::BLOCK, disagg::INT8_PANEL, disagg::num_threads;
    static_assert(SIZE % BLOCK == 0);
    const disagg::Rows &from = p.from;
    int64_t groups = (from.inputs + SIZE - 1) / SIZE, num_panels = (from.outputs + INT8_PANEL - 1) / INT8_PANEL;
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t n = 0; n < num_panels; n++)
        for (int64_t g = 0; g < groups; g++) {
            int8_t *panel = p.weights + (n * groups + g) * SIZE * INT8_PANEL;
            for (int64_t c = 0; c < INT8_PANEL; c++) {
                float part[SIZE];
                int8_t values[SIZE];
                for (int64_t k = 0; k < SIZE; k += BLOCK) read_row(from, n * INT8_PANEL + c, g * SIZE + k, part + k);
                p.scales[(n * groups + g) * INT8_PANEL + c] = quantize_group<SIZE>(part, values);
                for (int64_t k = 0; k < SIZE / 4; k++) std::memcpy(panel + (k * INT8_PANEL + c) * 4, values + 4 * k, 4);
            }
        }
}

static void pack_int8(const disagg::Int8Packing &p) {
    p.group == disagg::GROUP ? pack_int8_in<disagg::GROUP>(p) : pack_int8_in<disagg::FINE_GROUP>(p);
}

}  // namespace DISAGG_ISA
