// Element types, their packed pairs and the conversions between them.
#pragma once

namespace kittens {

using bf16 = __nv_bfloat16;
using half = __half;
using bf16_2 = __nv_bfloat162;
using half_2 = __half2;

namespace base_types {

// packing<T>: the element type, the pair of it that a register tile stores, and how many elements T holds.
template <typename T> struct packing;
template <typename Element, typename Pair> struct packing_of {
    using unpacked_type = Element;
    using packed_type = Pair;
    __device__ static inline constexpr Pair pack(const Element &x) { return Pair{x, x}; }
};
template <> struct packing<float> : packing_of<float, float2> {
    static __host__ __device__ constexpr int num() { return 1; }
};
template <> struct packing<float2> : packing_of<float, float2> {
    static __host__ __device__ constexpr int num() { return 2; }
};
template <> struct packing<bf16> : packing_of<bf16, bf16_2> {
    static __host__ __device__ constexpr int num() { return 1; }
};
template <> struct packing<bf16_2> : packing_of<bf16, bf16_2> {
    static __host__ __device__ constexpr int num() { return 2; }
};
template <> struct packing<half> : packing_of<half, half_2> {
    static __host__ __device__ constexpr int num() { return 1; }
};
template <> struct packing<half_2> : packing_of<half, half_2> {
    static __host__ __device__ constexpr int num() { return 2; }
};

// convertor<T, U>::convert(u): U to T, rounding to nearest even; between the two 16-bit types through float.
template <typename T, typename U> struct convertor {
    __device__ static inline T convert(const U &u) { return convertor<T, float>::convert(convertor<float, U>::convert(u)); }
};
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
template <> struct convertor<bf16_2, half_2> {
    __device__ static inline bf16_2 convert(const half_2 &u) { return __float22bfloat162_rn(__half22float2(u)); }
};
template <> struct convertor<half_2, bf16_2> {
    __device__ static inline half_2 convert(const bf16_2 &u) { return __float22half2_rn(__bfloat1622float2(u)); }
};

}  // namespace base_types
}  // namespace kittens
