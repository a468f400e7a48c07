#include "common/device.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "common/driver.h"
#include "common/geometry.h"
#include "common/launch_kernel.cuh"

namespace flashmhf {
namespace {

// With all the shared memory that a CTA can have it takes an SM, as each of the main kernels does. How many clusters of such CTAs run at
// once depends on the chip's GPCs alone.
__global__ void flashmhf_takes_an_sm() {}

// On so many SMs. A size that the driver refuses, as it may for a part of a chip (MIG), has no clusters.
int count_clusters(int size, int sms) {
    int count = 0;
    cudaLaunchAttribute attribute = clusters_of(size);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(size);
    config.blockDim = dim3(128);
    config.dynamicSmemBytes = shared_memory_limit;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (allow_cluster(flashmhf_takes_an_sm, size) == cudaSuccess &&
        cudaOccupancyMaxActiveClusters(&count, flashmhf_takes_an_sm, &config) == cudaSuccess)
        return std::min(count, sms / size);
    cudaGetLastError();  // the next launch would report it
    return 0;
}

}  // namespace

const Device &describe_device() {
    static std::mutex mutex;
    static std::map<uint64_t, Device> known;  // by context
    auto check = [](cudaError_t error) {
        if (error != cudaSuccess) throw std::runtime_error(std::string("the device cannot be asked: ") + cudaGetErrorString(error));
    };
    const std::lock_guard lock(mutex);
    Device &found = known[context_id()];
    if (found.sms() == 0) {
        int index, major, minor, all;
        check(cudaGetDevice(&index));
        check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index));
        check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index));
        check(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, index));
        if (major != 9 || minor != 0)  // the library holds code for 9.0 only
            throw std::runtime_error("device has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
                                     "; supported: 9.0 (H100, H200)");
        const int sms = context_sms(all);
        check(allow_shared_memory(flashmhf_takes_an_sm, shared_memory_limit));
        for (int size = 1; size <= max_slices; ++size) found.clusters[size - 1] = count_clusters(size, sms);
        found.large_clusters = count_clusters(large_slices, sms);
        if (found.sms() == 0) check(cudaErrorNotSupported);
    }
    return found;
}

}  // namespace flashmhf
