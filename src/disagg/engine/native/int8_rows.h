// Rows of activations as int8, for products with int8 weights.
#pragma once

#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <cstring>

namespace DISAGG_ISA {

// The largest value of a group becomes 127 coarse steps. Eight bits alone cost more than int8 weights do.
static inline void quantize_row(const float *x, int64_t inputs, const disagg::QuantizedRows &rows, int64_t row) {
    using disagg::FINE, disagg::GROUP;
    for (int64_t g = 0; g * GROUP < inputs; g++) {
        float part[GROUP] = {};
        std::memcpy(part, x + g * GROUP, std::min(GROUP, inputs - g * GROUP) * sizeof(float));
        Vec peak = zero();
        for (int64_t k = 0; k < GROUP; k += LANES) peak = max(peak, absolute(load(part + k)));
        float limit = largest(peak);
        Vec inverse = splat(limit > 0.0f ? 127.0f / limit : 0.0f);
        int8_t *coarse = rows.at(row, g), *fine = coarse + GROUP;
        for (int64_t k = 0; k < GROUP; k += LANES) {
            Vec steps = mul(load(part + k), inverse), whole = nearest(steps);
            store_bytes(coarse + k, whole);
            store_bytes(fine + k, mul(sub(steps, whole), splat(float(FINE))));
        }
        int32_t *sums = rows.sums + (row * rows.groups + g) * 2;
        sums[0] = sums[1] = 0;
        for (int64_t k = 0; k < GROUP; k++) {
            sums[0] += coarse[k];
            sums[1] += fine[k];
        }
        rows.scales[row * rows.groups + g] = limit / (127.0f * FINE);
    }
}

}  // namespace DISAGG_ISA
