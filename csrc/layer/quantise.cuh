// Quantisation of rows to e4m3, one CTA a row. The bound is the memory: a row is read once, or once more from the L2 where it is longer
// than the CTA's threads hold.
#pragma once

#include "common/fp8.cuh"
#include "layer/kernel.cuh"

namespace flashmhf {

constexpr int quantise_threads = 256;
constexpr float e4m3_max = 448.f, tiniest_scale = 1e-30f;  // as flashmhf/quantize has them

template <typename T> __device__ __forceinline__ void to_float(float (&x)[8], const EightElements<T> &read) {
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = kittens::base_types::convertor<float, T>::convert(read.x[i]);
}

template <typename T>
__global__ __launch_bounds__(quantise_threads) void flashmhf_quantise_rows(const __grid_constant__ QuantiseRowsParams p) {
    __shared__ float largest_of[quantise_threads / 32];
    const int64_t row = blockIdx.x;
    const T *const from = static_cast<const T *>(p.x) + row * p.x_stride;
    const int first = threadIdx.x * 8;
    auto read = [&](int column) { return *reinterpret_cast<const EightElements<T> *>(from + column); };
    kittens::pdl::arrive();  // the next kernel waits for this one before it touches x8 and scale
    kittens::pdl::wait();

    EightElements<T> held{};
    float largest = 0.f;
    for (int column = first; column < p.columns; column += 8 * quantise_threads) {
        const EightElements<T> eight = read(column);
        if (column == first) held = eight;
        float x[8];
        to_float(x, eight);
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(x[i]));  // drops a NaN, which stays one in x8
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) largest = fmaxf(largest, __shfl_xor_sync(kittens::MASK_ALL, largest, lane));
    if (threadIdx.x % 32 == 0) largest_of[threadIdx.x / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < quantise_threads / 32; ++i) largest = fmaxf(largest, largest_of[i]);

    const float scale = fmaxf(largest * (1.f / e4m3_max), tiniest_scale), inverse = 1.f / scale;  // inf gives 0, and inf * 0 is NaN
    if (threadIdx.x == 0) p.scale[row] = scale;
    for (int column = first; column < p.columns; column += 8 * quantise_threads) {
        float x[8];
        to_float(x, column == first ? held : read(column));
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= inverse;
        const uint2 eight = {fp8::to_fp8(float2{x[0], x[1]}, float2{x[2], x[3]}), fp8::to_fp8(float2{x[4], x[5]}, float2{x[6], x[7]})};
        *reinterpret_cast<uint2 *>(p.x8 + row * p.columns + column) = eight;
    }
}

}  // namespace flashmhf
