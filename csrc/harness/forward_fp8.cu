// Launches the FP8 forward kernel on one shape without Python or PyTorch: checks it against plain fp64 kernels and times it.
//
//   forward_fp8_harness [name=value ...]   T=4096 H=16 group=1 d_h=128 E=22 d_e=384 gate=r|ones|w|w16 dtype=bf16|fp16 signs=random|one
//   launches=20
//                                          check=1 repeat=0 chain=0
//   and the planner's costs, in tiles * d_h:   combine= behind_waves= next_item=   (0: split whatever it costs; large: never split)
//
// chain=N: also the time of a launch in a CUDA graph of launches that take N copies of the weights in turn, as layers do at decode.
//
// Two comparisons: with the definition on the weights before quantisation, and with sums in fp64 of the same quantised operands (Q, K, U,
// V and A in e4m3). signs=one: U = K and V >= 0, so that the terms of an output's sum have one sign. repeat: further launches whose outputs
// must be bitwise equal.
//
// Exit status: 0 correct, 1 wrong, 2 bad arguments or a CUDA error. With launches=1 check=0 it is what ncu and compute-sanitizer want.
#include <cuda_fp8.h>

#include "harness/forward.cuh"

namespace {

using namespace harness;
using flashmhf::Shape;

__device__ double of_fp8(__nv_fp8_storage_t x) { return double(__half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)))); }
__device__ __nv_fp8_storage_t to_fp8(double x) { return __nv_cvt_float_to_fp8(float(x), __NV_SATFINITE, __NV_E4M3); }

// Scale of sub-network blockIdx.x of x [.., d_e, d_h]: its root mean square, or more where a value or, for rows, a norm would be too large.
template <typename T> __global__ void scale_of(float *scale, const T *x, Shape s, bool rows) {
    __shared__ float squares, most;
    if (threadIdx.x == 0) squares = most = 0;
    __syncthreads();
    const T *at = x + blockIdx.x * s.subnet_dim * s.head_dim;
    for (int64_t row = threadIdx.x; row < s.subnet_dim; row += blockDim.x) {
        float sum = 0, largest = 0;
        for (int i = 0; i < s.head_dim; ++i) {
            const float v = float(at[row * s.head_dim + i]);
            sum += v * v;
            largest = fmaxf(largest, fabsf(v));
        }
        atomicAdd(&squares, sum);
        atomicMax(reinterpret_cast<int *>(&most), __float_as_int(fmaxf(largest / 448.f, rows ? sqrtf(sum) / 180.f : 0.f)));
    }
    __syncthreads();
    if (threadIdx.x == 0) scale[blockIdx.x] = fmaxf(sqrtf(squares / (s.subnet_dim * s.head_dim)), most);
}
__global__ void scale_of_head(float *scale, Shape s) {  // the largest of a head's sub-networks, for all of them
    float *at = scale + int64_t{threadIdx.x} * s.subnets, most = 0;
    for (int e = 0; e < s.subnets; ++e) most = fmaxf(most, at[e]);
    for (int e = 0; e < s.subnets; ++e) at[e] = most;
}
// Where column c lies in its block of 16.
__device__ int64_t place(int64_t c) { return c / 16 * 16 + c % 8 / 2 * 4 + c % 16 / 8 * 2 + c % 2; }
template <typename T> __global__ void quantise(__nv_fp8_storage_t *out, const T *x, const float *scale, Shape s, bool transposed) {
    const int64_t all = int64_t{s.heads / s.group} * s.subnets * s.subnet_dim * s.head_dim;
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < all; i += int64_t{gridDim.x} * blockDim.x) {
        const int64_t d = i % s.head_dim, j = i / s.head_dim % s.subnet_dim, subnet = i / s.head_dim / s.subnet_dim;
        const int64_t at = transposed ? d * s.subnet_dim + place(j) : j * s.head_dim + place(d);
        out[subnet * s.subnet_dim * s.head_dim + at] = to_fp8(float(x[i]) / scale[subnet]);
    }
}
// out of row blockIdx.x * stride of [T * H] in fp64, from the quantised operands.
template <typename T>
__global__ void quantised_reference(double *out, const T *q, const __nv_fp8_storage_t *k, const __nv_fp8_storage_t *u,
                                    const __nv_fp8_storage_t *v, const float *scales, const double *gate, Shape s, int64_t stride) {
    extern __shared__ double acc[];
    const int64_t row = blockIdx.x * stride, head = row % s.heads, plane = int64_t{s.heads / s.group} * s.subnets;
    const int d = s.head_dim;
    double *q8 = acc + d;
    double largest = flashmhf::smallest_query, squares = 0;
    for (int i = 0; i < d; ++i) {
        const double x = fabs(double(float(q[row * d + i])));
        largest = fmax(largest, x);
        squares += x * x;
    }
    const double unit = largest / (flashmhf::query_norm * exp2(floor(log2(largest / sqrt(fmax(squares, largest * largest))))));
    for (int i = threadIdx.x; i < d; i += blockDim.x) {
        acc[i] = 0;
        q8[i] = of_fp8(to_fp8(double(float(q[row * d + i])) / unit));
    }
    __syncthreads();
    for (int64_t j = threadIdx.x; j < s.subnets * s.subnet_dim; j += blockDim.x) {
        const int64_t e = j / s.subnet_dim, of_e = head / s.group * s.subnets + e, at = of_e * s.subnet_dim * d;
        double m = 0, n = 0;
        for (int i = 0; i < d; ++i) {
            const int64_t x = at + j % s.subnet_dim * d + place(i);
            m += q8[i] * of_fp8(k[x]);
            n += q8[i] * of_fp8(u[x]);
        }
        const double a = of_fp8(to_fp8(m * (1 + tanh(0.5 * unit * scales[of_e] * m)) * n));
        const double factor =
            0.5 * unit * unit * scales[of_e] * scales[plane + of_e] * scales[2 * plane + of_e] * gate[row * s.subnets + e];
        for (int i = 0; i < d; ++i) atomicAdd(&acc[i], factor * a * of_fp8(v[at + i * s.subnet_dim + place(j % s.subnet_dim)]));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < d; i += blockDim.x) out[blockIdx.x * int64_t{d} + i] = acc[i];
}

template <typename T> int run(const Arguments &options) {
    const bool one_sign = options.choice("signs", {"random", "one"}) == "one";
    const ForwardInputs<T> in(options, one_sign);
    const Shape &s = in.s;
    const Buffer<float> scales(3 * in.subnets);
    const Buffer<__nv_fp8_storage_t> k8(in.weights), u8(in.weights), v8(in.weights);
    scale_of<T><<<in.subnets, 128>>>(scales, in.k, s, true);
    scale_of_head<<<1, s.weight_heads()>>>(scales, s);
    scale_of<T><<<in.subnets, 128>>>(scales + in.subnets, in.u, s, true);
    scale_of<T><<<in.subnets, 128>>>(scales + 2 * in.subnets, in.v, s, false);
    quantise<T><<<1024, 256>>>(k8, in.k, scales, s, false);
    quantise<T><<<1024, 256>>>(u8, in.u, scales + in.subnets, s, false);
    quantise<T><<<1024, 256>>>(v8, in.v, scales + 2 * in.subnets, s, true);

    flashmhf::ForwardProblem problem{};
    in.describe(problem);
    problem.k = k8, problem.u = u8, problem.v = v8;
    problem.scales = scales;
    problem.format = flashmhf::WeightFormat::e4m3;
    bool ok = measure_forward(options, in, problem, {&k8, &u8, &v8});
    if (in.rows == 0) return 0;
    if (!options.number("check")) return ok ? 0 : 1;

    const auto [sampled, stride] = sample(in.rows, 2048, s.heads);
    const Buffer<double> gates(in.rows * s.subnets), sums(in.rows), expected(sampled * s.head_dim), quantised(sampled * s.head_dim),
        got(sampled * s.head_dim);
    in.gates(gates, sums);
    reference<T><<<sampled, 256, s.head_dim * sizeof(double)>>>(expected, in.q, in.k, in.u, in.v, gates, s, stride);
    quantised_reference<T><<<sampled, 256, 2 * s.head_dim * sizeof(double)>>>(quantised, in.q, k8, u8, v8, scales, gates, s, stride);
    gather_rows<T><<<sampled, 128>>>(got, in.out, s.head_dim, stride);
    const auto values = got.host(), exact = expected.host(), same_points = quantised.host();
    // Sums of few terms do not average out the rounding of the operands: these then have the larger error themselves.
    const double limit = std::max(one_sign ? 1.2e-2 : 7e-2, 1.05 * relative_l2(exact, same_points));
    ok = report("out against the definition", exact, values, limit) && ok;
    ok = report("out against the same quantised operands", same_points, values, 1.2e-2) && ok;
    report("these against the definition", exact, same_points, 7e-2);
    return ok ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
    return guarded([&] {
        const Arguments options = forward_arguments(argc, argv, {{"signs", "random"}});
        return run_typed(options, [&]<typename T>() { return run<T>(options); });
    });
}
