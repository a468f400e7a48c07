// Device tests of every tile operation that the kernels use. Prints one line per test; exits 1 if any failed. Copies and semaphores are
// those that every kernel stands on: the harnesses' comparisons with fp64 are their test.
// The CMake target kittens_tests, or nvcc with -I../include -I../../csrc.
#include "common/tma.cuh"
#include "harness/harness.cuh"
#include "kittens.cuh"

#include <cuda_fp8.h>

#include <cmath>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

using namespace kittens;
namespace ext = flashmhf::tma;

using Buffer = harness::Buffer<float>;
using harness::check;

// Values exact in bf16 and fp16, so that products differ from the reference by fp32 summation order alone.
__host__ __device__ static float value(int i, int seed) {
    uint32_t z = (uint32_t)i * 2654435761u + (uint32_t)seed * 40503u + 12345u;
    z ^= z >> 15;
    z *= 2246822519u;
    z ^= z >> 13;
    return (float)((int)(z % 33u) - 16) / 16.f;
}
// Exact in e4m3; sums of 32 products are exact in fp16.
__host__ __device__ static float small_value(int i, int seed) { return floorf(value(i, seed) * 4.f) / 4.f; }
template <typename T> __device__ static T as(float x) { return base_types::convertor<T, float>::convert(x); }
template <typename T> __device__ static float as_float(T x) { return base_types::convertor<float, T>::convert(x); }
// An element of a tile at a multiple of 8 * swizzle_bytes, where offsets are swizzled as addresses are.
template <shared_tile ST> __device__ static auto &at(ST &tile, int row, int column) {
    return tile.data[ST::idx(0u, {row, column}) / sizeof(typename ST::T)];
}
template <shared_tile ST> __device__ static void fill(ST &tile, int seed, bool transposed = false) {
    for (int i = threadIdx.x; i < ST::rows * ST::cols; i += blockDim.x) {
        const int r = i / ST::cols, c = i % ST::cols;
        at(tile, r, c) = as<typename ST::T>(transposed ? value(c * ST::rows + r, seed) : value(i, seed));
    }
}
// Each thread writes its part of a warpgroup's register tile to row-major out.
template <register_tile RT> __device__ static void dump(float *out, const RT &tile) {
    const int lane = laneid(), first = warpgroup::warpid() * RT::rows;
    for (int i = 0; i < RT::height; i++)
        for (int j = 0; j < RT::width; j++)
            for (int k = 0; k < 4; k++) {
                const int r = first + 16 * i + lane / 4 + 8 * (k & 1), c = 16 * j + 2 * (lane % 4) + 8 * (k >> 1);
                const float2 v = base_types::convertor<float2, typename RT::dtype>::convert(tile.tiles[i][j].data[k]);
                out[r * RT::cols + c] = v.x;
                out[r * RT::cols + c + 1] = v.y;
            }
}

static int failures = 0;
template <typename... A> static std::string text(const char *format, const A &...args) {
    char line[96];
    std::snprintf(line, sizeof line, format, args...);
    return line;
}
// Dynamic shared memory, from which a kernel takes one object after the other.
struct SharedMemory {
    uintptr_t next;
    __device__ SharedMemory() {
        extern __shared__ int raw[];
        next = reinterpret_cast<uintptr_t>(raw);
    }
    template <typename A> __device__ A &take() {
        next = (next + 1023) / 1024 * 1024 + sizeof(A);
        return *reinterpret_cast<A *>(next - sizeof(A));
    }
};
// Of a kernel of one warpgroup that writes `size` values.
static void test(const std::string &name, void (*kernel)(float *), int size, double limit, const std::function<double(int)> &expected) {
    Buffer out(size);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    kernel<<<1, 128, 200 * 1024>>>(out);
    check(cudaGetLastError());
    const std::vector<float> got = out.host();
    double worst = 0;
    for (int i = 0; i < size; i++) {
        const double e = std::fabs(got[i] - expected(i));
        if (!(e <= worst)) worst = e;  // keeps NaN
    }
    const bool ok = worst <= limit;  // false for NaN
    std::printf("%s %s error %.2e limit %.0e\n", ok ? "PASS" : "FAIL", name.c_str(), worst, limit);
    failures += !ok;
}
template <typename T> static const char *name_of() { return sizeof(T) == 4 ? "fp32" : std::is_same_v<T, bf16> ? "bf16" : "fp16"; }

static double product(double seed, int K, const std::function<float(int)> &term) {  // terms are exact in fp32
    for (int k = 0; k < K; k++) seed += term(k);
    return seed;
}

// ---- products: C = seed + op(A) op(B), 64 x N, contraction K
enum Form { AB, ABt, AtB };
template <typename T, int N, int K, int form, bool registers, bool accumulate, int A_swizzle, int B_swizzle>
__global__ void product_kernel(float *out) {
    SharedMemory memory;
    constexpr bool ta = form == AtB, tb = form == ABt;
    auto &a = memory.take<st<T, ta ? K : 64, ta ? 64 : K, true, A_swizzle>>();
    auto &b = memory.take<st<T, tb ? N : K, tb ? K : N, true, B_swizzle>>();
    fill(a, 1, ta);
    fill(b, 2, tb);
    ext::fence_shared_writes();
    __syncthreads();
    rt_fl<16, N> c;
    c = 3.f;  // mm_* must overwrite it
    auto multiply = [&](const auto &left) {
        if constexpr (form == AB && accumulate) warpgroup::mma_AB(c, left, b);
        if constexpr (form == AB && !accumulate) warpgroup::mm_AB(c, left, b);
        if constexpr (form == ABt && accumulate) warpgroup::mma_ABt(c, left, b);
        if constexpr (form == ABt && !accumulate) warpgroup::mm_ABt(c, left, b);
        if constexpr (form == AtB) warpgroup::mma_AtB(c, left, b);
        warpgroup::mma_async_wait();
    };
    if constexpr (registers) {
        rt<T, 16, K> ra;
        warpgroup::load(ra, a);
        multiply(ra);
    } else multiply(a);
    dump(out, c);
}
template <typename T, int N, int K, int form, bool registers = false, bool accumulate = true, int A_swizzle = 0, int B_swizzle = 0>
static void test_product() {
    static const char *names[] = {"AB", "ABt", "AtB"};
    test(text("%s_%s %s n%d k%d %s swizzle %d,%d", accumulate ? "mma" : "mm", names[form], name_of<T>(), N, K,
              registers ? "registers" : "shared", A_swizzle, B_swizzle),
         product_kernel<T, N, K, form, registers, accumulate, A_swizzle, B_swizzle>, 64 * N, 1e-4,
         [](int i) { return product(accumulate ? 3 : 0, K, [=](int k) { return value(i / N * K + k, 1) * value(k * N + i % N, 2); }); });
}
template <typename T> static void test_products() {
    test_product<T, 64, 64, AB>();
    test_product<T, 128, 128, ABt>();
    test_product<T, 128, 64, AtB>();
    test_product<T, 128, 128, AB, true>();
    test_product<T, 128, 128, AB, true, false>();
    test_product<T, 128, 128, ABt, true>();
    test_product<T, 128, 128, ABt, true, false>();
    test_product<T, 64, 128, ABt, false, false>();
    // 96-wide tiles: 64-byte swizzle, three panels
    test_product<T, 96, 64, AB>();
    test_product<T, 128, 96, ABt>();
    test_product<T, 96, 64, AtB>();
    test_product<T, 96, 64, AB, true>();
    // narrow and wide
    test_product<T, 16, 32, AB, false, true, 32, 32>();
    test_product<T, 32, 64, ABt, true>();
    test_product<T, 48, 48, ABt>();
    test_product<T, 192, 64, AB>();
    test_product<T, 256, 64, AB>();
    test_product<T, 256, 64, ABt, true, false>();
    test_product<T, 64, 256, AtB>();
    test_product<T, 128, 64, AtB, false, true, 64, 64>();
}

// ---- two products in flight, with one fence before both
__global__ void pipelined_kernel(float *out) {
    SharedMemory memory;
    using A = st<bf16, 64, 128>;
    using B = st<bf16, 128, 64>;
    A &a = memory.take<A>();
    B &b = memory.take<B>();
    fill(a, 1);
    fill(b, 2);
    ext::fence_shared_writes();
    __syncthreads();
    rt_fl<16, 64> c, d;
    c = 0.f;
    d = 0.f;
    warpgroup::mma_fence(c);
    warpgroup::mma_fence(d);
    warpgroup::mma_AB<rt_fl<16, 64>, A, B, 0, 0>(c, a, b);
    warpgroup::mma_AB<rt_fl<16, 64>, A, B, 0, 1>(d, a, b);
    warpgroup::mma_async_wait<1>();
    warpgroup::mma_fence(c);
    dump(out, c);
    warpgroup::mma_async_wait<0>();
    dump(out + 64 * 64, d);
}

// ---- tiles: shared <-> registers, subtiles, 16 and 32 bits, both layouts
template <typename T, typename R, int rows, int cols, int swizzle> __global__ void copy_kernel(float *out) {
    SharedMemory memory;
    using ST = st<T, rows, cols, true, swizzle>;
    ST &a = memory.take<ST>();
    ST &b = memory.take<ST>();
    fill(a, 1);
    __syncthreads();
    rt<R, rows / 4, cols> r;
    warpgroup::load(r, a);
    warpgroup::store(b, r);
    __syncthreads();
    for (int i = threadIdx.x; i < rows * cols; i += blockDim.x) out[i] = as_float(at(b, i / cols, i % cols));
}
template <typename T, typename R, int rows, int cols, int swizzle = 0> static void test_copy() {
    test(text("load+store %s tile %dx%d through %s swizzle %d", name_of<T>(), rows, cols, name_of<R>(), swizzle),
         copy_kernel<T, R, rows, cols, swizzle>, rows * cols, 0, [](int i) { return value(i, 1); });
}
__global__ void fragment_kernel(float *out) {  // the register order of a loaded tile, and of the transposed matrices of ldmatrix
    SharedMemory memory;
    using Tile = st<bf16, 64, 64>;
    Tile &a = memory.take<Tile>();
    fill(a, 1);
    __syncthreads();
    rt<bf16, 16, 64> r;
    warpgroup::load(r, a);
    warp::mul(r, r, __float2bfloat16(0.5f));
    dump(out, r);
    if (warpid() == 0) {
        bf16_2 x[4];
        const int lane = laneid();
        move<bf16_2>::ldsm4t(x[0], x[1], x[2], x[3], Tile::idx(ext::shared_address(a.data), {lane % 8, 8 * (lane / 8)}));
        for (int i = 0; i < 4; i++) {  // matrix i: columns 8i.. of rows 0..7; pairs run down the rows
            const int row = 2 * (lane % 4), col = 8 * i + lane / 4;
            const float2 v = __bfloat1622float2(x[i]);
            out[4096 + row * 32 + col] = v.x;
            out[4096 + (row + 1) * 32 + col] = v.y;
        }
    }
}

// ---- products in e4m3: d [64 x N] += a [64 x 32] b [N x 32]^T, sums in fp16
template <int N> __global__ void e4m3_kernel(float *out) {
    __shared__ alignas(1024) uint8_t b[N * 32];  // 32-byte rows, 32-byte swizzle
    auto encoded = [](float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); };
    for (int i = threadIdx.x; i < N * 32; i += blockDim.x) {
        const int row = i / 32, col = i % 32;
        b[row * 32 + (col ^ row / 4 % 2 * 16)] = encoded(small_value(i, 2));
    }
    ext::fence_shared_writes();
    __syncthreads();
    const int g = laneid() / 4, t = laneid() % 4, first = warpid() * 16 + g;
    uint32_t a[4], d[N / 4];
    for (int i = 0; i < 4; i++) {
        a[i] = 0;
        for (int j = 0; j < 4; j++) a[i] |= uint32_t{encoded(small_value((first + i % 2 * 8) * 32 + i / 2 * 16 + 4 * t + j, 1))} << 8 * j;
    }
    for (uint32_t &pair : d) pair = 0x3c003c00;  // 1, 1
    warpgroup::mma_fence();
    e4m3::multiply(d, a, e4m3::descriptor<32>(ext::shared_address(b)), 1);
    warpgroup::mma_commit_group();
    warpgroup::mma_async_wait();
    for (int i = 0; i < N / 4; i++) {
        const float2 v = __half22float2(reinterpret_cast<const __half2 &>(d[i]));
        float *at = out + (first + i % 2 * 8) * N + i / 2 * 8 + 2 * t;
        at[0] = v.x;
        at[1] = v.y;
    }
}
template <int N> static void test_e4m3() {
    test("mma_ABt e4m3 n" + std::to_string(N), e4m3_kernel<N>, 64 * N, 0,
         [](int i) { return product(1, 32, [=](int k) { return small_value(i / N * 32 + k, 1) * small_value(i % N * 32 + k, 2); }); });
}

static int run() {
    test_products<bf16>();
    test_products<half>();
    test("two products in flight", pipelined_kernel, 2 * 4096, 1e-4,
         [](int i) { return product(0, 128, [=](int k) { return value(i % 4096 / 64 * 128 + k, 1) * value(k * 64 + i % 64, 2); }); });
    test_copy<bf16, bf16, 64, 64>();
    test_copy<bf16, float, 64, 128>();
    test_copy<half, half, 64, 96>();
    test_copy<half, float, 128, 64, 32>();
    test_copy<bf16, float, 64, 48>();
    test_e4m3<64>();
    test_e4m3<96>();
    test_e4m3<128>();
    test_e4m3<256>();
    test("fragment order, mul, ldmatrix.trans", fragment_kernel, 4096 + 256, 0,
         [](int i) { return i < 4096 ? 0.5 * value(i, 1) : value((i - 4096) / 32 * 64 + (i - 4096) % 32, 1); });
    std::printf("%d failed\n", failures);
    return failures != 0;
}

int main() { return harness::guarded(run); }
