// Clock stamps of warps, to see where a kernel's time goes. A build with -DFLASHMHF_TRACE=ON keeps them; in any other stamp() is empty.
// docs/profiling.md says how to read them.
#pragma once

#include <vector>

#include "kittens.cuh"

namespace flashmhf {

// Stamps, each of one place in one kernel, and their names in the same order.
enum class Stamp : int {
    inter_entry,
    s_products_issued,
    s_products_done,
    s_handed_over,
    s_dq_issued,
    s_dq_staged,
    w_operands_full,
    w_products_done,
    dq_predecessor_added,
    dq_added,
    project_entry,
    project_predecessor_done,
    project_tile_full,
    project_sums_sent,
    project_sums_full,
};
constexpr const char *stamp_names[] = {
    "inter_entry",   "s_products_issued",        "s_products_done",   "s_handed_over",        "s_dq_issued",
    "s_dq_staged",   "w_operands_full",          "w_products_done",   "dq_predecessor_added", "dq_added",
    "project_entry", "project_predecessor_done", "project_tile_full", "project_sums_sent",    "project_sums_full",
};
constexpr int stamp_count = sizeof(stamp_names) / sizeof(*stamp_names);
static_assert(static_cast<int>(Stamp::project_sums_full) + 1 == stamp_count);

#ifdef FLASHMHF_TRACE
// What is kept of a launch: its first CTAs, and a warp's first rounds of a loop.
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
