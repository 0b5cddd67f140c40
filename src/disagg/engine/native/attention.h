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

// What is done together: query rows [first, first + rows) of a sequence, and the heads of some KV heads.
struct Job {
    int64_t sequence, first, rows, kv_head, num_kv_heads;
};

// Running softmax of some pairs, in the order [KV head][row][head]: largest score, sum of weights, weighted values
// [pair][head_dim].
struct Sums {
    float *peak, *weight, *values;
};

// A job, over one segment of its keys at a time.
template <class Cache>
class SegmentPass {
  public:
    SegmentPass(const Attention &a, const Job &job)
        : a_(a), job_(job), group_(a.num_heads / a.num_kv_heads), pairs_(job.rows * group_),
          position_(a.positions[job.sequence] + job.first), table_(a.tables + a.offsets[job.sequence]) {
        thread_local Scratch<float> queries, keys, values, scores;
        queries_ = queries.take(num_pairs() * a.head_dim);
        keys_ = keys.take(a.head_dim * KEY_TILE);
        values_ = values.take(a.head_dim * KEY_TILE);
        scores_ = scores.take(pairs_ * KEY_TILE);
        Vec scale = splat(1.0f / std::sqrt(float(a.head_dim)));
        int64_t width = group_ * a.head_dim;
        for (int64_t i = 0; i < job.num_kv_heads * job.rows; i++) {
            int64_t head = job.kv_head + i / job.rows, row = a.starts[job.sequence] + job.first + i % job.rows;
            const float *from = a.queries + row * a.query_stride + head * width;
            for (int64_t d = 0; d < width; d += LANES) store(queries_ + i * width + d, mul(load(from + d), scale));
        }
    }

    int64_t num_pairs() const { return job_.num_kv_heads * pairs_; }

    void run(int64_t first_key, const Sums &sums) {
        int64_t num_keys = position_ + job_.rows, last_key = std::min(first_key + SEGMENT, num_keys);
        for (int64_t i = 0; i < num_pairs(); i++) {
            sums.peak[i] = NONE;
            sums.weight[i] = 0.0f;
        }
        std::memset(sums.values, 0, num_pairs() * a_.head_dim * sizeof(float));
        Tile tile = find(first_key, num_keys);
        for (int64_t key = first_key; key < last_key; key += KEY_TILE) {
            Tile next = find(key + KEY_TILE, num_keys);
            tile.present = std::min(tile.present, last_key - key);
            for (int64_t i = 0; i < job_.num_kv_heads; i++) {
                Sums own{sums.peak + i * pairs_, sums.weight + i * pairs_, sums.values + i * pairs_ * a_.head_dim};
                int64_t offset = (job_.kv_head + i) * a_.head_dim;
                turn_keys(tile, next, offset);
                score(queries_ + i * pairs_ * a_.head_dim);
                weigh(key, own);
                add_values(tile, offset, own);
            }
            tile = next;
        }
    }

  private:
    // Where the keys and values of up to KEY_TILE tokens from `key` on lie in the cache: the elements of KV head 0.
    struct Tile {
        int64_t key, present, places[KEY_TILE];
    };

    Tile find(int64_t key, int64_t num_keys) const {
        Tile tile;
        tile.key = key;
        tile.present = std::max<int64_t>(0, std::min(KEY_TILE, num_keys - key));
        int64_t block = key / a_.block_size, token = key % a_.block_size, width = a_.num_kv_heads * a_.head_dim;
        for (int64_t t = 0; t < tile.present; t++, token++) {
            if (token == a_.block_size) block++, token = 0;
            tile.places[t] = (table_[block] * a_.block_size + token) * width;
        }
        return tile;
    }

    const Cache *keys_at(int64_t place) const { return static_cast<const Cache *>(a_.keys) + place; }
    const Cache *values_at(int64_t place) const { return static_cast<const Cache *>(a_.values) + place; }

    // Asks for the line at `d`, where one begins, into the second cache: the nearest has no room for a tile ahead.
    static void ask(const Cache *head, int64_t d) {
        if (d * sizeof(Cache) % 64 == 0) _mm_prefetch((const char *)(head + d), _MM_HINT_T1);
    }

    // keys_ [head_dim][KEY_TILE]; places without a key are 0. Asks for the values of the same tokens, wanted next, and for
    // the keys of the next tile.
    void turn_keys(const Tile &tile, const Tile &next, int64_t offset) {
        for (int64_t t = 0; t < KEY_TILE; t += LANES) {
            const Cache *rows[LANES];
            int64_t present = std::min<int64_t>(LANES, tile.present - t);
            int64_t coming = std::min<int64_t>(LANES, next.present - t);
            for (int64_t i = 0; i < LANES; i++) rows[i] = i < present ? keys_at(tile.places[t + i] + offset) : nullptr;
            for (int64_t d = 0; d < a_.head_dim; d += LANES) {
                for (int64_t i = 0; i < present; i++) ask(values_at(tile.places[t + i] + offset), d);
                for (int64_t i = 0; i < coming; i++) ask(keys_at(next.places[t + i] + offset), d);
                float *to = keys_ + d * KEY_TILE + t;
                if (present == LANES) {
                    transpose(rows, d, to, KEY_TILE);
                    continue;
                }
                Vec square[LANES];
                for (int i = 0; i < LANES; i++) square[i] = rows[i] ? load(rows[i] + d) : zero();
                transpose(square, to, KEY_TILE);
            }
        }
    }

    void score(const float *queries) {
        pairs_ <= WIDE_ROWS ? score_in<WIDE_ROWS, WIDE_VECS>(queries) : score_in<TILE_ROWS, TILE_VECS>(queries);
    }

    template <int ROWS, int VECS>
    void score_in(const float *queries) {
        for (int64_t i = 0; i < pairs_; i += ROWS)
            for (int64_t t = 0; t < KEY_TILE; t += VECS * LANES)
                tile_of<ROWS, VECS>(int(std::min<int64_t>(ROWS, pairs_ - i)), a_.head_dim, queries + i * a_.head_dim,
                                    a_.head_dim, 1, keys_ + t, KEY_TILE, static_cast<const float *>(nullptr), 0,
                                    scores_ + i * KEY_TILE + t, KEY_TILE);
    }

    // Scores become weights relative to the new peak; earlier sums are brought to it.
    void weigh(int64_t key, const Sums &sums) {
        for (int64_t i = 0; i < pairs_; i++) {
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

    void add_values(const Tile &tile, int64_t offset, const Sums &sums) {
        if (pairs_ > TILE_ROWS) return add_copied_values(tile, offset, sums);
        for (int64_t t = 0; t < tile.present;) {
            int64_t run = std::min(a_.block_size - (tile.key + t) % a_.block_size, tile.present - t);
            add_run(0, run, scores_ + t, values_at(tile.places[t] + offset), a_.num_kv_heads * a_.head_dim, sums);
            t += run;
        }
    }

    // Many pairs use each value: worth its own place, as floats side by side.
    void add_copied_values(const Tile &tile, int64_t offset, const Sums &sums) {
        for (int64_t t = 0; t < tile.present; t++) {
            const Cache *from = values_at(tile.places[t] + offset);
            for (int64_t d = 0; d < a_.head_dim; d += LANES) store(values_ + t * a_.head_dim + d, load(from + d));
        }
        for (int64_t i = 0; i < pairs_; i += TILE_ROWS)
            add_run(i, tile.present, scores_ + i * KEY_TILE, values_, a_.head_dim, sums);
    }

    // Values of `run` tokens, `width` apart, weighted, to up to TILE_ROWS pairs from `first` on.
    template <class Value>
    void add_run(int64_t first, int64_t run, const float *weights, const Value *values, int64_t width, const Sums &sums) {
        int pairs = int(std::min<int64_t>(TILE_ROWS, pairs_ - first));
        float *to = sums.values + first * a_.head_dim;
        pairs <= WIDE_ROWS ? add_columns<WIDE_ROWS, WIDE_VECS>(pairs, run, weights, values, width, to)
                           : add_columns<TILE_ROWS, TILE_VECS>(pairs, run, weights, values, width, to);
    }

    template <int ROWS, int VECS, class Value>
    void add_columns(int pairs, int64_t run, const float *weights, const Value *values, int64_t width, float *to) {
        int64_t d = 0, stride = a_.head_dim;
        for (; d + VECS * LANES <= stride; d += VECS * LANES)
            tile_of<ROWS, VECS>(pairs, run, weights, KEY_TILE, 1, values + d, width, to + d, stride, to + d, stride);
        for (; d < stride; d += LANES)
            tile_of<ROWS, 1>(pairs, run, weights, KEY_TILE, 1, values + d, width, to + d, stride, to + d, stride);
    }

    const Attention &a_;
    const Job job_;
    int64_t group_, pairs_, position_;  // pairs_: of one KV head
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

static void write_out(const Attention &a, const Job &job, const Sums &total) {
    int64_t group = a.num_heads / a.num_kv_heads, i = 0;
    for (int64_t head = job.kv_head; head < job.kv_head + job.num_kv_heads; head++)
        for (int64_t r = 0; r < job.rows; r++) {
            float *to = a.out + ((a.starts[job.sequence] + job.first + r) * a.num_heads + head * group) * a.head_dim;
            for (int64_t g = 0; g < group; g++, i++, to += a.head_dim)
                for (int64_t d = 0; d < a.head_dim; d += LANES)
                    store(to + d, div(load(total.values + i * a.head_dim + d), splat(total.weight[i])));
        }
}

static int64_t num_keys_of(const Attention &a, const Job &job) { return a.positions[job.sequence] + job.first + job.rows; }

// One job: all segments, in order.
template <class Cache>
static void attend_rows(const Attention &a, const Job &job) {
    thread_local Scratch<float> scratch;
    SegmentPass<Cache> pass(a, job);
    int64_t pairs = pass.num_pairs(), size = pairs * (a.head_dim + 2);
    float *memory = scratch.take(2 * size);
    Sums total = no_sums(memory, pairs, a.head_dim), part = sums_at(memory + size, pairs);
    for (int64_t key = 0; key < num_keys_of(a, job); key += SEGMENT) {
        pass.run(key, part);
        merge(pairs, a.head_dim, part, total);
    }
    write_out(a, job, total);
}

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
        first[j + 1] = first[j] + (num_keys_of(a, jobs[j]) + SEGMENT - 1) / SEGMENT;
        most_pairs = std::max(most_pairs, jobs[j].num_kv_heads * jobs[j].rows * group);
    }
    int64_t size = most_pairs * (a.head_dim + 2);
    float *memory = sums.take((first[count] + count) * size);
#pragma omp parallel num_threads(num_threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t piece = 0; piece < first[count]; piece++) {
            int64_t j = std::upper_bound(first, first + count, piece) - first - 1;
            SegmentPass<Cache> pass(a, jobs[j]);
            pass.run((piece - first[j]) * SEGMENT, sums_at(memory + piece * size, pass.num_pairs()));
        }
#pragma omp for schedule(static)
        for (int64_t j = 0; j < count; j++) {
            int64_t pairs = jobs[j].num_kv_heads * jobs[j].rows * group;
            Sums total = no_sums(memory + (first[count] + j) * size, pairs, a.head_dim);
            for (int64_t piece = first[j]; piece < first[j + 1]; piece++)
                merge(pairs, a.head_dim, sums_at(memory + piece * size, pairs), total);
            write_out(a, jobs[j], total);
        }
    }
}

// A single row does all KV heads of a token in turn, which lie side by side in memory, where rows are enough for the
// threads.
constexpr int64_t ENOUGH_ROWS = 2;  // per thread

template <class Cache>
static void attend(const Attention &a) {
    int64_t group = a.num_heads / a.num_kv_heads, step = std::max<int64_t>(1, MAX_QUERY_ROWS / group);
    thread_local Scratch<Job> scratch;
    int64_t most = 0, count = 0, last_key = 0, single = 0;
    for (int64_t s = 0; s < a.num_sequences; s++) {
        most += (a.lengths[s] + step - 1) / step * a.num_kv_heads;
        last_key = std::max(last_key, a.positions[s] + a.lengths[s]);
        single += a.lengths[s] == 1;
    }
    bool is_enough = num_threads == 1 || single >= ENOUGH_ROWS * num_threads;
    Job *jobs = scratch.take(most);
    for (int64_t s = 0; s < a.num_sequences; s++) {
        int64_t heads = a.lengths[s] == 1 && is_enough ? a.num_kv_heads : 1;
        for (int64_t first = 0; first < a.lengths[s]; first += step)
            for (int64_t head = 0; head < a.num_kv_heads; head += heads)
                jobs[count++] = {s, first, std::min(step, a.lengths[s] - first), head, heads};
    }
    if (num_threads > 1 && count < FEW_JOBS * num_threads && last_key > SEGMENT) return attend_apart<Cache>(a, jobs, count);
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1) if (count > 1)
    for (int64_t j = count - 1; j >= 0; j--)  // the last rows of a chunk have most to do
        attend_rows<Cache>(a, jobs[j]);
}

}  // namespace DISAGG_ISA
}  // namespace disagg
