// Rows of activations as int8, for products with int8 weights.
#pragma once

#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <cstring>

namespace DISAGG_ISA {

constexpr float SMALLEST_INT8 = 1e-30f;  // groups whose largest value is below it count as 0

// The largest magnitude of a group.
template <int64_t SIZE>
static inline float largest_of(const float *from) {
    static_assert(SIZE % LANES == 0);
    Vec most = zero();
    for (int64_t i = 0; i < SIZE; i += LANES) most = max(most, absolute(load(from + i)));
    return largest(most);
}

// The largest value of a group becomes 127 coarse steps. Eight bits alone cost more than int8 weights do.
template <int64_t SIZE>
static inline void quantize_row(const float *x, int64_t inputs, const disagg::QuantizedRows<SIZE> &rows, int64_t row) {
    using disagg::FINE;
    for (int64_t g = 0; g * SIZE < inputs; g++) {
        const float *from = x + g * SIZE;
        float part[SIZE] = {};
        if (inputs - g * SIZE < SIZE) {
            std::memcpy(part, from, (inputs - g * SIZE) * sizeof(float));
            from = part;
        }
        float limit = largest_of<SIZE>(from);
        Vec inverse = splat(limit > SMALLEST_INT8 ? 127.0f / limit : 0.0f), coarse_sum = zero(), fine_sum = zero();
        int8_t *coarse = rows.at(row, g), *fine = coarse + SIZE;
        for (int64_t i = 0; i < SIZE; i += LANES) {
            Vec scaled = mul(load(from + i), inverse), whole = nearest(scaled);
            Vec left = nearest(mul(sub(scaled, whole), splat(float(FINE))));
            store_bytes(coarse + i, whole);
            store_bytes(fine + i, left);
            coarse_sum = add(coarse_sum, whole), fine_sum = add(fine_sum, left);
        }
        if (rows.sums) {  // of whole numbers, so exact as floats
            int32_t *sums = rows.sums + (row * rows.groups + g) * 2;
            sums[0] = int32_t(sum(coarse_sum));
            sums[1] = int32_t(sum(fine_sum));
        }
        rows.scales[row * rows.groups + g] = limit / (127.0f * FINE);
    }
}

}  // namespace DISAGG_ISA
