#include "host/launch_forward.h"

#include <array>
#include <atomic>

#include "host/tensor_map.h"
#include "kernels/policy.h"

namespace flashmhf {

ForwardLaunch prepare_forward(const ForwardProblem &problem, const ForwardPlan &plan, float *partials) {
    const ForwardShape &s = problem.shape;
    const int d_h = s.head_dim, swizzle = d_h % 64 == 0 ? 128 : 64, panel = swizzle / element_bytes;
    auto rows = [&](const char *what, const void *data, int64_t head, int64_t token, int64_t batch) {
        return tensor_map(what, data, problem.bf16, {{d_h, 1, panel}, {s.heads, head, 1}, {s.length, token, tile_rows}, {s.batch, batch, 1}}, swizzle);
    };
    auto weights = [&](const char *what, const void *data) {
        return tensor_map(what, data, problem.bf16,
                          {{d_h, 1, panel},
                           {s.subnet_dim, d_h, tile_inter / plan.cluster_size},
                           {static_cast<int64_t>(s.heads) * s.subnets, s.subnet_dim * d_h, 1}},
                          swizzle);
    };
    ForwardLaunch launch{};
    launch.bf16 = problem.bf16;
    launch.plan = plan;
    launch.q = rows("q", problem.q, problem.q_head, problem.q_token, problem.q_batch);
    launch.k = weights("k", problem.k);
    launch.u = weights("u", problem.u);
    launch.v = weights("v", problem.v);
    launch.out = rows("the output", problem.out, d_h, problem.out_token, problem.out_batch);
    launch.out_data = problem.out;

    ForwardParams &p = launch.params;
    p.schedule = plan.schedule;
    p.cluster_size = plan.cluster_size;
    p.batch = static_cast<int>(s.batch);
    p.length = s.length;
    p.row_tiles = plan.row_tiles;
    p.blocks = plan.blocks;
    p.subnets = s.subnets;
    p.subnet_tiles = plan.subnet_tiles;
    p.out_batch = problem.out_batch;
    p.out_token = problem.out_token;
    p.gate = problem.gate;
    p.gate_data = problem.gate_data;
    p.r_batch = problem.r_batch;
    p.r_token = problem.r_token;
    p.r_head = problem.r_head;
    p.eps = problem.eps;
    p.partials = partials;
    return launch;
}

cudaError_t launch_forward(int head_dim, const ForwardLaunch &launch, cudaStream_t stream) {
    switch (head_dim) {
        case 64: return launch_forward<64>(launch, stream);
        case 96: return launch_forward<96>(launch, stream);
        case 128: return launch_forward<128>(launch, stream);
        default: return launch_forward<256>(launch, stream);
    }
}

cudaError_t describe_device(int head_dim, Device *device) {
    constexpr int devices = 64;
    static std::array<std::atomic<int64_t>, devices * 4> known{};  // sms * 2^32 + pairs, by device and head dimension
    int index;
    if (cudaError_t error = cudaGetDevice(&index)) return error;
    const int instance = head_dim == 64 ? 0 : head_dim == 96 ? 1 : head_dim == 128 ? 2 : 3;
    std::atomic<int64_t> *slot = index < devices ? &known[index * 4 + instance] : nullptr;
    if (slot && *slot) {
        *device = {static_cast<int>(*slot >> 32), static_cast<int>(*slot & 0xffffffff)};
        return cudaSuccess;
    }
    if (cudaError_t error = cudaDeviceGetAttribute(&device->sms, cudaDevAttrMultiProcessorCount, index)) return error;
    cudaError_t error = instance == 0   ? count_pairs<64>(&device->pairs)
                        : instance == 1 ? count_pairs<96>(&device->pairs)
                        : instance == 2 ? count_pairs<128>(&device->pairs)
                                        : count_pairs<256>(&device->pairs);
    if (error) return error;
    if (device->pairs > device->sms / 2) device->pairs = device->sms / 2;
    if (slot) *slot = (static_cast<int64_t>(device->sms) << 32) | device->pairs;
    return cudaSuccess;
}

}  // namespace flashmhf
