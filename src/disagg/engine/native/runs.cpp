// Copying, sending and receiving scattered runs of bytes, and summing them meanwhile, each piece while it is in cache.
//
// The sum is 64-bit XXH3, as that algorithm is published, of inputs above 240 bytes; its short forms are left to the
// caller. Bytes are taken in as stripes, each when more bytes follow: the last one is summed in another way.

#include <immintrin.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t STRIPE = 64, STRIPES_PER_BLOCK = 16, SECRET_BYTES = 192;
constexpr int64_t PIECE_BYTES = 8 << 10;

constexpr uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9,
                   P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;
constexpr uint64_t AVALANCHE = 0x165667919E3779F9;

constexpr uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9,
    0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78,
    0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6,
    0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71,
    0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3,
    0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8,
    0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa,
    0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b,
    0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95,
    0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct Sum {
    uint64_t lanes[8];
    uint8_t secret[SECRET_BYTES];
    uint8_t before[STRIPE];   // the stripe that was taken in last
    uint8_t pending[STRIPE];  // bytes after it
    int64_t num_pending, num_stripes, num_bytes;  // num_stripes of the block under way
};

uint64_t read64(const uint8_t *at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

__m256i load(const void *at) { return _mm256_loadu_si256(static_cast<const __m256i *>(at)); }

__m256i mixed(__m256i lanes, const uint8_t *data, const uint8_t *secret) {
    __m256i value = load(data), key = _mm256_xor_si256(value, load(secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    __m256i neighbours = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(product, _mm256_add_epi64(lanes, neighbours));
}

void accumulate(uint64_t *lanes, const uint8_t *data, const uint8_t *secret, int64_t num_stripes) {
    __m256i low = load(lanes), high = load(lanes + 4);
    for (int64_t n = 0; n < num_stripes; ++n, data += STRIPE, secret += 8) {
        _mm_prefetch(reinterpret_cast<const char *>(data) + 512, _MM_HINT_T0);
        low = mixed(low, data, secret);
        high = mixed(high, data + 32, secret + 32);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(lanes), low);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(lanes + 4), high);
}

void take(Sum &sum, const uint8_t *data, int64_t num_stripes) {
    while (num_stripes > 0) {
        int64_t now = std::min(num_stripes, STRIPES_PER_BLOCK - sum.num_stripes);
        accumulate(sum.lanes, data, sum.secret + 8 * sum.num_stripes, now);
        data += now * STRIPE;
        num_stripes -= now;
        sum.num_stripes += now;
        if (sum.num_stripes < STRIPES_PER_BLOCK) continue;
        sum.num_stripes = 0;
        const uint8_t *secret = sum.secret + SECRET_BYTES - STRIPE;
        for (int i = 0; i < 8; ++i) {
            uint64_t lane = sum.lanes[i];
            sum.lanes[i] = (lane ^ (lane >> 47) ^ read64(secret + 8 * i)) * P32_1;
        }
    }
}

void update(Sum &sum, const uint8_t *data, int64_t num_bytes) {
    sum.num_bytes += num_bytes;
    while (num_bytes > 0) {
        if (sum.num_pending == STRIPE) {
            take(sum, sum.pending, 1);
            std::memcpy(sum.before, sum.pending, STRIPE);
            sum.num_pending = 0;
        }
        if (sum.num_pending == 0 && num_bytes > STRIPE) {
            int64_t whole = (num_bytes - 1) / STRIPE;
            take(sum, data, whole);
            data += whole * STRIPE;
            num_bytes -= whole * STRIPE;
            std::memcpy(sum.before, data - STRIPE, STRIPE);
        }
        int64_t now = std::min(num_bytes, STRIPE - sum.num_pending);
        std::memcpy(sum.pending + sum.num_pending, data, now);
        sum.num_pending += now;
        data += now;
        num_bytes -= now;
    }
}

uint64_t folded(uint64_t one, uint64_t other) {
    unsigned __int128 product = static_cast<unsigned __int128>(one) * other;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr int64_t MAX_RUNS = 1024;  // IOV_MAX

// One message of runs; what was moved of it is left out of the next call.
struct Message {
    iovec runs[MAX_RUNS];
    msghdr header{};

    Message(uint8_t *base, const int64_t *starts, const int64_t *lengths, int64_t num_runs) {
        for (int64_t run = 0; run < num_runs; ++run) runs[run] = {base + starts[run], static_cast<size_t>(lengths[run])};
        header.msg_iov = runs;
        header.msg_iovlen = num_runs;
    }

    void advance(size_t moved) {
        while (header.msg_iovlen && moved >= header.msg_iov->iov_len) {
            moved -= header.msg_iov->iov_len;
            ++header.msg_iov;
            --header.msg_iovlen;
        }
        if (!moved) return;
        header.msg_iov->iov_base = static_cast<uint8_t *>(header.msg_iov->iov_base) + moved;
        header.msg_iov->iov_len -= moved;
    }
};

}  // namespace

extern "C" {

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

// Runs of the source into the target, summed; where target is null they are only summed. The caller has checked bounds.
void disagg_copy_sum(void *state, const uint8_t *source, uint8_t *target, const int64_t *to, const int64_t *from,
                     const int64_t *lengths, int64_t num_runs) {
    Sum &sum = *static_cast<Sum *>(state);
    for (int64_t run = 0; run < num_runs; ++run) {
        for (int64_t at = 0; at < lengths[run]; at += PIECE_BYTES) {
            int64_t num_bytes = std::min(PIECE_BYTES, lengths[run] - at);
            const uint8_t *data = source + from[run] + at;
            if (target) std::memcpy(target + to[run] + at, data, num_bytes);
            update(sum, data, num_bytes);
        }
    }
}

// Of more than 240 bytes. The state may be used on.
uint64_t disagg_sum_end(const void *state) {
    const Sum &sum = *static_cast<const Sum *>(state);
    uint64_t lanes[8];
    uint8_t last[STRIPE];
    std::memcpy(lanes, sum.lanes, sizeof lanes);
    std::memcpy(last, sum.before + sum.num_pending, STRIPE - sum.num_pending);
    std::memcpy(last + STRIPE - sum.num_pending, sum.pending, sum.num_pending);
    accumulate(lanes, last, sum.secret + SECRET_BYTES - STRIPE - 7, 1);
    const uint8_t *secret = sum.secret + 11;
    uint64_t result = static_cast<uint64_t>(sum.num_bytes) * P64_1;
    for (int i = 0; i < 4; ++i)
        result += folded(lanes[2 * i] ^ read64(secret + 16 * i), lanes[2 * i + 1] ^ read64(secret + 16 * i + 8));
    result = (result ^ (result >> 37)) * AVALANCHE;
    return result ^ (result >> 32);
}

// Sums runs (where state is not null) and sends them over a blocking socket. 0, or a negative errno.
int disagg_send_runs(int socket, void *state, const uint8_t *source, const int64_t *from, const int64_t *lengths,
                     int64_t num_runs, int flags) {
    if (num_runs > MAX_RUNS) return -EMSGSIZE;
    for (int64_t run = 0; state && run < num_runs; ++run) update(*static_cast<Sum *>(state), source + from[run], lengths[run]);
    Message message(const_cast<uint8_t *>(source), from, lengths, num_runs);
    while (message.header.msg_iovlen) {
        ssize_t sent = sendmsg(socket, &message.header, flags | MSG_NOSIGNAL);
        if (sent >= 0)
            message.advance(sent);
        else if (errno != EINTR)
            return -errno;
    }
    return 0;
}

// Fills runs from a blocking socket, then sums them. 0, a negative errno, or 1 when the peer sends no more.
int disagg_receive_runs(int socket, void *state, uint8_t *target, const int64_t *to, const int64_t *lengths,
                        int64_t num_runs) {
    if (num_runs > MAX_RUNS) return -EMSGSIZE;
    Message message(target, to, lengths, num_runs);
    while (message.header.msg_iovlen) {
        ssize_t received = recvmsg(socket, &message.header, MSG_WAITALL);
        if (received == 0) return 1;
        if (received > 0)
            message.advance(received);
        else if (errno != EINTR)
            return -errno;
    }
    for (int64_t run = 0; state && run < num_runs; ++run) update(*static_cast<Sum *>(state), target + to[run], lengths[run]);
    return 0;
}

}  // extern "C"
