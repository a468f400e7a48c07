// Element types, their packed pairs and the conversions between them.
#pragma once

namespace kittens {

using bf16 = __nv_bfloat16;
using half = __half;
using bf16_2 = __nv_bfloat162;
using half_2 = __half2;

namespace base_types {

// packing<T>::packed_type: the pair of T that a register tile stores.
template <typename T> struct packing;
template <typename Pair> struct packing_of {
    using packed_type = Pair;
    template <typename T> __device__ static inline constexpr Pair pack(const T &x) { return Pair{x, x}; }
};
template <> struct packing<float> : packing_of<float2> {};
template <> struct packing<bf16> : packing_of<bf16_2> {};
template <> struct packing<half> : packing_of<half_2> {};

// convertor<T, U>::convert(u): U to T, rounding to nearest even.
template <typename T, typename U> struct convertor;
template <typename T> struct convertor<T, T> {
    __device__ static inline T convert(const T &u) { return u; }
};
template <> struct convertor<float, bf16> {
    __device__ static inline float convert(const bf16 &u) { return __bfloat162float(u); }
};
template <> struct convertor<bf16, float> {
    __device__ static inline bf16 convert(const float &u) { return __float2bfloat16_rn(u); }
};
template <> struct convertor<float, half> {
    __device__ static inline float convert(const half &u) { return __half2float(u); }
};
template <> struct convertor<half, float> {
    __device__ static inline half convert(const float &u) { return __float2half_rn(u); }
};
template <> struct convertor<float2, bf16_2> {
    __device__ static inline float2 convert(const bf16_2 &u) { return __bfloat1622float2(u); }
};
template <> struct convertor<bf16_2, float2> {
    __device__ static inline bf16_2 convert(const float2 &u) { return __float22bfloat162_rn(u); }
};
template <> struct convertor<float2, half_2> {
    __device__ static inline float2 convert(const half_2 &u) { return __half22float2(u); }
};
template <> struct convertor<half_2, float2> {
    __device__ static inline half_2 convert(const float2 &u) { return __float22half2_rn(u); }
};

}  // namespace base_types
}  // namespace kittens
