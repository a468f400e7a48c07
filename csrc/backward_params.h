// What the backward kernels get besides tensor maps. Plain data; shapes: T tokens as batch x length, H heads, E sub-networks of width d_e.
#pragma once

#include <cstdint>

namespace flashmhf {

struct BackwardParams {
    int batch;                 // sequences; a tile of tokens never crosses them
    int64_t length;            // tokens of a sequence
    int row_tiles;             // of a sequence: ceil(length / 64)
    int64_t dense_batch, dense_token;  // strides of the contiguous [T, ...] outputs, in tokens
    int heads, subnets;        // H, E
    int subnet_dim;            // d_e
    int subnet_tiles;          // ceil(d_e / 64)

    const void *r;             // R [batch, length, H, E], or null: all ones
    bool r_is_float;           // else the element type
    int64_t r_batch, r_token, r_head;  // strides of R in elements

    // Inter-stationary kernels. The first `whole` items (head, sub-network, tile of 64 inter rows; that order) take one CTA each, the
    // others `parts` CTAs that share the tokens.
    int whole, parts;
    float *query_sums;         // [H][batch * row_tiles][64 * d_h] fp32 in fragment order, zeroed
    float *dr_sums;            // [H, E, batch * row_tiles * 64] fp32, zeroed; null without R
    float *weight_parts;       // [items - whole][parts][dK, dU, dV][64 * d_h] fp32 in fragment order
    void *dk, *du, *dv;        // [H, E, d_e, d_h] in the element type, or fp32 buffers to add to
    bool accumulate;

    // Token-stationary kernel. `parts` CTAs share the sub-networks of a token block.
    int token_parts;
    float *query_parts;        // [H][batch * row_tiles][token_parts][64 * d_h] when token_parts > 1
    void *dq;                  // [T, H, d_h]
    void *dr;                  // [T, H, E] in R's type; null without R

#ifdef __CUDACC__
    __device__ __forceinline__ int64_t dense_index(int sequence, int token) const { return sequence * dense_batch + token * dense_token; }
#endif
};

// Sums tiles of 64 x d_h fp32 values in fragment order and writes their rows. Tile x lies in group x / group_tiles; rows are d_h elements.
struct CollectParams {
    const float *tiles;        // [tiles][parts], part_stride floats apart
    int parts;
    int64_t part_stride;
    int first_tile;            // global number of tile 0, for its place in the output
    int group_tiles;
    int64_t group_rows;        // rows of a group; the last tile may be partial
    int inner_groups;          // group = outer * inner_groups + inner starts at row outer * outer_step + inner * inner_step
    int64_t outer_step, inner_step, row_step;
    void *out;                 // element type, or fp32 to add to
    bool accumulate;
};

}  // namespace flashmhf
