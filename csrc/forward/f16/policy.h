// Tile sizes, and the shared-memory and register budget of the forward kernel for each head dimension. Pure C++: the planner reads it
// too. The static_asserts hold the limits of the SM; the table in README.md shows the numbers.
#pragma once

#include "common/geometry.h"
#include "common/head_dims.h"

namespace flashmhf {

constexpr int barrier_bytes = 384;  // semaphores, item records and addresses of parts of a CTA, at most 360, rounded up to lines of 128

// Rows that one copy brings of K, U or V where the CTAs of a cluster divide an item. The panels of few rows lie together in memory, and the
// memory is the bound there.
constexpr int slice_box_rows = 32;
static_assert(tile_inter % slice_box_rows == 0, "a tile is whole boxes");

struct Silu;  // common/activation.cuh

template <int d_h> struct ForwardPolicy {
    static_assert(ForwardHeadDims::contains(d_h));
    using Activation = Silu;
    static constexpr int swizzle_bytes = swizzle_bytes_of(d_h);
    static constexpr int panel_cols = swizzle_bytes / element_bytes;  // columns of one TMA box

    static constexpr int consumers = 2;                 // warpgroups of a CTA, a row tile each; a launch of one row tile starts one only
    static constexpr int fewest_consumers = consumers;  // where there are more row tiles: CTAs of one are slower
    static_assert(consumers <= 2, "the named barriers count two consumers, and the last warp of the producer signals parts");
    static constexpr int threads = 128 * (consumers + 1);

    // Up to d_h = 128, Q lives in registers, a slot of the ring holds [K;U] of one tile and V of the tile before it, and the first
    // product of the next work item runs under the epilogue of this one. At d_h = 256 the accumulators leave no room: Q stays in
    // shared memory, and [K;U] is streamed as two halves of d_h, V apart.
    static constexpr bool q_in_registers = d_h <= 128;
    static constexpr bool may_slice = q_in_registers;  // CTAs of a cluster may divide an item's inter range; at d_h = 256 that spills
    static constexpr int ku_bytes = 2 * tile_inter * d_h * element_bytes, v_bytes = tile_inter * d_h * element_bytes;
    static constexpr int slot_bytes = q_in_registers ? ku_bytes + v_bytes : v_bytes;
    static constexpr int row_tile_bytes = tile_rows * d_h * element_bytes;  // Q or the output of a warpgroup, which share a buffer

    // The gate of a chunk of sub-networks, and its scale, for the rows of a warpgroup. One buffer for the current item, one for the
    // next if its Q comes early; then a row of a chunk is 128 bytes, swizzled by TMA.
    static constexpr bool gate_early = q_in_registers;  // the producer brings the gate of an item's first chunk
    static constexpr int gate_chunk = gate_early ? 32 : 4, gate_buffers = gate_early ? 2 : 1, gate_alignment = gate_early ? 1024 : 16;
    static constexpr int gate_chunk_bytes = tile_rows * gate_chunk * 4;
    static constexpr int gate_tile_bytes = ceil_div(gate_chunk_bytes + tile_rows * 4, gate_alignment) * gate_alignment;
    static constexpr int gate_bytes = gate_buffers * consumers * gate_tile_bytes;

    // W of a head lies beside the ring, and the consumers have registers to add parts in; d_h = 256 has room for neither.
    static constexpr bool may_add_parts = q_in_registers;
    static constexpr int router_bytes = q_in_registers ? 12 * 1024 : 0;
    static constexpr int piece_columns = 8;  // of a row tile's sums, as slices send them to each other

    // As many slots as the rest leaves room for: what grows takes a slot from the ring. Fewer than `fewest_slots` would deadlock: a consumer
    // waits for the next slot before it hands this one back, and where Q is not in registers it holds two halves of [K;U] and waits for V.
    // Slices need room for their sums besides (shared_memory.cuh).
    static constexpr int fewest_slots = q_in_registers ? 2 : 3;
    static constexpr int beside_ring = consumers * row_tile_bytes + gate_bytes + router_bytes + barrier_bytes;
    static constexpr int slots = (shared_memory_limit - beside_ring) / slot_bytes;
    static constexpr int shared_memory = slots * slot_bytes + beside_ring;
    static_assert(shared_memory <= shared_memory_limit && slots >= fewest_slots, "does not fit the shared memory of an SM");

    // Registers of a thread: all of the SM's, in multiples of 8, at launch; then setmaxnreg moves them from the producer to the consumers.
    static constexpr int launch_registers = launch_registers_of(threads);
    static constexpr int producer_registers = q_in_registers ? 40 : 24, consumer_registers = q_in_registers ? 232 : 240;
    // Tiles for one CTA come a little faster without multicast; for a loop of their own, 24 registers of the producer are too few.
    static constexpr bool always_multicast = !q_in_registers;
    static_assert(producer_registers + consumers * consumer_registers == (consumers + 1) * launch_registers);
    // O, [M|N], A, and Q where it is in registers; under the last product also two for each piece that slices send. At the end O and two
    // parts that are gathered. The rest are addresses, weights and loop state.
    static constexpr int send_registers = may_slice ? 2 * d_h / piece_columns : 0, gather_registers = may_add_parts ? 3 * d_h / 2 : 0;
    static constexpr int tile_registers = d_h / 2 + tile_inter + tile_inter / 4 + (q_in_registers ? d_h / 4 : 0);
    static_assert(tile_registers + send_registers + 24 <= consumer_registers, "does not fit the registers of a consumer");
    static_assert(gather_registers + 24 <= consumer_registers, "does not fit the registers of a consumer");
};

}  // namespace flashmhf
