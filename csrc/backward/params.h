// What the backward kernels get. Plain data; shapes: T tokens as batch x length, H heads, E sub-networks of width d_e.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "backward/plan.h"
#include "common/problem.h"

namespace flashmhf {

struct BackwardMaps {
    CUtensorMap q, grad_out;  // [batch][length][H][d_h], boxes of 64 tokens; rows behind the last token read as zeros
    CUtensorMap k, u, v;      // [H * E][d_e][d_h]; rows from d_e on read as zeros
};

struct BackwardParams : Rows, BackwardSplit {
    DenseStrides dense;  // of the outputs [T, ...]
    int group;           // neighbouring heads that share one of K, U and V
    int heads, subnets;  // H, E
    int subnet_dim;      // d_e

    TokenTensor r;           // R [batch, length, H, E]; without data: all ones
    bool r_is_float;         // else the element type
    int dq_heads, dr_heads;  // of a token in dq and dr: all of them, where this launch takes some

    // Inter-stationary kernels. Items are (head, sub-network, tile of 64 inter rows), in that order.
    float *query_sums;  // [H][batch * row_tiles][64 * d_h] fp32 in fragment order, zeroed
    float *dr_sums;     // [H / group, E, group * batch * row_tiles * 64] fp32, zeroed; null without R
    // Ordered accumulation: CTAs that have added to a tile, zeroed. Null: any order.
    uint32_t *query_added;  // [H][batch * row_tiles]
    uint32_t *dr_added;     // [H * E][batch * row_tiles]
    float *weight_parts;    // [items - whole][parts][dK, dU, dV][64 * d_h] fp32 in fragment order
    void *dk, *du, *dv;     // [H / group, E, d_e, d_h] in the element type

    // Token-stationary kernel.
    float *query_parts;  // [H][batch * row_tiles][token_parts][64 * d_h] fp32 in fragment order; null: dq is written
    void *dq;            // [T, dq_heads, d_h]; null: not needed
    void *dr;            // [T, dr_heads, E] in R's type; null without R
};

// The router's part of gated_backward; H are the heads of this launch.
struct RouterParams : Rows {
    TokenTensor q;  // [batch, length, H, d_h]
    DenseStrides dense;
    int heads, subnets;
    const void *w;  // [H, d_h, E], fp32 or the element type; null: no router
    bool w_is_float;
    float eps;
    float *r, *scale;  // [T, H, E]; [T, H]: 1 / (sum_e sigmoid(P) + eps)
    float *sums;       // to be cleared along with it: what the main kernels add to
    int64_t sums_floats;
    const float *dr_sums, *dr;  // [H, E, batch * row_tiles * 64], or null and [T, H, E]
    const float *query_tiles;   // [H][batch * row_tiles][query_parts][64 * d_h] fp32 in fragment order: dQ without the router's part
    int query_parts;
    void *dq;  // [T, dq_heads, d_h]; null: not needed
    int dq_heads;
    float *dw_parts;  // [dw_part_count][H, d_h, E]
    int dw_part_count;
    void *dw;  // W's type and shape; null: not needed
};

// Sums tiles of 64 x d_h fp32 values in fragment order and writes their rows. Tile x lies in band x / band_tiles; rows are d_h elements.
struct CollectParams {
    const float *tiles;  // [tiles][parts], part_stride floats apart
    int parts;
    int64_t part_stride;
    int first_tile;  // global number of tile 0, for its place in the output
    int band_tiles;
    int64_t band_rows;  // rows of a band, which lie together; the last tile may be partial
    int inner_bands;    // band = outer * inner_bands + inner starts at row outer * outer_step + inner * inner_step
    int64_t outer_step, inner_step, row_step;
    void *out[3];      // element type; one for each blockIdx.z
    int64_t out_step;  // floats between the tiles of one and of the next
};

}  // namespace flashmhf
