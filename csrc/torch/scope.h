// The calling thread's device and stream, errors as exceptions, and NVTX ranges (FLASHMHF_NVTX=1).
#pragma once

#include <cstdlib>
#include <cstring>

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include "common/driver.h"

namespace flashmhf {

inline void check_cuda(cudaError_t error) { STD_CUDA_CHECK(error); }

inline cudaStream_t current_stream(int device) {
    void *stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return static_cast<cudaStream_t>(stream);
}

class NvtxRange {
  public:
    explicit NvtxRange(const char *name) {
        if (enabled()) nvtxRangePushA(name);
    }
    ~NvtxRange() {
        if (enabled()) nvtxRangePop();
    }
    NvtxRange(const NvtxRange &) = delete;
    NvtxRange &operator=(const NvtxRange &) = delete;

  private:
    static bool enabled() {
        static const char *const value = std::getenv("FLASHMHF_NVTX");
        return value && std::strcmp(value, "1") == 0;
    }
};

// What every operator enters first: the tensors' device with a context current, a supported capability, and an NVTX range. PyTorch's guard
// makes no context current when the thread's device is already the wanted one, and a thread that has not used CUDA has none: the driver
// then refuses to encode tensor maps (CUDA error 201).
class DeviceScope {
  public:
    DeviceScope(int device, const char *name) : guard_(device), range_(name) {
        check_cuda(ensure_context(device));
        int major = 0, minor = 0;
        check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
        check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
        // The library holds code for compute capability 9.0 only.
        STD_TORCH_CHECK(major == 9 && minor == 0, "device has compute capability ", major, ".", minor, "; supported: 9.0 (H100, H200)");
    }

  private:
    torch::stable::accelerator::DeviceGuard guard_;
    NvtxRange range_;
};

}  // namespace flashmhf
