// What Python calls: picks the instruction set once and passes plain arguments on.

#include "kernels.h"

#include <cstdint>

namespace disagg {
int num_threads = 1;
}

using namespace disagg;

namespace {

enum Isa : int { NONE = 0, AVX2 = 1, AVX512 = 2, AMX = 3, AMX_BF16 = 4 };

int best_isa() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return NONE;
    bool has_512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512vnni");
    if (!has_512) return AVX2;
    if (!amx::try_enable()) return AVX512;
    return __builtin_cpu_supports("amx-bf16") ? AMX_BF16 : AMX;
}

int isa = NONE;
constexpr int64_t MIN_AMX_ROWS = 10;  // fewer than a tile has, and yet faster

const Kernels &kernels() { return isa >= AVX512 ? avx512::kernels : avx2::kernels; }

}  // namespace

extern "C" {

// The best level of this machine that is at most `wanted`; it is used from now on. 0: none.
int disagg_choose_isa(int wanted) {
    int best = best_isa();
    isa = wanted < best ? wanted : best;
    return isa;
}

int disagg_isa() { return isa; }

void disagg_set_num_threads(int wanted) { num_threads = wanted; }

// is_split: by parts in tiles, which level AMX_BF16 alone can do.
void disagg_product(int is_half, int is_split, int64_t rows, int64_t inputs, int64_t outputs, const float *x, const void *weights,
                    const float *bias, float *y) {
    if (rows < 1) return;
    Product p{rows, inputs, outputs, x, weights, bias, y};
    if (is_split && isa >= AMX_BF16)
        is_half ? amx::product_f16(p) : amx::product_f32(p);
    else
        is_half ? kernels().product_f16(p) : kernels().product_f32(p);
}

void disagg_product_int8(int64_t group, int64_t rows, int64_t inputs, int64_t outputs, const float *x, const int8_t *weights,
                         const float *scales, const float *bias, float *y) {
    if (rows < 1) return;
    Int8Product p{rows, inputs, outputs, group, x, weights, scales, bias, y};
    isa >= AMX && rows >= MIN_AMX_ROWS ? amx::product_int8(p) : kernels().product_int8(p);
}

// rows: where each output's weights begin; kinds: how they are stored.
void disagg_pack(int is_half, int64_t outputs, int64_t inputs, const uint8_t *const *rows, const uint8_t *kinds, void *weights) {
    Packing p{{outputs, inputs, rows, kinds}, weights};
    is_half ? kernels().pack_f16(p) : kernels().pack_f32(p);
}

void disagg_pack_int8(int64_t group, int64_t outputs, int64_t inputs, const uint8_t *const *rows, const uint8_t *kinds,
                      int8_t *weights, float *scales) {
    kernels().pack_int8(Int8Packing{{outputs, inputs, rows, kinds}, group, weights, scales});
}

void disagg_unpack(int is_half, int64_t outputs, int64_t inputs, const uint8_t *const *rows, const uint8_t *kinds,
                   void *weights) {
    Packing p{{outputs, inputs, rows, kinds}, weights};
    is_half ? kernels().unpack_f16(p) : kernels().unpack_f32(p);
}

void disagg_attend(int is_half, int64_t num_sequences, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                   int64_t block_size, const int64_t *spans, const int32_t *tables, const float *queries,
                   int64_t query_stride, const void *keys, const void *values, float *out) {
    Attention a{num_sequences, num_heads, num_kv_heads, head_dim, block_size,
                spans, spans + num_sequences, spans + 2 * num_sequences, spans + 3 * num_sequences, tables,
                queries, query_stride, keys, values, out};
    is_half ? kernels().attend_f16(a) : kernels().attend_f32(a);
}

void disagg_rotate_store(int is_half, int64_t rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, float *qkv,
                         const float *cos, const float *sin, const int64_t *positions, const int64_t *slots,
                         const float *query_norm, const float *key_norm, float eps, void *keys, void *values) {
    RotateStore p{rows, num_heads, num_kv_heads, head_dim, qkv, cos, sin, positions, slots,
                  query_norm, key_norm, eps, keys, values};
    is_half ? kernels().rotate_store_f16(p) : kernels().rotate_store_f32(p);
}

void disagg_add_norm(int64_t rows, int64_t width, float *x, const float *delta, const float *weight, float eps, float *y) {
    kernels().add_norm(rows, width, x, delta, weight, eps, y);
}

void disagg_gate(int64_t rows, int64_t width, const float *x, float *y) { kernels().gate(rows, width, x, y); }
}
