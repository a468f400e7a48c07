// New tensors and views without the boxed dispatcher, through which torch::stable::new_empty, view and reshape take microseconds each: at
// few tokens the host is the bound.
#pragma once

#include <span>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/shim_utils.h>

namespace flashmhf {

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
