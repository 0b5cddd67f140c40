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
    static_assert(GROUP == 2 * LANES);
    for (int64_t g = 0; g * GROUP < inputs; g++) {
        const float *from = x + g * GROUP;
        float part[GROUP] = {};
        if (inputs - g * GROUP < GROUP) {
            std::memcpy(part, from, (inputs - g * GROUP) * sizeof(float));
            from = part;
        }
        Vec low = load(from), high = load(from + LANES);
        float limit = largest(max(absolute(low), absolute(high)));
        Vec inverse = splat(limit > 0.0f ? 127.0f / limit : 0.0f);
        low = mul(low, inverse), high = mul(high, inverse);
        Vec whole_low = nearest(low), whole_high = nearest(high);
        Vec fine_low = nearest(mul(sub(low, whole_low), splat(float(FINE))));
        Vec fine_high = nearest(mul(sub(high, whole_high), splat(float(FINE))));
        int8_t *coarse = rows.at(row, g), *fine = coarse + GROUP;
        store_bytes(coarse, whole_low);
        store_bytes(coarse + LANES, whole_high);
        store_bytes(fine, fine_low);
        store_bytes(fine + LANES, fine_high);
        if (rows.sums) {  // of whole numbers, so exact as floats
            int32_t *sums = rows.sums + (row * rows.groups + g) * 2;
            sums[0] = int32_t(sum(add(whole_low, whole_high)));
            sums[1] = int32_t(sum(add(fine_low, fine_high)));
        }
        rows.scales[row * rows.groups + g] = limit / (127.0f * FINE);
    }
}

}  // namespace DISAGG_ISA
