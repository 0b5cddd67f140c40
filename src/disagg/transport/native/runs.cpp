// Copying scattered runs of bytes and summing them in the same pass: every byte is read once.
//
// The sum is 64-bit XXH3 as that algorithm is published, for inputs above 240 bytes; its short forms are left to the
// caller. Bytes are taken in as stripes of 64, each when more bytes follow: the last stripe is summed in another way.
//
//     lanes    8 sums of 64 bits          block    16 stripes, after which the lanes are scrambled
//     secret   192 bytes, made of the published ones and the seed; stripe n of a block starts at byte 8 n

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t STRIPE = 64, STRIPES_PER_BLOCK = 16, SECRET_BYTES = 192;
constexpr int64_t AHEAD_BYTES = 4096;  // how far before its turn a byte is asked for, also across runs

constexpr uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9,
                   P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t AVALANCHE = 0x165667919E3779F9;

constexpr uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f,
    0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff,
    0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct Sum {
    uint64_t lanes[8];
    uint8_t secret[SECRET_BYTES];
    uint8_t before[STRIPE];   // the stripe that was taken in last
    uint8_t pending[STRIPE];  // bytes after it
    int64_t num_pending, num_stripes, num_bytes;  // num_stripes of the block under way
};

// Takes in stripes of one block, which it also copies where target is not null; asks for what lies at `ahead`.
using TakeIn = void (*)(uint64_t *lanes, const uint8_t *data, const uint8_t *secret, int64_t num_stripes, uint8_t *target,
                        const uint8_t *ahead);

uint64_t read64(const uint8_t *at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <bool PASSES_CACHE>
__attribute__((target("avx512f"))) void take_in_512(uint64_t *lanes, const uint8_t *data, const uint8_t *secret,
                                                    int64_t num_stripes, uint8_t *target, const uint8_t *ahead) {
    __m512i sums = _mm512_loadu_si512(lanes);
    for (int64_t n = 0; n < num_stripes; ++n) {
        if (ahead) _mm_prefetch(reinterpret_cast<const char *>(ahead + n * STRIPE), _MM_HINT_T0);
        __m512i value = _mm512_loadu_si512(data + n * STRIPE);
        if (PASSES_CACHE)
            _mm512_stream_si512(reinterpret_cast<__m512i *>(target + n * STRIPE), value);
        else if (target)
            _mm512_storeu_si512(target + n * STRIPE, value);
        __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(secret + 8 * n));
        __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        __m512i neighbours = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
        sums = _mm512_add_epi64(product, _mm512_add_epi64(sums, neighbours));
    }
    _mm512_storeu_si512(lanes, sums);
}

template <bool PASSES_CACHE>
__attribute__((target("avx2"))) void take_in_256(uint64_t *lanes, const uint8_t *data, const uint8_t *secret,
                                                 int64_t num_stripes, uint8_t *target, const uint8_t *ahead) {
    __m256i sums[2];
    std::memcpy(sums, lanes, sizeof sums);
    for (int64_t n = 0; n < num_stripes; ++n) {
        if (ahead) _mm_prefetch(reinterpret_cast<const char *>(ahead + n * STRIPE), _MM_HINT_T0);
        for (int half = 0; half < 2; ++half) {
            int64_t at = n * STRIPE + 32 * half;
            __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(data + at));
            if (PASSES_CACHE)
                _mm256_stream_si256(reinterpret_cast<__m256i *>(target + at), value);
            else if (target)
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(target + at), value);
            const uint8_t *key_at = secret + 8 * n + 32 * half;
            __m256i key = _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(key_at)));
            __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            __m256i neighbours = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
            sums[half] = _mm256_add_epi64(product, _mm256_add_epi64(sums[half], neighbours));
        }
    }
    std::memcpy(lanes, sums, sizeof sums);
}

struct Ways {
    TakeIn cached, past_cache;
};

Ways chosen() {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return {take_in_512<false>, take_in_512<true>};
    return {take_in_256<false>, take_in_256<true>};
}

const Ways WAYS = chosen();

void scramble(uint64_t *lanes, const uint8_t *secret) {
    for (int i = 0; i < 8; ++i) lanes[i] = (lanes[i] ^ (lanes[i] >> 47) ^ read64(secret + 8 * i)) * P32_1;
}

// Where the bytes are that come AHEAD_BYTES after `at` in this run, or in the next one.
struct Runs {
    const uint8_t *now, *next;
    int64_t num_now, num_next;

    const uint8_t *ahead(int64_t at) const {
        int64_t wanted = at + AHEAD_BYTES;
        if (wanted < num_now) return now + wanted;
        wanted -= num_now;
        return wanted < num_next ? next + wanted : nullptr;
    }
};

void take(Sum &sum, TakeIn take_in, const uint8_t *data, int64_t num_stripes, uint8_t *target, const Runs *runs) {
    while (num_stripes > 0) {
        int64_t now = std::min(num_stripes, STRIPES_PER_BLOCK - sum.num_stripes);
        const uint8_t *ahead = runs ? runs->ahead(data - runs->now) : nullptr;
        take_in(sum.lanes, data, sum.secret + 8 * sum.num_stripes, now, target, ahead);
        data += now * STRIPE;
        if (target) target += now * STRIPE;
        num_stripes -= now;
        sum.num_stripes += now;
        if (sum.num_stripes < STRIPES_PER_BLOCK) continue;
        sum.num_stripes = 0;
        scramble(sum.lanes, sum.secret + SECRET_BYTES - STRIPE);
    }
}

void update(Sum &sum, const Runs &runs, uint8_t *target, bool passes_cache) {
    const uint8_t *data = runs.now;
    int64_t num_bytes = runs.num_now;
    sum.num_bytes += num_bytes;
    while (num_bytes > 0) {
        if (sum.num_pending == STRIPE) {
            take(sum, WAYS.cached, sum.pending, 1, nullptr, nullptr);
            std::memcpy(sum.before, sum.pending, STRIPE);
            sum.num_pending = 0;
        }
        if (sum.num_pending == 0 && num_bytes > STRIPE) {
            int64_t whole = (num_bytes - 1) / STRIPE;
            bool is_aligned = reinterpret_cast<uintptr_t>(target) % STRIPE == 0;
            take(sum, passes_cache && is_aligned ? WAYS.past_cache : WAYS.cached, data, whole, target, &runs);
            data += whole * STRIPE;
            target += whole * STRIPE;
            num_bytes -= whole * STRIPE;
            std::memcpy(sum.before, data - STRIPE, STRIPE);
        }
        int64_t now = std::min(num_bytes, STRIPE - sum.num_pending);
        std::memcpy(sum.pending + sum.num_pending, data, now);
        std::memcpy(target, data, now);
        sum.num_pending += now;
        data += now;
        target += now;
        num_bytes -= now;
    }
}

uint64_t folded(uint64_t one, uint64_t other) {
    unsigned __int128 product = static_cast<unsigned __int128>(one) * other;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

extern "C" {

// Whether this processor can run it.
int disagg_runs_work() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
}

int64_t disagg_sum_bytes() { return sizeof(Sum); }

void disagg_sum_begin(void *state, uint64_t seed) {
    Sum &sum = *static_cast<Sum *>(state);
    const uint64_t lanes[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    std::memcpy(sum.lanes, lanes, sizeof lanes);
    for (int64_t at = 0; at < SECRET_BYTES; at += 16) {
        const uint64_t pair[2] = {read64(SECRET + at) + seed, read64(SECRET + at + 8) - seed};
        std::memcpy(sum.secret + at, pair, sizeof pair);
    }
    sum.num_pending = sum.num_stripes = sum.num_bytes = 0;
}

// Runs of an arena, in order, into `packed`, and taken in. The caller has checked bounds.
void disagg_gather_runs(void *state, const uint8_t *arena, const int64_t *offsets, const int64_t *lengths,
                        int64_t num_runs, uint8_t *packed) {
    for (int64_t run = 0; run < num_runs; ++run) {
        int64_t next = std::min(run + 1, num_runs - 1);
        Runs runs{arena + offsets[run], arena + offsets[next], lengths[run], next == run ? 0 : lengths[next]};
        update(*static_cast<Sum *>(state), runs, packed, false);
        packed += lengths[run];
    }
}

// Bytes of `packed`, in order, into runs of an arena, and taken in. They are written past the caches: nobody reads them
// soon, and memory need not be read before it is overwritten.
void disagg_scatter_runs(void *state, const uint8_t *packed, uint8_t *arena, const int64_t *offsets,
                         const int64_t *lengths, int64_t num_runs) {
    for (int64_t run = 0; run < num_runs; ++run) {
        update(*static_cast<Sum *>(state), {packed, nullptr, lengths[run], 0}, arena + offsets[run], true);
        packed += lengths[run];
    }
    _mm_sfence();
}

// Of more than 240 bytes.
uint64_t disagg_sum_end(const void *state) {
    const Sum &sum = *static_cast<const Sum *>(state);
    uint64_t lanes[8];
    uint8_t last[STRIPE];
    std::memcpy(lanes, sum.lanes, sizeof lanes);
    std::memcpy(last, sum.before + sum.num_pending, STRIPE - sum.num_pending);
    std::memcpy(last + STRIPE - sum.num_pending, sum.pending, sum.num_pending);
    WAYS.cached(lanes, last, sum.secret + SECRET_BYTES - STRIPE - 7, 1, nullptr, nullptr);
    const uint8_t *secret = sum.secret + 11;
    uint64_t result = static_cast<uint64_t>(sum.num_bytes) * P64_1;
    for (int i = 0; i < 4; ++i)
        result += folded(lanes[2 * i] ^ read64(secret + 16 * i), lanes[2 * i + 1] ^ read64(secret + 16 * i + 8));
    result = (result ^ (result >> 37)) * AVALANCHE;
    return result ^ (result >> 32);
}

}  // extern "C"
