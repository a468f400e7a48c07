#include "forward_fp8/plan.h"

#include <stdexcept>
#include <string>

#include "forward_fp8/policy.h"

namespace flashmhf {
namespace {

template <int d_h>
constexpr ForwardFootprint footprint = {
    .shared_memory = ForwardFp8Policy<d_h>::shared_memory,
    .pieces = ForwardFp8Policy<d_h>::router_bytes,
    .spare_gate = 0,
    .consumers = ForwardFp8Policy<d_h>::consumers,
    .may_slice = true,
    .may_add_parts = false,
    .may_take_lanes = false,  // not run on a GPU
};

ForwardFootprint footprint_of(int head_dim) {
    switch (head_dim) {
        case 64: return footprint<64>;
        case 96: return footprint<96>;
        case 128: return footprint<128>;
        case 256: return footprint<256>;
        default: throw std::invalid_argument("d_h = " + std::to_string(head_dim) + " has no kernel: supported are 64, 96, 128, 256");
    }
}

}  // namespace

ForwardPlan plan_forward_fp8(const Shape &shape, const Device &device, const ForwardCostModel &cost) {
    return plan_forward(shape, device, footprint_of(shape.head_dim), false, cost);
}

}  // namespace flashmhf
