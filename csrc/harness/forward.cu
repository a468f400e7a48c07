// Launches the forward kernel on one shape without Python or PyTorch: checks it against a plain fp64 kernel and times it.
//
//   forward_harness [name=value ...]      T=4096 H=16 d_h=128 E=22 d_e=384 gate=r|ones|w dtype=bf16|fp16 launches=20 check=1
//
// Exit status: 0 correct, 1 wrong, 2 bad arguments or a CUDA error. With launches=1 check=0 it is what ncu and compute-sanitizer want.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "forward/launch.h"

namespace {

void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

__device__ float normal(uint64_t seed, uint64_t i) {  // splitmix64, then Box-Muller
    uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    const float a = ((z >> 40) + 1) * 0x1p-24f, b = (z & 0xFFFFFF) * 0x1p-24f;
    return sqrtf(-2.f * logf(a)) * cospif(2.f * b);
}
template <typename T> __global__ void fill_normal(T *x, int64_t n, float scale, uint64_t seed) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
        x[i] = T(scale * normal(seed, i));
}
__global__ void fill_weights(float *r, int64_t n, uint64_t seed) {  // in (0, 1)
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
        r[i] = 1.f / (1.f + expf(-normal(seed, i)));
}

struct Sizes {
    int64_t tokens;
    int heads, head_dim, subnets;
    int64_t subnet_dim;
};

// out[i, h, :] of token i * stride in fp64; one block for each (i, h).
template <typename T>
__global__ void reference(double *out, const T *q, const T *k, const T *u, const T *v, const float *r, const float *w, Sizes s,
                          int64_t stride) {
    extern __shared__ double shared[];
    double *acc = shared, *weight = shared + s.head_dim;
    const int64_t token = blockIdx.x * stride, head = blockIdx.y, row = token * s.heads + head;
    const int d = s.head_dim;
    for (int i = threadIdx.x; i < d; i += blockDim.x) acc[i] = 0;
    for (int e = threadIdx.x; e < s.subnets; e += blockDim.x) {
        double p = 0;
        if (w)
            for (int i = 0; i < d; ++i) p += double(float(q[row * d + i])) * w[(head * d + i) * s.subnets + e];
        weight[e] = w ? 1 / (1 + exp(-p)) : r ? r[row * s.subnets + e] : 1.0;
    }
    __syncthreads();
    double sum = 1;
    if (w) {
        sum = 1e-20;
        for (int e = 0; e < s.subnets; ++e) sum += weight[e];
    }
    for (int64_t j = threadIdx.x; j < s.subnets * s.subnet_dim; j += blockDim.x) {
        const int64_t at = (head * s.subnets * s.subnet_dim + j) * d;
        double m = 0, n = 0;
        for (int i = 0; i < d; ++i) {
            const double x = float(q[row * d + i]);
            m += x * double(float(k[at + i]));
            n += x * double(float(u[at + i]));
        }
        const double a = m / (1 + exp(-m)) * n * weight[j / s.subnet_dim] / sum;
        for (int i = 0; i < d; ++i) atomicAdd(&acc[i], a * double(float(v[at + i])));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < d; i += blockDim.x) out[(blockIdx.x * int64_t{gridDim.y} + head) * d + i] = acc[i];
}
template <typename T> __global__ void gather(double *out, const T *x, Sizes s, int64_t stride) {
    const int64_t row = blockIdx.x * stride * s.heads + blockIdx.y;
    for (int i = threadIdx.x; i < s.head_dim; i += blockDim.x)
        out[(blockIdx.x * int64_t{gridDim.y} + blockIdx.y) * s.head_dim + i] = double(float(x[row * s.head_dim + i]));
}

template <typename X> X *allocate(int64_t n) {
    void *p = nullptr;
    check(cudaMalloc(&p, (n > 0 ? n : 1) * sizeof(X)));
    return static_cast<X *>(p);
}

template <typename T> int run(const Sizes &s, const std::string &gate, int launches, bool verify) {
    const int64_t queries = s.tokens * s.heads * s.head_dim, weights = s.heads * s.subnets * s.subnet_dim * s.head_dim;
    T *q = allocate<T>(queries), *out = allocate<T>(queries), *k = allocate<T>(weights), *u = allocate<T>(weights),
      *v = allocate<T>(weights);
    float *r = allocate<float>(s.tokens * s.heads * s.subnets), *w = allocate<float>(int64_t{s.heads} * s.head_dim * s.subnets);
    const float scale = 1.f / std::sqrt(float(s.head_dim));
    fill_normal<<<1024, 256>>>(q, queries, 1.f, 1);
    fill_normal<<<1024, 256>>>(k, weights, scale, 2);
    fill_normal<<<1024, 256>>>(u, weights, scale, 3);
    fill_normal<<<1024, 256>>>(v, weights, 1.f / std::sqrt(float(s.subnets * s.subnet_dim)), 4);
    fill_weights<<<1024, 256>>>(r, s.tokens * s.heads * s.subnets, 5);
    fill_normal<<<64, 256>>>(w, int64_t{s.heads} * s.head_dim * s.subnets, scale, 6);
    check(cudaMemset(out, 0xFF, queries * sizeof(T)));  // NaN

    flashmhf::ForwardProblem problem{};
    problem.bf16 = std::is_same_v<T, __nv_bfloat16>;
    problem.shape = {1, s.tokens, s.heads, s.head_dim, s.subnets, s.subnet_dim};
    problem.q = q, problem.k = k, problem.u = u, problem.v = v, problem.out = out;
    problem.q_token = problem.out_token = int64_t{s.heads} * s.head_dim, problem.q_head = s.head_dim;
    problem.gate = gate == "ones" ? flashmhf::Gate::ones : gate == "w" ? flashmhf::Gate::w_float : flashmhf::Gate::r_float;
    problem.gate_data = gate == "ones" ? nullptr : gate == "w" ? w : r;
    problem.r_token = int64_t{s.heads} * s.subnets, problem.r_head = s.subnets;
    problem.eps = 1e-20f;

    flashmhf::Device device;
    check(flashmhf::describe_device(s.head_dim, &device));
    const flashmhf::ForwardPlan plan = flashmhf::plan_forward(problem.shape, device);
    const flashmhf::ForwardLaunch launch =
        flashmhf::prepare_forward(problem, plan, plan.partials ? allocate<float>(plan.workspace()) : nullptr);
    std::printf("clusters %d of %d CTAs, %d waves, %d items split over %d clusters, %.1f MB of partial sums, added by %s\n",
                plan.schedule.clusters, plan.cluster_size, plan.schedule.waves, plan.schedule.rest, plan.schedule.splits,
                plan.partials * 4e-6, plan.flags ? "forward" : "combine");

    std::vector<cudaEvent_t> events(launches + 1);
    for (auto &event : events) check(cudaEventCreate(&event));
    check(cudaEventRecord(events[0]));
    for (int i = 0; i < launches; ++i) {
        check(flashmhf::launch_forward(s.head_dim, launch, nullptr));
        check(cudaEventRecord(events[i + 1]));
    }
    check(cudaDeviceSynchronize());
    float best = 1e30f;
    for (int i = 0; i < launches; ++i) {
        float ms;
        check(cudaEventElapsedTime(&ms, events[i], events[i + 1]));
        best = ms < best ? ms : best;
    }
    const double operations = 6.0 * s.tokens * s.heads * s.head_dim * s.subnets * s.subnet_dim;
    std::printf("fastest of %d launches %.4f ms = %.0f TFLOP/s\n", launches, best, operations / best / 1e9);
    if (!verify || s.tokens == 0) return 0;

    const int64_t sampled = s.tokens < 256 ? s.tokens : 256, stride = s.tokens / sampled;
    double *expected = allocate<double>(sampled * s.heads * s.head_dim), *got = allocate<double>(sampled * s.heads * s.head_dim);
    const dim3 grid(sampled, s.heads);
    reference<<<grid, 256, (s.head_dim + s.subnets) * sizeof(double)>>>(expected, q, k, u, v, gate == "r" ? r : nullptr,
                                                                        gate == "w" ? w : nullptr, s, stride);
    gather<<<grid, 128>>>(got, out, s, stride);
    std::vector<double> a(sampled * s.heads * s.head_dim), b(a.size());
    check(cudaMemcpy(a.data(), expected, a.size() * sizeof(double), cudaMemcpyDeviceToHost));
    check(cudaMemcpy(b.data(), got, b.size() * sizeof(double), cudaMemcpyDeviceToHost));
    double error = 0, norm = 0;
    for (size_t i = 0; i < a.size(); ++i) error += (a[i] - b[i]) * (a[i] - b[i]), norm += a[i] * a[i];
    const double relative = std::sqrt(error / norm), limit = problem.bf16 ? 2.6e-3 : 3.5e-4;
    std::printf("relative L2 error %.2e of %lld tokens, limit %.1e: %s\n", relative, static_cast<long long>(sampled), limit,
                relative <= limit ? "ok" : "WRONG");
    return relative <= limit ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
    std::map<std::string, std::string> options = {{"T", "4096"}, {"H", "16"},       {"d_h", "128"},     {"E", "22"},   {"d_e", "384"},
                                                  {"gate", "r"}, {"dtype", "bf16"}, {"launches", "20"}, {"check", "1"}};
    for (int i = 1; i < argc; ++i) {
        const char *equals = std::strchr(argv[i], '=');
        const std::string name(argv[i], equals ? equals - argv[i] : std::strlen(argv[i]));
        if (!equals || !options.count(name)) {
            std::fprintf(stderr, "unknown argument %s; arguments: T= H= d_h= E= d_e= gate=r|ones|w dtype=bf16|fp16 launches= check=\n",
                         argv[i]);
            return 2;
        }
        options[name] = equals + 1;
    }
    try {
        auto number = [&](const char *name) { return std::stoll(options[name]); };
        const Sizes sizes{number("T"), static_cast<int>(number("H")), static_cast<int>(number("d_h")), static_cast<int>(number("E")),
                          number("d_e")};
        const int launches = static_cast<int>(number("launches"));
        return options["dtype"] == "fp16" ? run<__half>(sizes, options["gate"], launches, number("check"))
                                          : run<__nv_bfloat16>(sizes, options["gate"], launches, number("check"));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
}
