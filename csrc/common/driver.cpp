#include "common/driver.h"

#include <stdexcept>
#include <string>

#include <cuda.h>

namespace flashmhf {

void *driver_function(const char *name) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);
#else  // CUDA 12.4 knows the entry point of its own version only
    const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || function == nullptr)
        throw std::runtime_error(std::string("the NVIDIA driver has no ") + name + " (CUDA 12.0)");
    return function;
}

cudaError_t ensure_context(int device) {
    static const auto device_of_context = reinterpret_cast<decltype(&cuCtxGetDevice)>(driver_function("cuCtxGetDevice"));
    CUdevice current;
    return device_of_context(&current) == CUDA_SUCCESS && current == device ? cudaSuccess : cudaSetDevice(device);
}

}  // namespace flashmhf
