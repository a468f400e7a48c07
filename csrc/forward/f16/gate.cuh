// The gate r[t, e] of a warp's 16 rows. It lies in shared memory, a chunk of sub-networks at a time, and is read from there when the tiles
// of a sub-network begin. A given gate of an item's first chunk comes with its Q. Further chunks, and a gate computed from W, are loaded or
// computed by the consumer warp for its own rows, without a barrier.
#pragma once

#include "forward/f16/shared_memory.cuh"
#include "forward/router.cuh"

namespace flashmhf {

// A given gate is not scaled.
template <int d_h> __device__ __forceinline__ void unit_scale(GateTile<d_h> &tile, int from, int to) {
    for (int row = from + kittens::laneid(); row < to; row += 32) tile.scale[row] = 1.f;
}

// R of a warpgroup's rows from..to, sub-networks first.. of a chunk, where TMA cannot read it. By one warp, lanes along the sub-networks. A
// burst of loads clogs the path that all warps use (6 % of a run at T = 32,256), so loads go a few at a time, through registers. `urgent`
// (fp32 only): all at once, by copies that need no register and are complete after wait_gate().
template <int d_h, typename T>
__device__ __forceinline__ void load_gate(const ForwardParams &p, const Item &item, int from, int to, int first, bool urgent,
                                          GateTile<d_h> &dst) {
    constexpr int chunk = ForwardPolicy<d_h>::gate_chunk, step = 32 / chunk, batch = step == 1 ? 4 : 16 / step;
    const int lane = kittens::laneid(), e = lane % chunk;
    const int64_t left = item.sequence < p.batch && first + e < p.subnets ? p.length - item.token : 0;
    const int tokens = left < tile_rows ? static_cast<int>(left) : tile_rows;  // rows that have a weight
    const int64_t at =
        item.sequence * p.gate.batch + (item.token + from + lane / chunk) * p.gate.token + item.head * p.gate.head + first + e;
    auto load = [&](auto *r) {
#pragma unroll 1
        for (int row = from + lane / chunk; row < to; row += batch * step) {
            float values[batch];
#pragma unroll
            for (int j = 0; j < batch; ++j, r += step * p.gate.token)
                values[j] = row + j * step < tokens ? static_cast<float>(load_behind_wait(r)) : 0.f;
#pragma unroll
            for (int j = 0; j < batch; ++j) dst.at(row + j * step, e) = values[j];
        }
    };
    if (p.gate.kind == Gate::r_float && urgent) {
        const float *r = static_cast<const float *>(p.gate.data) + at;
#pragma unroll 1
        for (int row = from + lane / chunk; row < to; row += step, r += step * p.gate.token)
            copy_word_async(&dst.at(row, e), r, row < tokens);
    } else if (p.gate.kind == Gate::r_float) {
        load(static_cast<const float *>(p.gate.data) + at);
    } else if (p.gate.kind == Gate::r_half) {
        load(static_cast<const T *>(p.gate.data) + at);
    } else {
        for (int row = from + lane / chunk; row < to; row += step) dst.at(row, e) = 1.f;
    }
    unit_scale<d_h>(dst, from, to);
}
__device__ __forceinline__ void wait_gate() {
    wait_copied_words();
    __syncwarp();
}

// q_part: Q comes divided by it, so the gate is so much larger.
template <int d_h, typename T, int q_part> struct GateRows {
    using P = ForwardPolicy<d_h>;
    using Tile = GateTile<d_h>;
    static constexpr int chunk = P::gate_chunk;

    const ForwardParams &p;
    int index, left;  // column of the current sub-network, counted through the chunks from the item's first one; its tiles still to come
    float2 r;         // its gate of rows g and g + 8

    // query(k, a): fragment k of Q, d_h columns 16k.., of the warp's rows. tile: of the warpgroup; a warp uses its own 16 rows.
    // w: W of the item's heads in shared memory, where it fits.
    template <typename Query> __device__ __forceinline__ void begin(const Item &item, Tile &tile, const void *w, Query &&query) {
        const int first = item.subnet;
        index = item.gate_column;
        left = (first + 1) * p.subnet_tiles - item.begin;
        if (P::gate_early && p.gate.router_bytes)
            router<FromShared>(static_cast<const uint8_t *>(w) + own_head() * p.gate.head_router_bytes, tile).normalise(first, query);
        else if (p.gate.kind >= Gate::w_float) router<FromGlobal>(router_of<d_h, T>(p, head(item)), tile).normalise(first, query);
        else if (!P::gate_early) load(item, first, tile);
        read(tile);
    }
    // To the next tile of the item. Called between swiglu() and the wait for the second product: the branch that overwrites r keeps ptxas
    // from sinking the elementwise part below that wait. Bringing in a chunk needs more registers, and is left for replenish().
    __device__ __forceinline__ void advance(Tile &tile) {
        if (--left == 0) {
            left = p.subnet_tiles;
            if (++index % chunk != 0) read(tile);
        }
    }
    template <typename Query> __device__ __forceinline__ void replenish(const Item &item, Tile &tile, Query &&query) {
        if (index > 0 && index % chunk == 0 && left == p.subnet_tiles) {
            const int first = item.subnet + index;
            if (p.gate.kind >= Gate::w_float) router<FromGlobal>(router_of<d_h, T>(p, head(item)), tile).compute(first, query);
            else load(item, first, tile);
            read(tile);
        }
    }

  private:
    template <typename Source> __device__ __forceinline__ RouterRows<d_h, T, q_part, Source, Tile> router(const void *w, Tile &tile) {
        return {p, w, tile, 16 * kittens::warpgroup::warpid()};
    }
    // The head of the warp's rows: of the bundle, of all.
    __device__ __forceinline__ int own_head() const { return p.head_of(16 * kittens::warpgroup::warpid()); }
    __device__ __forceinline__ int head(const Item &item) const { return item.head + own_head(); }
    __device__ __forceinline__ static int first_row() { return fragment_row(kittens::warpgroup::laneid()); }
    __device__ __forceinline__ void read(Tile &tile) {
        const int row = first_row(), e = index % chunk;
        constexpr float unit = q_part;
        r = {unit * tile.scale[row] * tile.at(row, e), unit * tile.scale[row + 8] * tile.at(row + 8, e)};
    }

    __device__ __forceinline__ void load(const Item &item, int first, Tile &tile) {
        __syncwarp();
        const int warp = kittens::warpgroup::warpid();
        load_gate<d_h, T>(p, item, 16 * warp, 16 * warp + 16, first, true, tile);
        wait_gate();
        tma::fence_shared_writes();  // the producer may fill the buffer by TMA next
    }
};

}  // namespace flashmhf
