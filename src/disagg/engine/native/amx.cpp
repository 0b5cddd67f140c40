// int8 products of many rows on AMX: exact sums of a group of inputs by 16 x 16 tiles, then the very float operations
// that kernels.cpp does, so the bits are the same.

#include "amx_tiles.h"
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

constexpr int64_t ROWS = 16, COLUMNS = 32;      // of one block of results: two panels
constexpr int64_t TILE = 16 * 16;               // sums in a tile
constexpr int64_t TOGETHER = 2;                 // groups whose sums are taken over at once
constexpr int64_t BLOCK_BYTES = 512 * 1024;     // of weights of one job
constexpr int REQUEST_PERMISSION = 0x1023;      // arch_prctl
constexpr int TILE_DATA = 18;

bool try_enable() {
    bool is_here = __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-tile");
    return is_here && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// Tiles 0 to 3 are sums, 4 and 5 coarse and fine rows, 6 and 7 weights of two panels.
template <int64_t SIZE>
constexpr TileShapes shapes = {
    1, 0, {}, {64, 64, 64, 64, SIZE, SIZE, 64, 64}, {16, 16, 16, 16, 16, 16, SIZE / 4, SIZE / 4}};

template <int64_t SIZE>
static void quantize(const Int8Product &p, const QuantizedRows<SIZE> &x) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
    for (int64_t r = 0; r < x.rows; r++) {
        if (r < p.rows) {
            quantize_row(p.x + r * p.inputs, p.inputs, x, r);
        } else {  // rows that fill the last block
            std::memset(x.at(r, 0), 0, x.row_bytes());
            std::fill(x.scales + r * x.groups, x.scales + (r + 1) * x.groups, 0.0f);
        }
    }
}

// Sums of one group for ROWS rows and two panels: [coarse, fine][panel][16][16].
template <int64_t SIZE>
static inline void group_sums(const int8_t *x, int64_t row_bytes, const int8_t *first, const int8_t *second, int32_t *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, x, row_bytes);
    _tile_loadd(6, first, 64);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, second, 64);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(5, x + SIZE, row_bytes);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + TILE, 64);
    _tile_stored(2, sums + 2 * TILE, 64);
    _tile_stored(3, sums + 3 * TILE, 64);
}

// FINE * coarse + fine: both are exact as floats, so this rounds once, as the conversion of their sum would.
static inline Vec joined(const int32_t *coarse) {
    return fma(from_ints(coarse), splat(float(FINE)), from_ints(coarse + 2 * TILE));
}

// out [ROWS][COLUMNS] += sums of COUNT groups, scaled, one after the other
template <int COUNT>
static inline void add_groups(const int32_t *sums, const float *row_scales, int64_t groups, const float *first,
                              const float *second, float *out) {
    Vec scales[COUNT], others[COUNT];
    for (int i = 0; i < COUNT; i++) {
        scales[i] = load(first + i * INT8_PANEL);
        others[i] = load(second + i * INT8_PANEL);
    }
    for (int64_t r = 0; r < ROWS; r++) {
        Vec low = load(out + r * COLUMNS), high = load(out + r * COLUMNS + LANES);
        for (int i = 0; i < COUNT; i++) {
            Vec factor = splat(row_scales[r * groups + i]);
            const int32_t *row = sums + i * 4 * TILE + r * LANES;
            low = fma(joined(row), mul(scales[i], factor), low);
            high = fma(joined(row + TILE), mul(others[i], factor), high);
        }
        store(out + r * COLUMNS, low);
        store(out + r * COLUMNS + LANES, high);
    }
}

// Rows [row, row + ROWS) and the panels n and n + 1.
template <int64_t SIZE>
static void block(const Int8Product &p, const QuantizedRows<SIZE> &x, int64_t row, int64_t n) {
    alignas(64) int32_t sums[2][TOGETHER * 4 * TILE];
    alignas(64) float out[ROWS * COLUMNS];
    int64_t groups = x.groups, panel_bytes = groups * SIZE * INT8_PANEL;
    int64_t num_panels = (p.outputs + INT8_PANEL - 1) / INT8_PANEL, other = std::min(n + 1, num_panels - 1);
    int64_t columns = std::min(COLUMNS, p.outputs - n * INT8_PANEL);
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t c = 0; c < COLUMNS; c += LANES)
            store(out + r * COLUMNS + c, p.bias && c < columns ? load(p.bias + n * INT8_PANEL + c) : zero());
    const int8_t *first = p.weights + n * panel_bytes, *second = p.weights + other * panel_bytes;
    const float *scales = p.scales + n * groups * INT8_PANEL, *others = p.scales + other * groups * INT8_PANEL;
    auto multiply = [&](int64_t begin) {
        for (int64_t g = begin; g < std::min(begin + TOGETHER, groups); g++)
            group_sums<SIZE>(x.at(row, g), x.row_bytes(), first + g * SIZE * INT8_PANEL, second + g * SIZE * INT8_PANEL,
                             sums[begin / TOGETHER % 2] + (g - begin) * 4 * TILE);
    };
    multiply(0);
    for (int64_t g = 0; g < groups; g += TOGETHER) {
        if (g + TOGETHER < groups) multiply(g + TOGETHER);  // tiles work while vectors take over the sums before
        const int32_t *now = sums[g / TOGETHER % 2];
        const float *row_scales = x.scales + row * groups + g;
        if (g + TOGETHER <= groups)
            add_groups<TOGETHER>(now, row_scales, groups, scales + g * INT8_PANEL, others + g * INT8_PANEL, out);
        else
            for (int64_t i = 0; i < groups - g; i++)
                add_groups<1>(now + i * 4 * TILE, row_scales + i, groups, scales + (g + i) * INT8_PANEL,
                              others + (g + i) * INT8_PANEL, out);
    }
    for (int64_t r = 0; r < std::min(ROWS, p.rows - row); r++)
        std::memcpy(p.y + (row + r) * p.outputs + n * INT8_PANEL, out + r * COLUMNS, columns * sizeof(float));
}

template <int64_t SIZE>
static void product_int8_in(const Int8Product &p) {
    thread_local Scratch<int8_t> values;
    thread_local Scratch<float> row_scales;
    int64_t groups = (p.inputs + SIZE - 1) / SIZE, num_panels = (p.outputs + INT8_PANEL - 1) / INT8_PANEL;
    int64_t rows = (p.rows + ROWS - 1) / ROWS * ROWS, num_pairs = (num_panels + 1) / 2;
    QuantizedRows<SIZE> x{rows, groups, values.take(rows * groups * 2 * SIZE), row_scales.take(rows * groups), nullptr};
    quantize(p, x);
    // Panels of one job stay in the second cache while the rows pass by; a row's results lie side by side.
    int64_t fair = (num_pairs + 2 * num_threads - 1) / (2 * num_threads);
    int64_t step = std::max<int64_t>(1, std::min(BLOCK_BYTES / (2 * groups * SIZE * INT8_PANEL), fair));
    int64_t num_jobs = (num_pairs + step - 1) / step;
#pragma omp parallel num_threads(num_threads)
    {
        shape_tiles(shapes<SIZE>);
#pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < num_jobs; job++)
            for (int64_t row = 0; row < p.rows; row += ROWS)
                for (int64_t pair = job * step; pair < std::min((job + 1) * step, num_pairs); pair++)
                    block(p, x, row, 2 * pair);
        _tile_release();
    }
}

void product_int8(const Int8Product &p) {
    p.group == GROUP ? product_int8_in<GROUP>(p) : product_int8_in<FINE_GROUP>(p);
}

}  // namespace amx
}  // namespace disagg
