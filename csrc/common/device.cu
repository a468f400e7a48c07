#include "common/device.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "common/geometry.h"
#include "common/launch_kernel.cuh"

namespace flashmhf {
namespace {

// With all the shared memory that a CTA can have it takes an SM, as each of the main kernels does. How many clusters of such CTAs run at
// once depends on the chip's GPCs alone.
__global__ void flashmhf_takes_an_sm() {}

// A size that the driver refuses, as it may for a part of a chip (MIG), has no clusters.
int count_clusters(int size) {
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
        return count;
    cudaGetLastError();  // the next launch would report it
    return 0;
}

}  // namespace

Device describe_device() {
    static std::mutex mutex;
    static std::map<int, Device> known;
    auto check = [](cudaError_t error) {
        if (error != cudaSuccess) throw std::runtime_error(std::string("the device cannot be asked: ") + cudaGetErrorString(error));
    };
    int index;
    check(cudaGetDevice(&index));
    const std::lock_guard lock(mutex);
    Device &found = known[index];
    if (found.sms() == 0) {
        check(allow_shared_memory(flashmhf_takes_an_sm, shared_memory_limit));
        for (int size = 1; size <= max_slices; ++size) found.clusters[size - 1] = count_clusters(size);
        found.large_clusters = count_clusters(large_slices);
        if (found.sms() == 0) check(cudaErrorNotSupported);
    }
    return found;
}

}  // namespace flashmhf
