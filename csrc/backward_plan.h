// The launch planner of the backward: pure host code, tested without a GPU.
#pragma once

#include <cstdint>

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

// Throws std::invalid_argument for shapes beyond the index range.
BackwardPlan plan_backward(const BackwardShape &shape, int sms);

}  // namespace flashmhf
