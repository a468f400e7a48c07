// Elements of tensors that are fp32 or of the element type T, whichever a launch says.
#pragma once

#include "kittens.cuh"

namespace flashmhf {

// Through the read-only cache: nothing writes the tensor while the kernel runs.
template <typename T> __device__ __forceinline__ float load_real(const void *x, int64_t at, bool is_float) {
    return is_float ? __ldg(static_cast<const float *>(x) + at)
                    : kittens::base_types::convertor<float, T>::convert(__ldg(static_cast<const T *>(x) + at));
}
template <typename T> __device__ __forceinline__ void store_real(void *x, int64_t at, bool is_float, float value) {
    if (is_float) static_cast<float *>(x)[at] = value;
    else static_cast<T *>(x)[at] = kittens::base_types::convertor<T, float>::convert(value);
}

}  // namespace flashmhf
