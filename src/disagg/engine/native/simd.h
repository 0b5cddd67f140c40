// Sixteen floats at a time, on AVX-512 (one register) or AVX2 (two). Every operation gives the same bits on both:
// element-wise ones are IEEE operations, reductions add in one fixed order.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace DISAGG_ISA {

constexpr int LANES = 16;

#if defined(__AVX512F__)

struct Vec {
    __m512 v;
};
constexpr int TILE_ROWS = 12, TILE_VECS = 2;  // rows x vectors of sums that fit the registers
constexpr int WIDE_ROWS = 5, WIDE_VECS = 4;   // the same for few rows

static inline Vec zero() { return {_mm512_setzero_ps()}; }
static inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
static inline Vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
static inline Vec load(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p))}; }
static inline void store(float *p, Vec a) { _mm512_storeu_ps(p, a.v); }
static inline void store(uint16_t *p, Vec a) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
static inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Vec fnma(Vec a, Vec b, Vec c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
static inline Vec absolute(Vec a) { return {_mm512_abs_ps(a.v)}; }
static inline Vec nearest(Vec a) { return {_mm512_roundscale_ps(a.v, 0)}; }
static inline Vec from_ints(const int32_t *p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
static inline Vec from_bytes(__m128i bytes) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))}; }
// 2^n for whole n in -126..127
static inline Vec power_of_two(Vec n) {
    __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}
static inline void store_bytes(int8_t *p, Vec a) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
static inline __m256 fold(Vec a) { return _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)); }
static inline __m256 fold_max(Vec a) {
    return _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
}

// out[d * out_stride + t] = rows[t][d] for 16 x 16 floats
static inline void transpose(const Vec *rows, float *out, int64_t out_stride) {
    __m512 a[16], b[16];
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
        a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
    }
    for (int i = 0; i < 4; i++) {
        b[4 * i] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
        b[4 * i + 1] = _mm512_shuffle_ps(a[4 * i], a[4 * i + 2], 0xEE);
        b[4 * i + 2] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
        b[4 * i + 3] = _mm512_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[4 + i], 0x88);
        a[4 + i] = _mm512_shuffle_f32x4(b[i], b[4 + i], 0xDD);
        a[8 + i] = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0x88);
        a[12 + i] = _mm512_shuffle_f32x4(b[8 + i], b[12 + i], 0xDD);
    }
    for (int i = 0; i < 8; i++) {
        _mm512_storeu_ps(out + i * out_stride, _mm512_shuffle_f32x4(a[i], a[8 + i], 0x88));
        _mm512_storeu_ps(out + (8 + i) * out_stride, _mm512_shuffle_f32x4(a[i], a[8 + i], 0xDD));
    }
}

// The same of rows of float16 in memory, from their element d on: turned before they are made float32. Loads put the eights
// of four rows side by side.
static inline void transpose(const uint16_t *const *rows, int64_t d, float *out, int64_t out_stride) {
    const __m512i even_first = _mm512_set_epi64(7, 5, 3, 1, 6, 4, 2, 0);
    for (int c = 0; c < 16; c += 8) {
        __m512i a[4], pairs[4];
        for (int i = 0; i < 4; i++) {
            a[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[i] + d + c)));
            a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x00F0, _mm_loadu_si128((const __m128i *)(rows[i + 4] + d + c)));
            a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x0F00, _mm_loadu_si128((const __m128i *)(rows[i + 8] + d + c)));
            a[i] = _mm512_mask_broadcast_i32x4(a[i], 0xF000, _mm_loadu_si128((const __m128i *)(rows[i + 12] + d + c)));
        }
        __m512i low[2], high[2];
        for (int i = 0; i < 2; i++) {
            low[i] = _mm512_unpacklo_epi16(a[2 * i], a[2 * i + 1]);
            high[i] = _mm512_unpackhi_epi16(a[2 * i], a[2 * i + 1]);
        }
        pairs[0] = _mm512_unpacklo_epi32(low[0], low[1]);
        pairs[1] = _mm512_unpackhi_epi32(low[0], low[1]);
        pairs[2] = _mm512_unpacklo_epi32(high[0], high[1]);
        pairs[3] = _mm512_unpackhi_epi32(high[0], high[1]);
        for (int i = 0; i < 4; i++) {  // of two columns each
            __m512i both = _mm512_permutexvar_epi64(even_first, pairs[i]);
            float *to = out + (c + 2 * i) * out_stride;
            _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm512_castsi512_si256(both)));
            _mm512_storeu_ps(to + out_stride, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1)));
        }
    }
}

#else

struct Vec {
    __m256 lo, hi;
};
constexpr int TILE_ROWS = 6, TILE_VECS = 1;
constexpr int WIDE_ROWS = 2, WIDE_VECS = 2;

static inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Vec load(const float *p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline Vec load(const uint16_t *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
static inline void store(float *p, Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
static inline void store(uint16_t *p, Vec a) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
static inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline Vec fnma(Vec a, Vec b, Vec c) {
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
static inline Vec absolute(Vec a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
static inline Vec nearest(Vec a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
static inline Vec from_ints(const int32_t *p) {
    return {_mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)p)),
            _mm256_cvtepi32_ps(_mm256_loadu_si256((const __m256i *)(p + 8)))};
}
static inline Vec from_bytes(__m128i bytes) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}
static inline __m256 power_of_two_half(__m256 n) {
    __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}
static inline Vec power_of_two(Vec n) { return {power_of_two_half(n.lo), power_of_two_half(n.hi)}; }
static inline void store_bytes(int8_t *p, Vec a) {
    __m256i lo = _mm256_cvtps_epi32(a.lo), hi = _mm256_cvtps_epi32(a.hi);
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(lo, hi), 0xD8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128((__m128i *)p, bytes);
}
static inline __m256 fold(Vec a) { return _mm256_add_ps(a.lo, a.hi); }
static inline __m256 fold_max(Vec a) { return _mm256_max_ps(a.lo, a.hi); }

static inline void transpose8(__m256 *r, float *out, int64_t out_stride) {
    __m256 a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
        b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xEE);
        b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
        b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xEE);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * out_stride, _mm256_permute2f128_ps(b[i], b[4 + i], 0x20));
        _mm256_storeu_ps(out + (4 + i) * out_stride, _mm256_permute2f128_ps(b[i], b[4 + i], 0x31));
    }
}

static inline void transpose(const Vec *rows, float *out, int64_t out_stride) {
    for (int half = 0; half < 2; half++) {
        __m256 low[8], high[8];
        for (int i = 0; i < 8; i++) {
            low[i] = rows[8 * half + i].lo;
            high[i] = rows[8 * half + i].hi;
        }
        transpose8(low, out + 8 * half, out_stride);
        transpose8(high, out + 8 * out_stride + 8 * half, out_stride);
    }
}

#endif

template <class Cell>
static inline void transpose(const Cell *const *rows, int64_t d, float *out, int64_t out_stride) {
    Vec square[LANES];
    for (int i = 0; i < LANES; i++) square[i] = load(rows[i] + d);
    transpose(square, out, out_stride);
}

static inline float sum(Vec a) {
    __m256 eight = fold(a);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float largest(Vec a) {
    __m256 eight = fold_max(a);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

// e^x to about 1e-7 relative; 0 below -87. Polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2] (Cephes).
static inline Vec exponential(Vec x) {
    Vec clamped = max(min(x, splat(88.0f)), splat(-87.33654f));
    Vec n = nearest(mul(clamped, splat(1.44269504f)));
    Vec r = fnma(n, splat(0.693359375f), clamped);
    r = fnma(n, splat(-2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, splat(1.0f)));
    return mul(p, power_of_two(n));
}

}  // namespace DISAGG_ISA
