// What the forward kernels get besides tensor maps. T tokens as batch x length, H heads, E sub-networks of width d_e.
#pragma once

#include <cstdint>

#include "common/problem.h"
#include "forward/schedule.cuh"

namespace flashmhf {

// K, U and V in the type of Q, or in e4m3.
enum class WeightFormat { same, e4m3 };

// Slices: the pieces in which the CTAs of a cluster exchange the sums of an item.
struct Slices {
    int sum_threads;           // of a warpgroup, whole warps, that may have sums to send
    int pieces, spare_pieces;  // of a row tile that each CTA adds, and those left, which go to one CTA each
    // The next kernel starts with the last product, not with the last copy. Most clusters of another such launch fit beside this one, but
    // not all. Started early, those would have most of their tiles when the others, which wait for clusters of this launch to end, begin:
    // 2.5 us of 10.5 (H = 16, groups of 4).
    bool late_successor;
};

// How a launch divides its work: what the kernels need of the plan. Row tiles are of tile_rows / bundle tokens.
struct ForwardGrid : Rows {
    ForwardSchedule schedule;
    int cluster_size;  // CTAs of a cluster
    int row_ctas;      // of them that take neighbouring rows of one item and multicast its tiles to each other: 1 or 2
    int consumers;     // consumer warpgroups of a CTA, a row tile each
    int blocks;        // work items of a head of K, U and V
    int subnets;       // E
    int subnet_tiles;  // ceil(d_e / 64)
    // A row tile has 64 tokens of a head, or, where these are few, 32 tokens of two heads or 16 of four that share a head of K, U and V: a
    // bundle. Row r is token r % 2^tile_shift of head r / 2^tile_shift. A warp's 16 rows are of one head. Bundles of several heads have one
    // sequence. Row tiles of a head of K, U and V are numbered one bundle behind the other.
    int bundle, tile_shift;
    int bundles;     // of a head of K, U and V
    int head_tiles;  // row tiles of a bundle: batch * row_tiles
    Slices slices;
    FLASHMHF_HOST_DEVICE int head_of(int row) const { return row >> tile_shift; }
    FLASHMHF_HOST_DEVICE int token_of(int row) const { return row & ((1 << tile_shift) - 1); }
};

struct GateSource {
    Gate kind;
    const void *data;            // R or W
    int64_t batch, token, head;  // strides of R in elements
    float eps;                   // of the normalisation, for W
    bool tiles;                  // the producer reads R by TMA, as a matrix of H * E columns
    int router_bytes;            // of W of a CTA's heads, where it fits shared memory; 0: it does not, or is not needed
    int head_router_bytes;       // of W of one head
};

// Sums of split items.
struct Parts {
    float *sums;      // [splits * abreast][2][row_ctas][consumers][64 * d_h] fp32 in fragment order
    uint64_t *flags;  // [splits * abreast][2][row_ctas], when the clusters add them up: `nonce` where a part has been stored
    uint64_t nonce;   // of this launch, 64 random bits. A flag that holds it was set by this launch: memory left by others never does
};

struct ForwardParams : ForwardGrid {
    void *out;                     // where the combine kernel and slices write; the rest through the tensor map
    int64_t out_batch, out_token;  // its strides in elements
    GateSource gate;
    Parts parts;
};

struct ForwardFp8Params : ForwardParams {
    float *gate_rows;  // [CTAs][consumers][64][E], where the gate is computed and W or the gate does not fit shared memory
    // [weight heads, E]: what a unit of k8, u8 and v8 stands for; k's is the same for all sub-networks of a head.
    const float *k_scales, *u_scales, *v_scales;
};

// Quantisation of Q: the largest of a row of q8 is a power of two, so large that the norm of the row is in (query_norm / 2, query_norm].
// With k8 and u8 of root mean square 1 that of A is then 4 to 16, whatever the size of q, and no sum of [M|N] leaves fp16.
constexpr float query_norm = 4.f;
constexpr float smallest_query = 1e-18f;  // instead of the largest of a row of zeros

}  // namespace flashmhf
