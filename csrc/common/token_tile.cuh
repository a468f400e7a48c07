// Where a row tile lies among the tokens: the one mapping that all kernels use.
#pragma once

#include "common/geometry.h"

namespace flashmhf {

// T tokens are batch sequences of length tokens. Each sequence has row_tiles = ceil(length / 64) tiles, the last of which may be partial,
// so a tile never crosses two sequences. Tiles are numbered sequence by sequence. A tile behind the last one has sequence >= batch: TMA
// reads its rows as zeros and its results are not stored.
struct TokenTile {
    int sequence, tile, row_tiles;  // tile: in the sequence
    __device__ __forceinline__ TokenTile(int index, int row_tiles)
        : sequence(index / row_tiles),
          tile(index - sequence * row_tiles),
          row_tiles(row_tiles) {}
    // The first token in the sequence.
    __device__ __forceinline__ int token() const { return tile * tile_rows; }
    __device__ __forceinline__ void advance() {
        if (++tile == row_tiles) {
            tile = 0;
            ++sequence;
        }
    }
};

}  // namespace flashmhf
