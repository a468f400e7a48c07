// The launch planner of the backward: pure host code, tested without a GPU.
#pragma once

#include <cstdint>

#include "kernels/schedule.cuh"

namespace flashmhf {

// T = batch * length tokens (tiles never cross a sequence), H heads, E sub-networks of width d_e.
struct BackwardShape {
    int64_t batch, length;
    int heads, subnets;
    int64_t subnet_dim;
};

struct BackwardPlan {
    int row_tiles;     // of 64 tokens, of a sequence
    int subnet_tiles;  // of 64 inter rows, of a sub-network
    int items;         // H * E * subnet_tiles: CTAs of an inter-stationary kernel when nothing is split
    int whole, parts;  // items taken by one CTA each; CTAs that share the tokens of each of the others
    int token_blocks;  // of two row tiles: CTAs of a head of the token-stationary kernel
    int token_parts;   // CTAs that share the sub-networks of a token block
    int inter_blocks() const { return whole + (items - whole) * parts; }
};

// The share of one CTA of an inter-stationary kernel: its item, and token tiles begin..end of it. The kernel and the planner's tests run this.
struct TokenShare {
    int item, part, begin, end;
    bool split;
};
FLASHMHF_HOST_DEVICE TokenShare token_share(int block, int whole, int parts, int tiles) {
    if (block < whole) return {block, 0, 0, tiles, false};
    const int index = (block - whole) / parts, part = block - whole - index * parts;
    return {whole + index, part, static_cast<int>(static_cast<int64_t>(tiles) * part / parts),
            static_cast<int>(static_cast<int64_t>(tiles) * (part + 1) / parts), true};
}

// Throws std::invalid_argument for shapes beyond the index range.
BackwardPlan plan_backward(const BackwardShape &shape, int sms);

}  // namespace flashmhf
