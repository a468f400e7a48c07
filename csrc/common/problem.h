// What a call works on, as plain data free of PyTorch: its shape, and its tensors in device memory.
#pragma once

#include <cstdint>

#include "common/geometry.h"

namespace flashmhf {

// T = batch * length tokens (a tile never crosses two sequences), H heads of d_h, E sub-networks of width d_e. `group` neighbouring heads
// share a head of K, U and V.
struct Shape {
    int64_t batch, length;
    int heads, head_dim, subnets;
    int64_t subnet_dim;
    int group = 1;
    int weight_heads() const { return heads / group; }  // of K, U and V
};

// The tokens of a launch in row tiles. A tile never crosses two sequences.
struct Rows {
    int batch;       // sequences
    int row_tiles;   // of a sequence; its last tile may be partial
    int64_t length;  // tokens of a sequence
};
// Where a row tile lies among them: the one mapping that all kernels use. Tiles are numbered sequence by sequence. A tile behind the last
// one has sequence >= batch: TMA reads its rows as zeros and its results are not stored.
struct TokenTile {
    int sequence, tile, row_tiles;  // tile: in the sequence
    FLASHMHF_HOST_DEVICE TokenTile(int index, int row_tiles)
        : sequence(index / row_tiles),
          tile(index - sequence * row_tiles),
          row_tiles(row_tiles) {}
    // The first token in the sequence.
    FLASHMHF_HOST_DEVICE int token() const { return tile * tile_rows; }
    FLASHMHF_HOST_DEVICE void advance() {
        if (++tile == row_tiles) {
            tile = 0;
            ++sequence;
        }
    }
};

// A tensor [batch, length, H, ...] whose last dimension is contiguous. Strides in elements.
struct TokenTensor {
    const void *data;
    int64_t batch_stride, token_stride, head_stride;
};

// Strides of batch and length in a dense tensor [T, ...], in tokens: leading dimensions may be numbered either way.
struct DenseStrides {
    int64_t batch, token;
    FLASHMHF_HOST_DEVICE int64_t index(int sequence, int token_) const { return sequence * batch + token_ * token; }
};

// The gate R [T, H, E]: a factor for each token, head and sub-network. Where it comes from:
enum class Gate : int {
    ones,     // no gate: all factors are 1
    r_float,  // given as fp32
    r_half,   // given in the element type
    w_float,  // sigmoid(Q W), normalised over E, from the router's W [H, d_h, E] in fp32
    w_half,   // the same from W in the element type
};
constexpr bool gate_is_given(Gate gate) { return gate == Gate::r_float || gate == Gate::r_half; }
constexpr bool has_router(Gate gate) { return gate == Gate::w_float || gate == Gate::w_half; }
constexpr bool gate_is_float(Gate gate) { return gate == Gate::r_float || gate == Gate::w_float; }

// The operands of a call, in device memory, that forward and backward share.
struct Operands {
    bool bf16;  // the type of q, which is that of k, u and v where these are not in e4m3; otherwise fp16
    Shape shape;
    TokenTensor q;
    const void *k, *u, *v;  // [weight heads, E, d_e, d_h], contiguous
    Gate gate;
    TokenTensor r;  // where the gate is given
    const void *w;  // where a router computes it: [H, d_h, E], contiguous
    float eps;      // of the router's normalisation
    DenseStrides dense;
};

}  // namespace flashmhf
