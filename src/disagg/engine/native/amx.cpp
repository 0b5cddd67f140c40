// int8 products of many rows on AMX: exact sums of a group of inputs by 16 x 16 tiles, then the very float operations
// that kernels.cpp does, so the bits are the same.

#include "int8_rows.h"
#include "kernels.h"
#include "scratch.h"
#include "simd.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace disagg {
namespace amx {

using namespace ::DISAGG_ISA;

constexpr int64_t TILE = 16;               // rows and columns of sums
constexpr int64_t BLOCK = 2 * TILE;        // rows and columns of one job's step
constexpr int64_t BLOCK_BYTES = 512 * 1024;  // of weights of one job
constexpr int REQUEST_PERMISSION = 0x1023;  // arch_prctl
constexpr int TILE_DATA = 18;

bool try_enable() {
    bool is_here = __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-tile");
    return is_here && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

struct __attribute__((packed)) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// A constant: GCC 12 does not see that the instruction reads it and would leave out stores to a local one.
static const TileShapes shapes;

static void shape_tiles() { _tile_loadconfig(&shapes); }

static void quantize(const Int8Product &p, const QuantizedRows &x) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t r = 0; r < x.rows; r++) {
        int8_t *q = x.values + r * x.groups * GROUP;
        float *scales = x.scales + r * x.groups;
        if (r >= p.rows) {  // rows that fill the last tile
            std::memset(q, 0, x.groups * GROUP);
            std::fill(scales, scales + x.groups, 0.0f);
            continue;
        }
        quantize_row(p.x + r * p.inputs, p.inputs, q, scales, x.sums + r * x.groups);
    }
}

// Sums of one group for BLOCK rows and two panels: sums[row half][panel][16][16].
static inline void group_sums(const int8_t *q, int64_t q_row, const int8_t *first, const int8_t *second, int32_t *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, q, q_row);
    _tile_loadd(6, first, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, second, 64);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, q + TILE * q_row, q_row);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

// out [BLOCK][BLOCK] += sums, scaled
static inline void add_group(const int32_t *sums, const float *row_scales, int64_t groups, Vec scale, Vec other, float *out) {
    for (int64_t r = 0; r < BLOCK; r++) {
        Vec factor = splat(row_scales[r * groups]);
        const int32_t *row = sums + (r / TILE) * 512 + (r % TILE) * TILE;
        float *to = out + r * BLOCK;
        store(to, fma(from_ints(row), mul(scale, factor), load(to)));
        store(to + LANES, fma(from_ints(row + 256), mul(other, factor), load(to + LANES)));
    }
}

// Rows [row, row + BLOCK) and the panels n and n + 1.
static void tile_block(const Int8Product &p, const QuantizedRows &x, int64_t row, int64_t n) {
    alignas(64) int32_t sums[2][4 * TILE * TILE];
    alignas(64) float out[BLOCK * BLOCK];
    int64_t groups = x.groups, panel_bytes = groups * GROUP * INT8_PANEL;
    int64_t num_panels = (p.outputs + INT8_PANEL - 1) / INT8_PANEL, other = std::min(n + 1, num_panels - 1);
    int64_t columns = std::min(BLOCK, p.outputs - n * INT8_PANEL);
    for (int64_t r = 0; r < BLOCK; r++)
        for (int64_t c = 0; c < BLOCK; c += LANES)
            store(out + r * BLOCK + c, p.bias && c < columns ? load(p.bias + n * INT8_PANEL + c) : zero());
    for (int64_t g = 0; g < groups; g++) {
        int64_t at = g * GROUP * INT8_PANEL;
        group_sums(x.values + (row * groups + g) * GROUP, groups * GROUP, p.weights + n * panel_bytes + at,
                   p.weights + other * panel_bytes + at, sums[g % 2]);
        add_group(sums[g % 2], x.scales + row * groups + g, groups, load(p.scales + (n * groups + g) * INT8_PANEL),
                  load(p.scales + (other * groups + g) * INT8_PANEL), out);
    }
    for (int64_t r = 0; r < std::min(BLOCK, p.rows - row); r++)
        std::memcpy(p.y + (row + r) * p.outputs + n * INT8_PANEL, out + r * BLOCK, columns * sizeof(float));
}

void product_int8(const Int8Product &p) {
    thread_local Scratch<int8_t> values;
    thread_local Scratch<float> row_scales;
    thread_local Scratch<int32_t> row_sums;
    int64_t groups = (p.inputs + GROUP - 1) / GROUP, num_panels = (p.outputs + INT8_PANEL - 1) / INT8_PANEL;
    int64_t rows = (p.rows + BLOCK - 1) / BLOCK * BLOCK, num_pairs = (num_panels + 1) / 2;
    QuantizedRows x{rows, groups, values.take(rows * groups * GROUP), row_scales.take(rows * groups),
                    row_sums.take(rows * groups)};
    quantize(p, x);
    // Panels of one job stay in the second cache while the rows pass by; a row's results lie side by side.
    int64_t fair = (num_pairs + 2 * num_threads - 1) / (2 * num_threads);
    int64_t step = std::max<int64_t>(1, std::min(BLOCK_BYTES / (2 * groups * GROUP * INT8_PANEL), fair));
    int64_t num_jobs = (num_pairs + step - 1) / step;
#pragma omp parallel num_threads(num_threads)
    {
        shape_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < num_jobs; job++)
            for (int64_t row = 0; row < p.rows; row += BLOCK)
                for (int64_t pair = job * step; pair < std::min((job + 1) * step, num_pairs); pair++)
                    tile_block(p, x, row, 2 * pair);
        _tile_release();
    }
}

}  // namespace amx
}  // namespace disagg
