// Weights as files store them, read as floats: the values of the `gguf` package, to the bit.
#pragma once

#include "kernels.h"
#include "simd.h"

#include <algorithm>
#include <cstring>

namespace DISAGG_ISA {

static inline float half_at(const uint8_t *p) {
    uint16_t bits;
    std::memcpy(&bits, p, sizeof(bits));
    return _cvtsh_ss(bits);
}

static inline Vec bytes_at(const uint8_t *p) { return from_bytes(_mm_loadu_si128((const __m128i *)p)); }

// Of 16 bytes: the low nibbles are elements 0 to 15 of a block, the high ones 16 to 31.
static inline Vec nibbles_at(const uint8_t *p, int half) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return from_bytes(_mm_and_si128(half ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15)));
}

template <class Cell>
static inline void plain_block(const uint8_t *row, int64_t k, int64_t present, float *out) {
    Cell part[disagg::BLOCK] = {};
    std::memcpy(part, row + k * sizeof(Cell), present * sizeof(Cell));
    for (int64_t i = 0; i < disagg::BLOCK; i += LANES) store(out + i, load(part + i));
}

static inline void bfloat_block(const uint8_t *row, int64_t k, int64_t present, float *out) {
    uint16_t part[disagg::BLOCK] = {};
    std::memcpy(part, row + k * sizeof(uint16_t), present * sizeof(uint16_t));
    for (int64_t i = 0; i < disagg::BLOCK; i++) {
        uint32_t bits = uint32_t(part[i]) << 16;
        std::memcpy(out + i, &bits, sizeof(bits));
    }
}

// Elements [k, k + BLOCK) of a row, k a multiple of BLOCK. Plain ones past `present` are 0; blocks are whole.
static inline void read_block(uint8_t kind, const uint8_t *row, int64_t k, int64_t present, float *out) {
    using namespace disagg;
    int64_t block = k / BLOCK;
    switch (kind) {
        case F32: return plain_block<float>(row, k, present, out);
        case F16: return plain_block<uint16_t>(row, k, present, out);
        case BF16: return bfloat_block(row, k, present, out);
        case Q8_0: {
            const uint8_t *from = row + block * (2 + BLOCK);
            Vec scale = splat(half_at(from));
            for (int i = 0; i < 2; i++) store(out + i * LANES, mul(bytes_at(from + 2 + i * LANES), scale));
            return;
        }
        case Q4_0: {
            const uint8_t *from = row + block * (2 + BLOCK / 2);
            Vec scale = splat(half_at(from));
            for (int i = 0; i < 2; i++) store(out + i * LANES, mul(sub(nibbles_at(from + 2, i), splat(8.0f)), scale));
            return;
        }
        case Q4_1: {
            const uint8_t *from = row + block * (4 + BLOCK / 2);
            Vec scale = splat(half_at(from)), least = splat(half_at(from + 2));
            for (int i = 0; i < 2; i++) store(out + i * LANES, add(mul(nibbles_at(from + 4, i), scale), least));
            return;
        }
    }
}

// The same of one output's row; zeros where the matrix has ended.
static inline void read_row(const disagg::Rows &from, int64_t output, int64_t k, float *out) {
    int64_t present = output < from.outputs ? std::min(disagg::BLOCK, from.inputs - k) : 0;
    if (present > 0)
        read_block(from.kinds[output], from.rows[output], k, present, out);
    else
        std::memset(out, 0, disagg::BLOCK * sizeof(float));
}

}  // namespace DISAGG_ISA
