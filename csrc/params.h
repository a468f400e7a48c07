// What the forward kernels get besides tensor maps. T tokens as batch x length, H heads, E sub-networks of width d_e.
#pragma once

#include <cstdint>

#include "kernels/schedule.cuh"

namespace flashmhf {

// Where a row's weights of the sub-networks come from.
enum class Gate : int {
    ones,         // no weights
    r_float,      // R [T, H, E] fp32
    r_half,       // R [T, H, E] in the element type
    w_float,      // computed from W [H, d_h, E] fp32
    w_half,       // computed from W [H, d_h, E] in the element type
};

struct ForwardParams {
    ForwardSchedule schedule;
    int cluster_size;         // CTAs of a cluster; they take neighbouring row tiles of one item
    int batch;                // sequences; a row tile never crosses them
    int64_t length;           // tokens of a sequence
    int row_tiles;            // of a sequence: ceil(length / 64)
    int blocks;               // work items of a head: ceil(batch * row_tiles / (row tiles of a cluster))
    int subnets;              // E
    int subnet_tiles;         // ceil(d_e / 64)
    int64_t out_batch, out_token;  // strides of the output in elements, for the combine kernel
    Gate gate;
    const void *gate_data;    // R or W
    int64_t r_batch, r_token, r_head;  // strides of R in elements
    float eps;                // of the normalisation, for W
    float *partials;          // [splits][2][cluster_size][row tiles of a CTA][64 * d_h] fp32 in fragment order, when items are split
};

}  // namespace flashmhf
