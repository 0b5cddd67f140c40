// Attention over the paged cache: keys in tiles at fixed positions, online softmax, sums of segments merged in order.
#pragma once

#include "kernels.h"
#include "scratch.h"
#include "simd.h"
#include "tiles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace disagg {
namespace DISAGG_ISA {

constexpr int64_t MAX_QUERY_ROWS = 96;  // (row, head) pairs that are done together
constexpr float NONE = -std::numeric_limits<float>::infinity();

static inline float exponential_of(float x) {
    float lanes[LANES];
    store(lanes, exponential(splat(x)));
    return lanes[0];
}

// Running softmax of some (row, head) pairs: largest score, sum of weights, weighted values [pair][head_dim].
struct Sums {
    float *peak, *weight, *values;
};

// Query rows [first, first + rows) of a sequence and the heads of one KV head, over one segment of its keys.
template <class Cache>
class SegmentPass {
  public:
    SegmentPass(const Attention &a, int64_t sequence, int64_t kv_head, int64_t first, int64_t rows)
        : a_(a), kv_head_(kv_head), group_(a.num_heads / a.num_kv_heads), rows_(rows),
          position_(a.positions[sequence] + first), table_(a.tables + a.offsets[sequence]) {
        thread_local Scratch<float> queries, keys, values, scores;
        queries_ = queries.take(rows * group_ * a.head_dim);
        keys_ = keys.take(a.head_dim * KEY_TILE);
        values_ = values.take(a.head_dim * KEY_TILE);
        scores_ = scores.take(rows * group_ * KEY_TILE);
        Vec scale = splat(1.0f / std::sqrt(float(a.head_dim)));
        for (int64_t r = 0; r < rows; r++) {
            const float *from = a.queries + (a.starts[sequence] + first + r) * a.query_stride + kv_head * group_ * a.head_dim;
            float *to = queries_ + r * group_ * a.head_dim;
            for (int64_t d = 0; d < group_ * a.head_dim; d += LANES) store(to + d, mul(load(from + d), scale));
        }
    }

    int64_t num_pairs() const { return rows_ * group_; }

    void run(int64_t first_key, const Sums &sums) {
        int64_t num_keys = position_ + rows_, last_key = std::min(first_key + SEGMENT, num_keys);
        for (int64_t i = 0; i < num_pairs(); i++) {
            sums.peak[i] = NONE;
            sums.weight[i] = 0.0f;
        }
        std::memset(sums.values, 0, num_pairs() * a_.head_dim * sizeof(float));
        for (int64_t key = first_key; key < last_key; key += KEY_TILE) {
            int64_t present = std::min(KEY_TILE, last_key - key);
            turn_keys(key, present);
            score();
            weigh(key, sums);
            add_values(key, present, sums);
        }
    }

  private:
    const Cache *slot(const void *cache, int64_t token) const {
        int64_t place = int64_t(table_[token / a_.block_size]) * a_.block_size + token % a_.block_size;
        return static_cast<const Cache *>(cache) + (place * a_.num_kv_heads + kv_head_) * a_.head_dim;
    }

    // keys_ [head_dim][KEY_TILE]; places without a key are 0
    void turn_keys(int64_t key, int64_t present) {
        for (int64_t t = 0; t < KEY_TILE; t += LANES) {
            const Cache *rows[LANES];
            for (int64_t i = 0; i < LANES; i++) rows[i] = t + i < present ? slot(a_.keys, key + t + i) : nullptr;
            for (int64_t d = 0; d < a_.head_dim; d += LANES) {
                Vec square[LANES];
                for (int i = 0; i < LANES; i++) square[i] = rows[i] ? load(rows[i] + d) : zero();
                transpose(square, keys_ + d * KEY_TILE + t, KEY_TILE);
            }
        }
    }

    void score() {
        for (int64_t i = 0; i < num_pairs(); i += TILE_ROWS)
            for (int64_t t = 0; t < KEY_TILE; t += TILE_VECS * LANES)
                tile_of<TILE_ROWS, TILE_VECS>(int(std::min<int64_t>(TILE_ROWS, num_pairs() - i)), a_.head_dim,
                                              queries_ + i * a_.head_dim, a_.head_dim, 1, keys_ + t, KEY_TILE,
                                              static_cast<const float *>(nullptr), 0, scores_ + i * KEY_TILE + t, KEY_TILE);
    }

    // Scores become weights relative to the new peak; earlier sums are brought to it.
    void weigh(int64_t key, const Sums &sums) {
        for (int64_t i = 0; i < num_pairs(); i++) {
            float *s = scores_ + i * KEY_TILE;
            int64_t visible = position_ + i / group_ + 1 - key;
            if (visible <= 0) {
                std::memset(s, 0, KEY_TILE * sizeof(float));
                continue;
            }
            for (int64_t t = visible; t < KEY_TILE; t++) s[t] = NONE;
            Vec tops = max(max(load(s), load(s + LANES)), max(load(s + 2 * LANES), load(s + 3 * LANES)));
            float peak = std::max(sums.peak[i], largest(tops));
            float correction = sums.peak[i] == NONE ? 0.0f : exponential_of(sums.peak[i] - peak);
            Vec total = zero();
            for (int64_t t = 0; t < KEY_TILE; t += LANES) {
                store(s + t, exponential(sub(load(s + t), splat(peak))));
                for (int64_t j = std::max(visible, t); j < t + LANES; j++) s[j] = 0.0f;
                total = add(total, load(s + t));
            }
            sums.peak[i] = peak;
            sums.weight[i] = std::fma(sums.weight[i], correction, sum(total));
            if (correction != 1.0f) {
                float *values = sums.values + i * a_.head_dim;
                for (int64_t d = 0; d < a_.head_dim; d += LANES) store(values + d, mul(load(values + d), splat(correction)));
            }
        }
    }

    void add_values(int64_t key, int64_t present, const Sums &sums) {
        if (num_pairs() > TILE_ROWS) return add_copied_values(key, present, sums);
        int64_t width = a_.num_kv_heads * a_.head_dim;
        for (int64_t t = 0; t < present;) {
            int64_t run = std::min(a_.block_size - (key + t) % a_.block_size, present - t);
            const Cache *values = slot(a_.values, key + t);
            for (int64_t i = 0; i < num_pairs(); i += TILE_ROWS)
                add_run(int(std::min<int64_t>(TILE_ROWS, num_pairs() - i)), run, scores_ + i * KEY_TILE + t, values, width,
                        sums.values + i * a_.head_dim);
            t += run;
        }
    }

    // Many pairs use each value: worth its own place, as floats side by side.
    void add_copied_values(int64_t key, int64_t present, const Sums &sums) {
        for (int64_t t = 0; t < present; t++) {
            const Cache *from = slot(a_.values, key + t);
            for (int64_t d = 0; d < a_.head_dim; d += LANES) store(values_ + t * a_.head_dim + d, load(from + d));
        }
        for (int64_t i = 0; i < num_pairs(); i += TILE_ROWS)
            add_run(int(std::min<int64_t>(TILE_ROWS, num_pairs() - i)), present, scores_ + i * KEY_TILE, values_, a_.head_dim,
                    sums.values + i * a_.head_dim);
    }

    template <class Value>
    void add_run(int pairs, int64_t run, const float *weights, const Value *values, int64_t width, float *to) {
        int64_t d = 0;
        for (; d + TILE_VECS * LANES <= a_.head_dim; d += TILE_VECS * LANES)
            tile_of<TILE_ROWS, TILE_VECS>(pairs, run, weights, KEY_TILE, 1, values + d, width, to + d, a_.head_dim, to + d,
                                          a_.head_dim);
        for (; d < a_.head_dim; d += LANES)
            tile_of<TILE_ROWS, 1>(pairs, run, weights, KEY_TILE, 1, values + d, width, to + d, a_.head_dim, to + d,
                                  a_.head_dim);
    }

    const Attention &a_;
    int64_t kv_head_, group_, rows_, position_;
    const int32_t *table_;
    float *queries_, *keys_, *values_, *scores_;
};

static void merge(int64_t num_pairs, int64_t head_dim, const Sums &part, const Sums &total) {
    for (int64_t i = 0; i < num_pairs; i++) {
        if (part.peak[i] == NONE) continue;
        float peak = std::max(total.peak[i], part.peak[i]);
        float before = total.peak[i] == NONE ? 0.0f : exponential_of(total.peak[i] - peak);
        float now = exponential_of(part.peak[i] - peak);
        total.peak[i] = peak;
        total.weight[i] = std::fma(total.weight[i], before, part.weight[i] * now);
        for (int64_t d = 0; d < head_dim; d += LANES) {
            float *to = total.values + i * head_dim + d;
            store(to, fma(load(to), splat(before), mul(load(part.values + i * head_dim + d), splat(now))));
        }
    }
}

static Sums sums_at(float *memory, int64_t num_pairs) { return {memory, memory + num_pairs, memory + 2 * num_pairs}; }

static Sums no_sums(float *memory, int64_t num_pairs, int64_t head_dim) {
    Sums total = sums_at(memory, num_pairs);
    std::fill(total.peak, total.peak + num_pairs, NONE);
    std::fill(total.weight, total.weight + num_pairs, 0.0f);
    std::memset(total.values, 0, num_pairs * head_dim * sizeof(float));
    return total;
}

static void write_out(const Attention &a, int64_t row, int64_t rows, int64_t kv_head, const Sums &total) {
    int64_t group = a.num_heads / a.num_kv_heads;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < group; h++) {
            int64_t i = r * group + h;
            float *to = a.out + ((row + r) * a.num_heads + kv_head * group + h) * a.head_dim;
            for (int64_t d = 0; d < a.head_dim; d += LANES)
                store(to + d, div(load(total.values + i * a.head_dim + d), splat(total.weight[i])));
        }
}

// One job of rows of one sequence: all segments, in order.
template <class Cache>
static void attend_rows(const Attention &a, int64_t sequence, int64_t kv_head, int64_t first, int64_t rows) {
    thread_local Scratch<float> scratch;
    SegmentPass<Cache> pass(a, sequence, kv_head, first, rows);
    int64_t pairs = pass.num_pairs(), size = pairs * (a.head_dim + 2);
    float *memory = scratch.take(2 * size);
    Sums total = no_sums(memory, pairs, a.head_dim), part = sums_at(memory + size, pairs);
    for (int64_t key = 0; key < a.positions[sequence] + first + rows; key += SEGMENT) {
        pass.run(key, part);
        merge(pairs, a.head_dim, part, total);
    }
    write_out(a, a.starts[sequence] + first, rows, kv_head, total);
}

struct Job {
    int64_t sequence, kv_head, first, rows;
};

// One job's segments are done one after the other, or, where there are few jobs for the threads, each by whoever is
// free: their sums are merged in the same order, so the bits are the same.
constexpr int64_t FEW_JOBS = 4;  // per thread

template <class Cache>
static void attend_apart(const Attention &a, const Job *jobs, int64_t count) {
    thread_local Scratch<int64_t> firsts;
    thread_local Scratch<float> sums;
    int64_t *first = firsts.take(count + 1), most_pairs = 0, group = a.num_heads / a.num_kv_heads;
    first[0] = 0;
    for (int64_t j = 0; j < count; j++) {
        int64_t num_keys = a.positions[jobs[j].sequence] + jobs[j].first + jobs[j].rows;
        first[j + 1] = first[j] + (num_keys + SEGMENT - 1) / SEGMENT;
        most_pairs = std::max(most_pairs, jobs[j].rows * group);
    }
    int64_t size = most_pairs * (a.head_dim + 2);
    float *memory = sums.take((first[count] + count) * size);
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < first[count]; piece++) {
            int64_t j = std::upper_bound(first, first + count, piece) - first - 1;
            SegmentPass<Cache> pass(a, jobs[j].sequence, jobs[j].kv_head, jobs[j].first, jobs[j].rows);
            pass.run((piece - first[j]) * SEGMENT, sums_at(memory + piece * size, pass.num_pairs()));
        }
#pragma omp for schedule(static)
        for (int64_t j = 0; j < count; j++) {
            int64_t pairs = jobs[j].rows * group;
            Sums total = no_sums(memory + (first[count] + j) * size, pairs, a.head_dim);
            for (int64_t piece = first[j]; piece < first[j + 1]; piece++)
                merge(pairs, a.head_dim, sums_at(memory + piece * size, pairs), total);
            write_out(a, a.starts[jobs[j].sequence] + jobs[j].first, jobs[j].rows, jobs[j].kv_head, total);
        }
    }
}

template <class Cache>
static void attend(const Attention &a) {
    int64_t group = a.num_heads / a.num_kv_heads, step = std::max<int64_t>(1, MAX_QUERY_ROWS / group);
    thread_local Scratch<Job> scratch;
    int64_t most = 0, count = 0, last_key = 0;
    for (int64_t s = 0; s < a.num_sequences; s++) {
        most += (a.lengths[s] + step - 1) / step * a.num_kv_heads;
        last_key = std::max(last_key, a.positions[s] + a.lengths[s]);
    }
    Job *jobs = scratch.take(most);
    for (int64_t s = 0; s < a.num_sequences; s++)
        for (int64_t first = 0; first < a.lengths[s]; first += step)
            for (int64_t head = 0; head < a.num_kv_heads; head++)
                jobs[count++] = {s, head, first, std::min(step, a.lengths[s] - first)};
    if (num_threads > 1 && count < FEW_JOBS * num_threads && last_key > SEGMENT) return attend_apart<Cache>(a, jobs, count);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (count > 1)
    for (int64_t j = count - 1; j >= 0; j--)  // the last rows of a chunk have most to do
        attend_rows<Cache>(a, jobs[j].sequence, jobs[j].kv_head, jobs[j].first, jobs[j].rows);
}

}  // namespace DISAGG_ISA
}  // namespace disagg
