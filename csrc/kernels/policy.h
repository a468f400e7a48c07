// Tile sizes, and the shared-memory and register budget of the forward kernel for each head dimension. Pure C++: the planner reads it
// too. The budget table is drawn in ../README.md; the static_asserts keep both honest.
#pragma once

namespace flashmhf {

constexpr int tile_rows = 64;       // token rows of a consumer warpgroup (the M of wgmma)
constexpr int tile_inter = 64;      // inner units of a tile; K and U stacked make the N = 128 of the first product
constexpr int consumers = 2;        // consumer warpgroups of a CTA
constexpr int element_bytes = 2;    // bf16 or fp16
constexpr int forward_threads = 128 * (consumers + 1);

constexpr int shared_memory_limit = 227 * 1024;
constexpr int barrier_bytes = 256;  // all semaphores of a CTA, rounded up

// Registers of a thread: 168 at launch (65,536 / 384 rounded down to a multiple of 8), then moved from the producer to the consumers.
constexpr int launch_registers = 168, producer_registers = 24, consumer_registers = 240;
static_assert(producer_registers + consumers * consumer_registers == (consumers + 1) * launch_registers);

template <int d_h> struct ForwardPolicy {
    static_assert(d_h == 64 || d_h == 96 || d_h == 128 || d_h == 256, "head dimensions with a policy");
    static constexpr int head_dim = d_h;
    static constexpr int swizzle_bytes = d_h % 64 == 0 ? 128 : 64;
    static constexpr int panel_cols = swizzle_bytes / element_bytes;  // columns of one TMA box
    static constexpr int panels = d_h / panel_cols;

    // Up to d_h = 128, Q lives in registers, a slot of the ring holds [K;U] of one tile and V of the tile before it, and the first
    // product of the next work item runs under the epilogue of this one. At d_h = 256 the accumulators leave no room: Q stays in
    // shared memory, [K;U] is streamed as two halves of d_h, V apart, and the output is staged in Q's buffer.
    static constexpr bool q_in_registers = d_h <= 128;
    static constexpr int ku_bytes = 2 * tile_inter * d_h * element_bytes, v_bytes = tile_inter * d_h * element_bytes;
    static constexpr int slot_bytes = q_in_registers ? ku_bytes + v_bytes : v_bytes;
    static constexpr int slots = d_h == 64 ? 6 : d_h == 96 ? 4 : d_h == 128 ? 3 : 5;
    static constexpr int row_tile_bytes = tile_rows * d_h * element_bytes;          // Q or the output of a warpgroup
    static constexpr int gate_chunk = d_h == 256 ? 5 : 32;                          // sub-networks whose weights lie in shared memory
    static constexpr int gate_bytes = consumers * gate_chunk * tile_rows * 4;

    static constexpr int shared_memory =
        slots * slot_bytes + consumers * row_tile_bytes * (q_in_registers ? 2 : 1) + gate_bytes + barrier_bytes;
    static_assert(shared_memory <= shared_memory_limit, "does not fit the shared memory of an SM");

    // O, [M|N], A, and Q where it is in registers; 24 are left for addresses, weights and loop state.
    static constexpr int tile_registers = d_h / 2 + tile_inter + tile_inter / 4 + (q_in_registers ? d_h / 4 : 0);
    static_assert(tile_registers + 24 <= consumer_registers, "does not fit the registers of a consumer");
};

}  // namespace flashmhf
