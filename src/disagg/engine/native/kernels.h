// The operations of a step, once per instruction set. Matrices are row-major float32 unless said otherwise.
#pragma once

#include <cstdint>

namespace disagg {

extern int num_threads;  // of every parallel operation

constexpr int64_t PANEL = 32;       // columns of a packed float matrix that lie together
constexpr int64_t INT8_PANEL = 16;  // the same of an int8 matrix
constexpr int64_t BLOCK = 32;       // weights that share a scale in a file
constexpr int64_t GROUP = 64;       // inputs that share one scale in an int8 matrix, and in the rows it is multiplied by
constexpr int64_t FINE_GROUP = 32;  // the same where accuracy counts most
constexpr int32_t FINE = 254;       // fine steps in a coarse one, see QuantizedRows
constexpr int64_t KEY_TILE = 64;    // keys that are scored together, at fixed positions of a sequence
constexpr int64_t SEGMENT = 512;    // keys whose sums are formed apart and then merged
static_assert(SEGMENT % KEY_TILE == 0);

// y [rows, outputs] = x [rows, inputs] W^T + bias. W is packed as [panel][input][PANEL], zero columns at the end.
struct Product {
    int64_t rows, inputs, outputs;
    const float *x;
    const void *weights;
    const float *bias;  // padded to whole panels, or null
    float *y;
};

// The same with W as int8 [panel][group][group size / 4][INT8_PANEL][4] and scales [panel][group][INT8_PANEL].
struct Int8Product {
    int64_t rows, inputs, outputs, group;  // GROUP or FINE_GROUP
    const float *x;
    const int8_t *weights;
    const float *scales;
    const float *bias;
    float *y;
};

// How a row of weights is stored, in GGUF's numbers.
enum Kind : uint8_t { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, BF16 = 30 };

// A matrix W [outputs][inputs] where it lies: each row by its address and its kind.
struct Rows {
    int64_t outputs, inputs;
    const uint8_t *const *rows;
    const uint8_t *kinds;
};

// W into the form that Product takes, or row by row.
struct Packing {
    Rows from;
    void *weights;
};

// W into the form that Int8Product takes, scales chosen for the least squared error.
struct Int8Packing {
    Rows from;
    int64_t group;
    int8_t *weights;
    float *scales;
};

// Attention of the rows of a step over the paged cache of one layer: keys and values [slot][kv_heads][head_dim].
struct Attention {
    int64_t num_sequences, num_heads, num_kv_heads, head_dim, block_size;
    const int64_t *starts;     // first row of each sequence
    const int64_t *lengths;    // its rows in this step
    const int64_t *positions;  // of its first row
    const int64_t *offsets;    // of its block table in `tables`
    const int32_t *tables;
    const float *queries;  // [rows][query_stride], rotated
    int64_t query_stride;
    const void *keys, *values;
    float *out;  // [rows][num_heads * head_dim]
};

// Turns queries in place and keys on their way into the cache; queries, keys and values lie side by side in qkv.
struct RotateStore {
    int64_t rows, num_heads, num_kv_heads, head_dim;
    float *qkv;
    const float *cos, *sin;           // [position][head_dim]
    const int64_t *positions, *slots;  // [rows]
    const float *query_norm, *key_norm;  // [head_dim] or null
    float eps;
    void *keys, *values;
};

struct Kernels {
    void (*product_f32)(const Product &);
    void (*product_f16)(const Product &);
    void (*product_int8)(const Int8Product &);
    void (*pack_f32)(const Packing &);
    void (*pack_f16)(const Packing &);
    void (*pack_int8)(const Int8Packing &);
    void (*unpack_f32)(const Packing &);
    void (*unpack_f16)(const Packing &);
    void (*attend_f32)(const Attention &);
    void (*attend_f16)(const Attention &);
    void (*rotate_store_f32)(const RotateStore &);
    void (*rotate_store_f16)(const RotateStore &);
    // x += delta (if not null); y = x / rms(x) * weight
    void (*add_norm)(int64_t rows, int64_t width, float *x, const float *delta, const float *weight, float eps, float *y);
    // y [rows, width] = silu(x[:, :width]) * x[:, width:]
    void (*gate)(int64_t rows, int64_t width, const float *x, float *y);
};

namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace amx {
void product_int8(const Int8Product &);  // for many rows; the same bits as the others'
void product_f16(const Product &);       // bits of their own
void product_f32(const Product &);
bool try_enable();  // asks the kernel; once per process
}

// Rows as whole numbers of 16 bits in two bytes: x = scale * (FINE * coarse + fine), one scale per group of SIZE.
template <int64_t SIZE>
struct QuantizedRows {
    int64_t rows, groups;
    int8_t *values;  // [row][group][coarse, fine][SIZE]
    float *scales;   // [row][group]
    int32_t *sums;   // [row][group][coarse, fine]; null: not wanted

    int8_t *at(int64_t row, int64_t group) const { return values + (row * groups + group) * 2 * SIZE; }
    int64_t row_bytes() const { return groups * 2 * SIZE; }
};

}  // namespace disagg
