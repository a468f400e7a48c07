// What an operator has of PyTorch: the device and stream of a call, errors as exceptions, new tensors and views, and NVTX ranges
// (FLASHMHF_NVTX=1).
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>
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

// Sizes of a problem; q is [..., H, d_h] with T tokens in its leading dimensions, and `group` of its heads share one of k, u and v.
struct ProblemSizes {
    int64_t tokens, heads, head_dim, subnets, subnet_dim, group;
};

// A range of the domain "flashmhf" with T as its payload: "gated_forward T=4096 H=16 d_h=128 E=22 d_e=384".
class NvtxRange {
  public:
    NvtxRange(const char *name, const ProblemSizes &shape) {
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

// New tensors and views without the boxed dispatcher, through which torch::stable::new_empty, view and reshape take microseconds each: at
// few tokens the host is the bound.
using torch::stable::Tensor;
using Sizes = std::span<const int64_t>;
inline Sizes sizes_of(const Tensor &x) { return {x.sizes().data(), x.sizes().size()}; }

inline std::vector<int64_t> dense_strides(Sizes sizes) {
    std::vector<int64_t> strides(sizes.size(), 1);
    for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * (sizes[i] > 1 ? sizes[i] : 1);
    return strides;
}

// Uninitialised and dense, on x's device. dtype: as aoti_torch_dtype_* names it.
inline Tensor new_dense(const Tensor &x, Sizes sizes, int32_t dtype) {
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), dense_strides(sizes).data(), dtype,
                                                    aoti_torch_device_type_cuda(), x.get_device_index(), &made));
    return Tensor(made);
}
inline Tensor new_dense(const Tensor &x, Sizes sizes) {
    int32_t dtype;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
    return new_dense(x, sizes, dtype);
}

// x's memory from element `first` on, with other sizes and strides. The shim's argument storage_offset counts from x's own offset.
inline Tensor strided_view(const Tensor &x, Sizes sizes, Sizes strides, int64_t first = 0) {
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(x.get(), sizes.size(), sizes.data(), strides.data(), first, &made));
    return Tensor(made);
}
inline Tensor dense_view(const Tensor &x, Sizes sizes) { return strided_view(x, sizes, dense_strides(sizes)); }

}  // namespace flashmhf
