// Rows of activations as int8, for products with int8 weights.
#pragma once

#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <cstring>

namespace DISAGG_ISA {

// One scale per group, so that its largest value becomes 127; `sums` are those of the int8 values.
static inline void quantize_row(const float *x, int64_t inputs, int8_t *q, float *scales, int32_t *sums) {
    using disagg::GROUP;
    for (int64_t g = 0; g * GROUP < inputs; g++) {
        float part[GROUP] = {};
        std::memcpy(part, x + g * GROUP, std::min(GROUP, inputs - g * GROUP) * sizeof(float));
        Vec peak = zero();
        for (int64_t k = 0; k < GROUP; k += LANES) peak = max(peak, absolute(load(part + k)));
        float limit = largest(peak);
        Vec inverse = splat(limit > 0.0f ? 127.0f / limit : 0.0f);
        int8_t *to = q + g * GROUP;
        for (int64_t k = 0; k < GROUP; k += LANES) store_bytes(to + k, mul(load(part + k), inverse));
        int32_t sum = 0;
        for (int64_t k = 0; k < GROUP; k++) sum += to[k];
        scales[g] = limit / 127.0f;
        sums[g] = sum;
    }
}

}  // namespace DISAGG_ISA
