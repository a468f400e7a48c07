// The device and stream of a call, errors as exceptions, and NVTX ranges (FLASHMHF_NVTX=1).
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include "common/device.h"
#include "common/driver.h"

namespace flashmhf {

inline void check_cuda(cudaError_t error) { STD_CUDA_CHECK(error); }

inline cudaStream_t current_stream(int device) {
    void *stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return static_cast<cudaStream_t>(stream);
}

// What a range is about: T tokens, its payload, and the sizes that its name is followed by.
struct RangeShape {
    int64_t tokens, heads, head_dim, subnets, subnet_dim;
};

// A range of the domain "flashmhf": "gated_forward T=4096 H=16 d_h=128 E=22 d_e=384".
class NvtxRange {
  public:
    NvtxRange(const char *name, const RangeShape &shape) {
        if (!enabled()) return;
        char text[160];
        std::snprintf(text, sizeof text, "%s T=%lld H=%lld d_h=%lld E=%lld d_e=%lld", name, static_cast<long long>(shape.tokens),
                      static_cast<long long>(shape.heads), static_cast<long long>(shape.head_dim), static_cast<long long>(shape.subnets),
                      static_cast<long long>(shape.subnet_dim));
        nvtxEventAttributes_t event{};
        event.version = NVTX_VERSION;
        event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
        event.payloadType = NVTX_PAYLOAD_TYPE_INT64;
        event.payload.llValue = shape.tokens;
        event.messageType = NVTX_MESSAGE_TYPE_ASCII;
        event.message.ascii = text;
        nvtxDomainRangePushEx(domain(), &event);
    }
    ~NvtxRange() {
        if (enabled()) nvtxDomainRangePop(domain());
    }
    NvtxRange(const NvtxRange &) = delete;
    NvtxRange &operator=(const NvtxRange &) = delete;

  private:
    static bool enabled() {
        static const char *const value = std::getenv("FLASHMHF_NVTX");
        return value && std::strcmp(value, "1") == 0;
    }
    static nvtxDomainHandle_t domain() {
        static const nvtxDomainHandle_t made = nvtxDomainCreateA("flashmhf");
        return made;
    }
};

// What a call enters once, when its tensors have been checked: their device, a context of it, and the stream. PyTorch's guard makes no
// context current when the thread's device is already the wanted one, and a thread that has not used CUDA has none: the driver then refuses
// to encode tensor maps (CUDA error 201).
class DeviceScope {
    torch::stable::accelerator::DeviceGuard guard_;

  public:
    const Device &device;
    const cudaStream_t stream;

    explicit DeviceScope(int index) : guard_(index), device(in_context(index)), stream(current_stream(index)) {}

  private:
    static const Device &in_context(int index) {
        check_cuda(ensure_context(index));
        return describe_device();
    }
};

}  // namespace flashmhf
