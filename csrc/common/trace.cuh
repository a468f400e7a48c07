// Clock stamps of warps, to see where a kernel's time goes. A build with -DFLASHMHF_TRACE=ON keeps them; in any other stamp() is empty.
// csrc/profiling.md says how to read them.
#pragma once

#include <vector>

#include "kittens.cuh"

namespace flashmhf {

// Stamps, by the event that each is taken at.
// clang-format off
#define FLASHMHF_STAMPS(X)                                                                                                            \
    X(forward_entry) X(forward_predecessor_done) X(forward_q_full) X(forward_q_quantised) X(forward_tile_full) X(forward_scores_done) \
    X(forward_sums_done) X(forward_slices_met) X(forward_slices_sent) X(forward_slices_full) X(forward_item_stored)                   \
    X(forward_tile_sent) X(forward_weights_sent) X(forward_parts_signalled) X(forward_parts_full) X(forward_parts_added)              \
    X(inter_entry) X(s_products_issued) X(s_products_done) X(s_handed_over) X(s_dq_issued) X(s_dq_staged)                             \
    X(w_operands_full) X(w_products_done) X(dq_predecessor_added) X(dq_added)                                                         \
    X(project_entry) X(project_predecessor_done) X(project_tile_full) X(project_sums_sent) X(project_sums_full)
// clang-format on
#define FLASHMHF_STAMP(name) name,
enum class Stamp : int { FLASHMHF_STAMPS(FLASHMHF_STAMP) };
#undef FLASHMHF_STAMP
#define FLASHMHF_STAMP(name) #name,
constexpr const char *stamp_names[] = {FLASHMHF_STAMPS(FLASHMHF_STAMP)};
#undef FLASHMHF_STAMP
#undef FLASHMHF_STAMPS
constexpr int stamp_count = sizeof(stamp_names) / sizeof(*stamp_names);

#ifdef FLASHMHF_TRACE
// What is kept of a launch: CTAs 0 to 15, a warp's first lane, and its first rounds of a loop.
constexpr int trace_ctas = 16, trace_warps = 20, trace_rounds = 32;
struct TraceRecord {
    uint64_t time, clock;  // globaltimer, ns, of the device; clock64, of the SM. Both 0: no stamp
};
using TraceStamps = TraceRecord[trace_ctas][trace_warps][stamp_count][trace_rounds];

// One function for each file of kernels, which copies its stamps to the host.
inline std::vector<cudaError_t (*)(void *)> &trace_readers() {
    static std::vector<cudaError_t (*)(void *)> readers;
    return readers;
}
namespace {
__device__ TraceStamps trace_stamps;
[[maybe_unused]] const bool trace_registered =
    (trace_readers().push_back([](void *out) { return cudaMemcpyFromSymbol(out, trace_stamps, sizeof(TraceStamps)); }), true);
}  // namespace

// By one thread, or by a warp, whose first lane writes. A later launch overwrites the stamps of an earlier one.
__device__ __forceinline__ void stamp(Stamp what, int round = 0) {
    const unsigned cta = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    if (kittens::laneid() != 0 || cta >= trace_ctas || round >= trace_rounds) return;
    uint64_t time, clock;
    asm volatile("mov.u64 %0, %%globaltimer;\nmov.u64 %1, %%clock64;" : "=l"(time), "=l"(clock)::"memory");
    trace_stamps[cta][threadIdx.x / 32][static_cast<int>(what)][round] = {time, clock};
}
#else
__device__ __forceinline__ void stamp(Stamp, int = 0) {}
#endif

}  // namespace flashmhf
