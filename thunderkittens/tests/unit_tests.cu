// Device tests of every tile operation that the kernels use. Prints one line per test; exits 1 if any failed.
//   nvcc -std=c++20 -gencode=arch=compute_90a,code=sm_90a -I../include -I../../csrc -o unit_tests unit_tests.cu && ./unit_tests
#include "common/tma.cuh"
#include "kittens.cuh"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

using namespace kittens;
namespace ext = flashmhf::tma;

#define CHECK_CUDA(call)                                                                      \
    do {                                                                                      \
        cudaError_t status = (call);                                                          \
        if (status != cudaSuccess) {                                                          \
            std::printf("CUDA error at line %d: %s\n", __LINE__, cudaGetErrorString(status)); \
            std::exit(2);                                                                     \
        }                                                                                     \
    } while (0)

static int failures = 0;
static void report(const std::string &name, double error, double limit) {
    const bool ok = error <= limit;  // false for NaN
    std::printf("%s %s error %.2e limit %.0e\n", ok ? "PASS" : "FAIL", name.c_str(), error, limit);
    failures += !ok;
}

// Values exact in bf16 and fp16, so that products differ from the reference by fp32 summation order alone.
__host__ __device__ static float value(int i, int seed) {
    uint32_t z = (uint32_t)i * 2654435761u + (uint32_t)seed * 40503u + 12345u;
    z ^= z >> 15;
    z *= 2246822519u;
    z ^= z >> 13;
    return (float)((int)(z % 33u) - 16) / 16.f;
}
template <typename T> __device__ static T as(float x) { return base_types::convertor<T, float>::convert(x); }
template <ducks::st::all ST> __device__ static void fill(ST &tile, int seed, bool transposed = false) {
    for (int i = threadIdx.x; i < ST::rows * ST::cols; i += blockDim.x) {
        const int r = i / ST::cols, c = i % ST::cols;
        tile[{r, c}] = as<typename ST::T>(transposed ? value(c * ST::rows + r, seed) : value(i, seed));
    }
}
// Each thread writes its part of a warpgroup's register tile to row-major out.
template <ducks::rt::all RT> __device__ static void dump(float *out, const RT &tile) {
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

struct Buffer {  // device memory filled with NaN bytes, read back as floats
    float *device;
    size_t count;
    explicit Buffer(size_t n) : count(n) {
        CHECK_CUDA(cudaMalloc(&device, n * sizeof(float)));
        CHECK_CUDA(cudaMemset(device, 0xFF, n * sizeof(float)));
    }
    ~Buffer() { cudaFree(device); }
    std::vector<float> host() {
        CHECK_CUDA(cudaGetLastError());
        CHECK_CUDA(cudaDeviceSynchronize());
        std::vector<float> h(count);
        CHECK_CUDA(cudaMemcpy(h.data(), device, count * sizeof(float), cudaMemcpyDeviceToHost));
        return h;
    }
};
static double max_error(const std::vector<float> &got, const std::function<double(int)> &expected) {
    double worst = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double e = std::fabs(got[i] - expected((int)i));
        if (!(e <= worst)) worst = e;  // keeps NaN
    }
    return worst;
}
template <typename K, typename... A> static void launch(K kernel, dim3 grid, int threads, A... args) {
    CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
    kernel<<<grid, threads, 200 * 1024>>>(args...);
}
template <typename T> static const char *name_of() { return sizeof(T) == 4 ? "fp32" : std::is_same_v<T, bf16> ? "bf16" : "fp16"; }

// ---- products: C = seed + op(A) op(B), 64 x N, contraction K
enum Form { AB, ABt, AtB, AtBt };
template <typename T, int N, int K, int form, bool registers, bool accumulate, int A_swizzle, int B_swizzle>
__global__ void product_kernel(float *out) {
    extern __shared__ int raw[];
    shared_allocator<1024> allocator(raw);
    constexpr bool ta = form >= AtB, tb = form == ABt || form == AtBt;
    using A = st<T, ta ? K : 64, ta ? 64 : K, true, A_swizzle>;
    using B = st<T, tb ? N : K, tb ? K : N, true, B_swizzle>;
    A &a = allocator.template allocate<A>();
    B &b = allocator.template allocate<B>();
    fill(a, 1, ta);
    fill(b, 2, tb);
    ext::fence_shared_writes();
    __syncthreads();
    rt_fl<16, N> c;
    c = 3.f;  // mm_* must overwrite it
    if constexpr (registers) {
        rt<T, 16, K> ra;
        warpgroup::load(ra, a);
        if constexpr (form == AB && accumulate) warpgroup::mma_AB(c, ra, b);
        if constexpr (form == AB && !accumulate) warpgroup::mm_AB(c, ra, b);
        if constexpr (form == ABt && accumulate) warpgroup::mma_ABt(c, ra, b);
        if constexpr (form == ABt && !accumulate) warpgroup::mm_ABt(c, ra, b);
        warpgroup::mma_async_wait();
    } else {
        if constexpr (form == AB) {
            if constexpr (accumulate) warpgroup::mma_AB(c, a, b);
            else warpgroup::mm_AB(c, a, b);
        }
        if constexpr (form == ABt) {
            if constexpr (accumulate) warpgroup::mma_ABt(c, a, b);
            else warpgroup::mm_ABt(c, a, b);
        }
        if constexpr (form == AtB) {
            if constexpr (accumulate) warpgroup::mma_AtB(c, a, b);
            else warpgroup::mm_AtB(c, a, b);
        }
        if constexpr (form == AtBt) {
            if constexpr (accumulate) warpgroup::mma_AtBt(c, a, b);
            else warpgroup::mm_AtBt(c, a, b);
        }
        warpgroup::mma_async_wait();
    }
    dump(out, c);
}
template <typename T, int N, int K, int form, bool registers = false, bool accumulate = true, int A_swizzle = 0, int B_swizzle = 0>
static void test_product() {
    static const char *names[] = {"AB", "ABt", "AtB", "AtBt"};
    Buffer out(64 * N);
    launch(product_kernel<T, N, K, form, registers, accumulate, A_swizzle, B_swizzle>, 1, 128, out.device);
    const double e = max_error(out.host(), [&](int i) {
        double s = accumulate ? 3 : 0;
        for (int k = 0; k < K; k++) s += (double)value((i / N) * K + k, 1) * value(k * N + i % N, 2);
        return s;
    });
    char name[96];
    std::snprintf(name, sizeof name, "%s_%s %s n%d k%d %s swizzle %d,%d", accumulate ? "mma" : "mm", names[form], name_of<T>(), N, K,
                  registers ? "registers" : "shared", A_swizzle, B_swizzle);
    report(name, e, 1e-4);
}
template <typename T> static void test_products() {
    test_product<T, 64, 64, AB>();
    test_product<T, 128, 128, ABt>();
    test_product<T, 128, 64, AtB>();
    test_product<T, 64, 128, AtBt>();
    test_product<T, 128, 128, AB, true>();
    test_product<T, 128, 128, ABt, true>();
    test_product<T, 128, 128, ABt, true, false>();
    test_product<T, 64, 128, ABt, false, false>();
    test_product<T, 128, 64, AtB, false, false>();
    // 96-wide tiles: 64-byte swizzle, three panels
    test_product<T, 96, 64, AB>();
    test_product<T, 128, 96, ABt>();
    test_product<T, 96, 64, AtB>();
    test_product<T, 96, 64, AB, true>();
    // narrow and wide
    test_product<T, 16, 32, AB, false, true, 32, 32>();
    test_product<T, 32, 64, ABt, true>();
    test_product<T, 48, 48, AtBt>();
    test_product<T, 192, 64, AB>();
    test_product<T, 256, 64, AB>();
    test_product<T, 256, 64, ABt, true, false>();
    test_product<T, 64, 256, AtB>();
    test_product<T, 128, 64, AtB, false, true, 64, 64>();
}

// ---- two products in flight, the second without a fence of its own, and descriptors made once
__global__ void pipelined_kernel(float *out) {
    extern __shared__ int raw[];
    shared_allocator<1024> allocator(raw);
    st_bf<64, 128> &a = allocator.allocate<st_bf<64, 128>>();
    st_bf<128, 64> &b = allocator.allocate<st_bf<128, 64>>();
    fill(a, 1);
    fill(b, 2);
    ext::fence_shared_writes();
    __syncthreads();
    rt_fl<16, 64> c, d;
    c = 0.f;
    d = 0.f;
    st_descriptor<st_bf<64, 128>, 0> da(a);
    st_descriptor<st_bf<128, 64>, 1> db(b);
    warpgroup::mma_fence(c);
    warpgroup::mma_fence(d);
    warpgroup::mma_AB<rt_fl<16, 64>, decltype(da), decltype(db), 0, 0>(c, da, db);
    warpgroup::mma_AB<rt_fl<16, 64>, decltype(da), decltype(db), 0, 1>(d, da, db);
    warpgroup::mma_async_wait<1>();
    warpgroup::mma_fence(c);
    dump(out, c);
    warpgroup::mma_async_wait<0>();
    dump(out + 64 * 64, d);
}

// ---- tiles: shared <-> registers, subtiles, 16 and 32 bits, both layouts
template <typename T, typename R, int rows, int cols, int swizzle> __global__ void copy_kernel(float *out) {
    extern __shared__ int raw[];
    shared_allocator<1024> allocator(raw);
    using ST = st<T, rows, cols, true, swizzle>;
    ST &a = allocator.template allocate<ST>();
    ST &b = allocator.template allocate<ST>();
    fill(a, 1);
    __syncthreads();
    rt<R, rows / 4, cols> r;
    warpgroup::load(r, a);
    warpgroup::store(b, r);
    __syncthreads();
    for (int i = threadIdx.x; i < rows * cols; i += blockDim.x) out[i] = base_types::convertor<float, T>::convert(b[{i / cols, i % cols}]);
}
template <typename T, typename R, int rows, int cols, int swizzle = 0> static void test_copy() {
    Buffer out(rows * cols);
    launch(copy_kernel<T, R, rows, cols, swizzle>, 1, 128, out.device);
    char name[96];
    std::snprintf(name, sizeof name, "load+store %s tile %dx%d through %s swizzle %d", name_of<T>(), rows, cols, name_of<R>(), swizzle);
    report(name, max_error(out.host(), [](int i) { return (double)value(i, 1); }), 0);
}
__global__ void fragment_kernel(float *out) {  // the register order of a loaded tile, of a column-layout tile and of a subtile
    extern __shared__ int raw[];
    shared_allocator<1024> allocator(raw);
    st_bf<64, 64> &a = allocator.allocate<st_bf<64, 64>>();
    fill(a, 1);
    __syncthreads();
    rt_bf<16, 64> r;
    warpgroup::load(r, a);
    dump(out, r);
    if (warpid() == 0) {
        rt_bf<32, 32, ducks::rt_layout::col> c;
        auto part = a.subtile<32, 32>({1, 0});
        warp::load(c, part);
        for (int i = 0; i < 2; i++)
            for (int j = 0; j < 2; j++)
                for (int k = 0; k < 4; k++) {  // column layout: pairs run down the rows
                    const int row = 16 * i + 2 * (laneid() % 4) + 8 * (k >> 1), col = 16 * j + laneid() / 4 + 8 * (k & 1);
                    const float2 v = __bfloat1622float2(c.tiles[i][j].data[k]);
                    out[4096 + row * 32 + col] = v.x;
                    out[4096 + (row + 1) * 32 + col] = v.y;
                }
    }
}

// ---- elementwise operations, vectors and reductions
__global__ void elementwise_kernel(float *out) {
    extern __shared__ int raw[];
    shared_allocator<1024> allocator(raw);
    st_fl<64, 64> &a = allocator.allocate<st_fl<64, 64>>();
    sv_fl<64> &v = allocator.allocate<sv_fl<64>>();
    sv_fl<64> &sums = allocator.allocate<sv_fl<64>>();
    fill(a, 1);
    if (threadIdx.x < 64) v[threadIdx.x] = value(threadIdx.x, 5);
    __syncthreads();
    rt_fl<16, 64> x, y;
    rt_fl<16, 64>::col_vec per_row, total;
    rt_fl<16, 64>::row_vec per_col;
    warpgroup::load(x, a);
    warpgroup::load(per_row, v);
    warp::load(per_col, v);
    warp::mul_row(y, x, per_row);
    warp::add_col(y, y, per_col);
    warp::add(y, y, x);
    warp::mul(y, y, 2.f);
    warp::sub(y, y, 1.f);
    rt_bf<16, 64> low;
    warp::copy(low, x);
    rt_fl<16, 64> back;
    warp::copy(back, low);
    warp::sub(back, back, x);  // exact values: zero
    warp::add(y, y, back);
    dump(out, y);
    warp::row_sum(total, x);
    warpgroup::store(sums, total);
    __syncthreads();
    if (threadIdx.x < 64) out[4096 + threadIdx.x] = sums[threadIdx.x];
}

// ---- synchronisation and copies
__global__ void semaphore_kernel(float *in, float *out) {  // producer warp -> consumer warps, two phases, counted arrivals; named barrier
    extern __shared__ int raw[];
    shared_allocator<1024> allocator(raw);
    sv_fl<256> &data = allocator.allocate<sv_fl<256>>();
    __shared__ semaphore full, empty;
    if (threadIdx.x == 0) {
        init_semaphore(full, 0, 1);
        init_semaphore(empty, 3);
    }
    ext::fence_semaphore_init();
    __syncthreads();
    for (int it = 0; it < 6; it++) {
        if (warpid() == 3) {
            wait(empty, (it & 1) ^ 1);
            warp::tma::expect(full, data);
            warp::tma::load_async(data.data, in + 256 * it, 1024, full);
        } else {
            wait(full, it & 1);
            for (int i = threadIdx.x; i < 256; i += 96) out[256 * it + i] = data[i];
            __syncwarp();
            if (laneid() == 0) arrive(empty, 1);
        }
    }
    if (warpid() < 2) arrive_and_wait(barrier<2>(1));
    else if (warpid() == 2) {
        if (!test_wait(full, 1)) out[0] = NAN;
    }
}
template <typename T, int rows, int cols, int swizzle>
__global__ void tensor_kernel(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap out, float *check) {
    extern __shared__ int raw[];
    shared_allocator<1024> allocator(raw);
    using ST = st<T, rows, cols, true, swizzle>;
    ST &tile = allocator.template allocate<ST>();
    __shared__ semaphore full;
    constexpr int panel = swizzle / sizeof(T);
    if (threadIdx.x == 0) {
        init_semaphore(full, 0, 1);
        ext::fence_semaphore_init();
        kittens::tma::expect_bytes(full, sizeof(ST));
        for (int c = 0; c < cols; c += panel)
            ext::load_async(&tile.data[c * rows], &in, int2{c, 8}, full);  // the last 8 rows are out of bounds: zeros
    }
    __syncthreads();
    wait(full, 0);
    for (int i = threadIdx.x; i < rows * cols; i += blockDim.x)
        check[i] = base_types::convertor<float, T>::convert(tile[{i / cols, i % cols}]);
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int c = 0; c < cols; c += panel) ext::store_async(&out, &tile.data[c * rows], int2{c, 0});
        kittens::tma::store_commit_group();
        kittens::tma::store_async_wait();
    }
}
__global__ void reduce_kernel(float *sum, const __grid_constant__ CUtensorMap map) {
    __shared__ alignas(128) float part[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) part[i] = value(i, 7);
    ext::fence_shared_writes();
    __syncthreads();
    if (threadIdx.x == 0) {
        ext::reduce_add_async(sum, part, sizeof part);
        ext::store_add_async(&map, part, int2{0, 0});
        kittens::tma::store_commit_group();
        kittens::tma::store_async_read_wait();
        kittens::tma::store_async_wait();
    }
}
__global__ void __cluster_dims__(2, 1, 1)
    cluster_kernel(const __grid_constant__ CUtensorMap in, float *out) {  // each CTA loads half and multicasts it
    extern __shared__ int raw[];
    shared_allocator<1024> allocator(raw);
    st_bf<64, 128> &tile = allocator.allocate<st_bf<64, 128>>();
    __shared__ semaphore full, empty;
    const int rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        init_semaphore(full, 0, 1);
        init_semaphore(empty, 2);
        ext::fence_semaphore_init();
    }
    everyone::tma::cluster::sync();
    for (int it = 0; it < 4; it++) {
        if (threadIdx.x == 0) {
            wait(empty, (it & 1) ^ 1);
            kittens::tma::expect_bytes(full, sizeof tile);
            ext::multicast_async(&tile.data[rank * 64 * 64], &in, int2{64 * rank, 0}, full, 3);
        }
        wait(full, it & 1);
        for (int i = threadIdx.x; i < 64 * 128; i += blockDim.x) out[rank * 8192 + i] = __bfloat162float(tile[{i / 128, i % 128}]);
        __syncthreads();
        if (threadIdx.x < 2) ext::arrive_remote(empty, threadIdx.x);
    }
    everyone::tma::cluster::sync();
}
__global__ void __launch_bounds__(384, 1) roles_kernel(float *out) {  // register budgets of specialised warpgroups
    if (warpgroup::groupid() == 0) {
        warpgroup::decrease_registers<24>();
        out[threadIdx.x] = 1.f;
    } else {
        warpgroup::increase_registers<240>();
        out[threadIdx.x] = 2.f;
    }
}

using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                            const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);
static CUtensorMap tensor_map(void *p, CUtensorMapDataType type, int element, int cols, int rows, int box_cols, int box_rows, int swizzle) {
    void *entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    CHECK_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
    CUtensorMap map;
    const cuuint64_t size[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, stride[1] = {(cuuint64_t)cols * element};
    const cuuint32_t box[2] = {(cuuint32_t)box_cols, (cuuint32_t)box_rows}, step[2] = {1, 1};
    const CUresult status = ((Encode)entry)(&map, type, 2, p, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                            swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                            : swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                            : swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                            : CU_TENSOR_MAP_SWIZZLE_NONE,
                                            CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (status != CUDA_SUCCESS) {
        std::printf("cuTensorMapEncodeTiled: %d\n", (int)status);
        std::exit(2);
    }
    return map;
}
template <typename T> __global__ void fill_global(T *p, int n, int seed) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] = as<T>(value(i, seed));
}
template <typename T, int rows, int cols, int swizzle> static void test_tensor_map() {
    Buffer in(rows * cols), out(rows * cols), check(rows * cols);
    fill_global<<<1, 256>>>((T *)in.device, rows * cols, 1);
    const auto type = std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const CUtensorMap from = tensor_map(in.device, type, 2, cols, rows, swizzle / 2, rows, swizzle),
                      to = tensor_map(out.device, type, 2, cols, rows, swizzle / 2, rows, swizzle);
    launch(tensor_kernel<T, rows, cols, swizzle>, 1, 128, from, to, check.device);
    auto expected = [](int i) { return i / cols + 8 < rows ? (double)value(i + 8 * cols, 1) : 0.; };
    char name[96];
    std::snprintf(name, sizeof name, "tensor map load %s %dx%d swizzle %d", name_of<T>(), rows, cols, swizzle);
    report(name, max_error(check.host(), expected), 0);
    std::vector<T> stored(rows * cols);
    CHECK_CUDA(cudaMemcpy(stored.data(), out.device, rows * cols * 2, cudaMemcpyDeviceToHost));
    std::vector<float> values(rows * cols);
    for (int i = 0; i < rows * cols; i++) values[i] = (float)stored[i];
    std::snprintf(name, sizeof name, "tensor map store %s %dx%d swizzle %d", name_of<T>(), rows, cols, swizzle);
    report(name, max_error(values, expected), 0);
}

int main() {
    test_products<bf16>();
    test_products<half>();
    {
        Buffer out(2 * 4096);
        launch(pipelined_kernel, 1, 128, out.device);
        report("two products in flight",
               max_error(out.host(),
                         [](int i) {
                             double s = 0;
                             for (int k = 0; k < 128; k++) s += (double)value((i % 4096 / 64) * 128 + k, 1) * value(k * 64 + i % 64, 2);
                             return s;
                         }),
               1e-4);
    }
    test_copy<bf16, bf16, 64, 64>();
    test_copy<bf16, float, 64, 128>();
    test_copy<half, half, 64, 96>();
    test_copy<half, float, 128, 64, 32>();
    test_copy<bf16, float, 64, 48>();
    test_copy<float, float, 64, 64>();
    test_copy<float, float, 64, 96>();
    {
        Buffer out(4096 + 1024);
        launch(fragment_kernel, 1, 128, out.device);
        report("fragment order, column layout, subtile",
               max_error(out.host(),
                         [](int i) {
                             if (i < 4096) return (double)value(i, 1);
                             const int r = 32 + (i - 4096) / 32, c = (i - 4096) % 32;
                             return (double)value(r * 64 + c, 1);
                         }),
               0);
    }
    {
        Buffer out(4096 + 64);
        launch(elementwise_kernel, 1, 128, out.device);
        report("elementwise, vectors, row_sum",
               max_error(out.host(),
                         [](int i) {
                             if (i < 4096) return ((double)value(i, 1) * value(i / 64, 5) + value(i % 64, 5) + value(i, 1)) * 2 - 1;
                             double s = 0;
                             for (int c = 0; c < 64; c++) s += value((i - 4096) * 64 + c, 1);
                             return s;
                         }),
               1e-5);
    }
    {
        Buffer in(1536), out(1536);
        fill_global<<<1, 256>>>(in.device, 1536, 3);
        launch(semaphore_kernel, 1, 128, in.device, out.device);
        report("semaphores, linear load, named barrier", max_error(out.host(), [](int i) { return (double)value(i, 3); }), 0);
    }
    test_tensor_map<bf16, 64, 128, 128>();
    test_tensor_map<half, 64, 128, 128>();
    test_tensor_map<bf16, 64, 96, 64>();
    test_tensor_map<half, 64, 48, 32>();
    {
        Buffer sum(1024), tensor(1024);
        CHECK_CUDA(cudaMemset(sum.device, 0, 4096));
        CHECK_CUDA(cudaMemset(tensor.device, 0, 4096));
        launch(reduce_kernel, 5, 128, sum.device, tensor_map(tensor.device, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, 32, 32, 32, 32, 0));
        report("linear bulk reduction", max_error(sum.host(), [](int i) { return 5. * value(i, 7); }), 1e-6);
        report("tensor bulk reduction", max_error(tensor.host(), [](int i) { return 5. * value(i, 7); }), 1e-6);
    }
    {
        Buffer in(64 * 128), out(2 * 8192);
        fill_global<<<1, 256>>>((bf16 *)in.device, 8192, 1);
        launch(cluster_kernel, 2, 128, tensor_map(in.device, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, 128, 64, 64, 64, 128), out.device);
        report("cluster multicast, remote arrive", max_error(out.host(), [](int i) { return (double)value(i % 8192, 1); }), 0);
    }
    {
        Buffer out(384);
        launch(roles_kernel, 1, 384, out.device);
        report("register budgets of roles", max_error(out.host(), [](int i) { return i < 128 ? 1. : 2.; }), 0);
    }
    std::printf("%d failed\n", failures);
    return failures != 0;
}
