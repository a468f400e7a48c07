#include "host/launch_forward.h"

#include <array>
#include <atomic>

namespace flashmhf {

cudaError_t launch_forward(int head_dim, const ForwardLaunch &launch) {
    switch (head_dim) {
        case 64: return launch_forward<64>(launch);
        case 96: return launch_forward<96>(launch);
        case 128: return launch_forward<128>(launch);
        default: return launch_forward<256>(launch);
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
