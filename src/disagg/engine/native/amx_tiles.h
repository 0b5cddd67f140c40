// Tiles: eight registers of 16 rows of 64 bytes.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace disagg {

constexpr int64_t TILE_ROWS = 16;  // of a whole one

struct __attribute__((packed)) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// Written out: GCC 12's own does not say that it reads the whole object, and stores to a local one would be left out.
static inline void shape_tiles(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

// What was written before may be loaded into tiles after: GCC 12's loads do not say that they read memory.
static inline void settle() { asm volatile("" ::: "memory"); }

}  // namespace disagg
