// Tile sizes, and the shared-memory and register budget of the FP8 forward kernel for each head dimension. Pure C++: the planner reads it
// too. The static_asserts hold the limits of the SM; the table in README.md shows the numbers.
#pragma once

#include "common/geometry.h"
#include "common/head_dims.h"
#include "common/problem.h"

namespace flashmhf {

constexpr int fp8_box_rows = 32;  // of K or U that one copy brings
constexpr int fp8_panel_bytes(int d_h) { return d_h % 128 == 0 ? 128 : d_h % 64 == 0 ? 64 : 32; }

struct Silu;  // common/activation.cuh

// few_rows: of an instance for CTAs that divide an item of one or two row tiles.
template <int d_h, bool few_rows = false> struct ForwardFp8Policy {
    static_assert(ForwardFp8HeadDims::contains(d_h));
    using Activation = Silu;

    // Three row tiles keep the tensor cores busy through the elementwise part of one of them, and four the special functions at d_h = 64;
    // at d_h = 256 the registers hold two.
    static constexpr int consumers = few_rows || d_h == 256 ? 2 : d_h == 64 ? 4 : 3;
    static constexpr int fewest_consumers = 1;
    static constexpr bool may_slice = true, may_add_parts = false;  // as in ForwardFootprint
    static constexpr int threads = 128 * (consumers + 1);           // a warpgroup for each row tile, and the producer's

    // A slot of the ring holds K, U and V of a tile. [K;U] comes in chunks of inter rows. With 32 a chunk's product takes 16 registers;
    // with 64 there are half as many waits for the tensor cores, which one warpgroup alone does not cover.
    static constexpr int chunk_inter = few_rows && (d_h == 96 || d_h == 128) ? tile_inter : 32, chunks = tile_inter / chunk_inter;
    static_assert(chunks <= 2, "the consumers have two buffers of [M|N]");
    static_assert(chunks == 2 || few_rows, "with one chunk a tile a consumer has one item: at its end it keeps the last slot");
    static_assert(consumers <= 4, "the named barriers count four consumers, and three warps load their rows");
    static constexpr int box_rows = fp8_box_rows;
    static_assert(chunk_inter % box_rows == 0 && tile_inter == 2 * box_rows, "a box lies in one chunk, and each CTA of a pair fetches one");
    static constexpr int ku_panel = fp8_panel_bytes(d_h);  // bytes of a row of a panel, swizzled as wide
    static constexpr int ku_panels = d_h / ku_panel, ku_panel_bytes = 2 * chunk_inter * ku_panel;
    static constexpr int ku_chunk_bytes = ku_panels * ku_panel_bytes, ku_bytes = chunks * ku_chunk_bytes;
    static constexpr int v_panel = tile_inter;  // V is transposed: d_h rows of the tile's inter units
    static constexpr int v_bytes = d_h * v_panel;
    static constexpr int slot_bytes = ku_bytes + v_bytes;
    // Where the sum of all buffers does not fit, the ring gives up a slot. With fewer than `fewest_slots` it would deadlock: a consumer waits
    // for the next tile while it holds this one, and with one chunk a tile also the one before, whose A V still runs.
    static constexpr int fewest_slots = chunks == 1 ? 3 : 2;
    static constexpr int slots = d_h == 64 ? consumers == 4 ? 12 : 14 : d_h == 96 ? 8 : d_h == 128 ? 6 : 3;
    static constexpr int row_tile_bytes = tile_rows * d_h * element_bytes;  // Q or the output of a warpgroup, which share a buffer
    static constexpr int piece_columns = 16;                                // of a row tile's sums, as slices send them to each other

    // Slots of the ring that slices fill before the first Q is there: with all of them Q comes later, probably behind the weights. The tile
    // of the first of these slots is prefetched to the L2 under the kernel before, where that gains.
    static constexpr int early_slots = 2, prefetched_tiles = few_rows && d_h >= 128 ? 1 : 0;
    static_assert(slots >= fewest_slots && early_slots <= slots);

    // Few rows: the addresses of the exchange of sums lie in registers from the first promotion on, where there are registers for them.
    static constexpr bool exchange_ahead = d_h <= 128;

    // The gate of a chunk of sub-networks for the rows of a warpgroup, in rows of 28: eight neighbouring rows do not meet a bank twice.
    static constexpr int gate_chunk = 28, gate_bytes = tile_rows * (gate_chunk + 1) * 4;
    static constexpr int gate_tile_bytes = 0, gate_buffers = 0;  // of gate tiles that may cache W: none
    static_assert(gate_chunk < 32, "a lane has a column of the chunk, and the lane behind them the scale of K");
    // W of a head, where a router computes the gate.
    static constexpr int router_bytes = d_h <= 128 ? 12 * 1024 : 0;
    static constexpr int small_bytes = consumers > 3 ? 1536 : 1280;  // semaphores, item records, scales

    static constexpr int shared_memory =
        slots * slot_bytes + consumers * row_tile_bytes + consumers * gate_bytes + small_bytes + router_bytes;
    static_assert(shared_memory <= shared_memory_limit, "does not fit the shared memory of an SM");

    // Products of up to this many tiles are summed in fp16 before the sums are promoted; a sub-network's end promotes, too.
    static constexpr int promote_tiles = 8;

    // Registers of a thread: all of the SM's, in multiples of 8, at launch; then setmaxnreg moves them from the producer to the consumers.
    static constexpr int launch_registers = launch_registers_of(threads);
    static constexpr int producer_registers = consumers > 2 ? 32 : 24;
    static constexpr int consumer_registers = consumers == 4 ? 112 : consumers == 3 ? 160 : 240;
    static_assert(producer_registers + consumers * consumer_registers == (consumers + 1) * launch_registers);
    // Two buffers of [M|N], two of A, Q, the sums of products and the promoted ones, and two for each piece that slices send.
    static constexpr int send_registers = few_rows && exchange_ahead ? 2 * d_h / piece_columns : 0;
    static constexpr int tile_registers = chunk_inter + chunk_inter / 4 + d_h / 8 + 2 * (d_h / 4) + send_registers;
    static_assert(tile_registers + 24 <= consumer_registers, "does not fit the registers of a consumer");
};

}  // namespace flashmhf
