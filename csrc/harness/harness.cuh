// What the harnesses share: arguments name=value, device memory with random contents, timing, and the comparison with fp64.
//
// chain=N: also the time of a launch in a CUDA graph of launches that take N copies of the weights in turn, as layers do at decode.
// repeat: further launches whose outputs must be bitwise equal. Exit status: 0 correct, 1 wrong, 2 bad arguments or a CUDA error, with one
// line on stderr. With launches=1 check=0 a harness is what ncu and compute-sanitizer want.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <map>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "common/geometry.h"
#include "common/head_dims.h"
#include "common/problem.h"
#include "common/trace.cuh"

namespace harness {

inline void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

// name=value: of every harness on a shape, with what holds for a name that is not given.
constexpr const char *shape_arguments = "T=4096 H=16 group=1 d_h=128 E=22 d_e=384 gate=r dtype=bf16 launches=20 check=1 ";

// name=value for each name of `defaults`, which are of this form too; throws std::invalid_argument for any other.
class Arguments {
  public:
    Arguments(int argc, char **argv, const std::string &defaults) {
        std::istringstream words(defaults);
        for (std::string word; words >> word;) values_[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
        for (const std::string &word : std::vector<std::string>(argv + 1, argv + argc)) {
            const size_t equals = word.find('=');
            if (equals == std::string::npos || !values_.count(word.substr(0, equals)))
                throw std::invalid_argument("unknown argument " + word + "; arguments: " + defaults);
            values_[word.substr(0, equals)] = word.substr(equals + 1);
        }
    }
    int64_t number(const char *name) const {
        const std::string &text = values_.at(name);
        int64_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error != std::errc{} || end != text.data() + text.size())
            throw std::invalid_argument(std::string(name) + "=" + text + " is not a whole number");
        return value;
    }
    // What one of `choices` means.
    template <typename X> X choice(const char *name, std::initializer_list<std::pair<const char *, X>> choices) const {
        const std::string &text = values_.at(name);
        std::string all;
        for (const auto &[choice, meaning] : choices) {
            if (text == choice) return meaning;
            all += std::string(all.empty() ? "" : ", ") + choice;
        }
        throw std::invalid_argument(std::string(name) + "=" + text + "; supported: " + all);
    }

  private:
    std::map<std::string, std::string> values_;
};

template <typename Main> int guarded(Main &&main) {
    try {
        return main();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
}

// A harness's main(): run.operator()<T>(arguments) for the dtype asked for.
template <typename Run> int run_typed(int argc, char **argv, const std::string &defaults, Run &&run) {
    return guarded([&] {
        const Arguments options(argc, argv, defaults);
        return options.choice<bool>("dtype", {{"bf16", true}, {"fp16", false}}) ? run.template operator()<__nv_bfloat16>(options)
                                                                                : run.template operator()<__half>(options);
    });
}

inline flashmhf::Shape shape_of(const Arguments &options) {
    for (const char *name : {"T", "H", "E"})
        if (options.number(name) < 1) throw std::invalid_argument(std::string(name) + " must be at least 1");
    using HeadDims = flashmhf::ForwardHeadDims;
    if (!HeadDims::contains(options.number("d_h"))) throw std::invalid_argument("d_h must be one of " + HeadDims::names());
    if (options.number("group") < 1 || options.number("H") % options.number("group")) throw std::invalid_argument("group must divide H");
    if (options.number("d_e") < 16 || options.number("d_e") % 16) throw std::invalid_argument("d_e must be a multiple of 16");
    return {.batch = 1,
            .length = options.number("T"),
            .heads = static_cast<int>(options.number("H")),
            .head_dim = static_cast<int>(options.number("d_h")),
            .subnets = static_cast<int>(options.number("E")),
            .subnet_dim = options.number("d_e"),
            .group = static_cast<int>(options.number("group"))};
}
// Dense [T, H, width].
inline flashmhf::TokenTensor dense(const flashmhf::Shape &s, const void *data, int64_t width) {
    return {data, s.length * s.heads * width, s.heads * width, width};
}

__device__ inline float normal(uint64_t seed, uint64_t i) {  // splitmix64, then Box-Muller
    uint64_t z = seed + (i + 1) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    const float a = ((z >> 40) + 1) * 0x1p-24f, b = (z & 0xFFFFFF) * 0x1p-24f;
    return sqrtf(-2.f * logf(a)) * cospif(2.f * b);
}
enum class Values { normal, positive, gate };  // positive: absolute; gate: in (0, 1)
template <typename T> __global__ void fill(T *x, int64_t n, float scale, uint64_t seed, Values values) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
        const float v = scale * normal(seed, i);
        x[i] = T(values == Values::normal ? v : values == Values::positive ? fabsf(v) : 1.f / (1.f + expf(-v)));
    }
}

// Device memory that is freed with the object.
template <typename X> class Buffer {
  public:
    explicit Buffer(int64_t count) : count_(count) {
        void *data = nullptr;
        check(cudaMalloc(&data, std::max<int64_t>(count, 1) * sizeof(X)));
        data_ = static_cast<X *>(data);
        check(cudaMemset(data_, 0xFF, std::max<int64_t>(count, 1) * sizeof(X)));  // NaN
    }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { cudaFree(data_); }
    static Buffer random(int64_t count, float scale, uint64_t seed, Values values = Values::normal) {
        Buffer buffer(count);
        fill<<<1024, 256>>>(buffer.data_, count, scale, seed, values);
        return buffer;
    }
    Buffer(Buffer &&other) noexcept : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
    Buffer copy() const {
        Buffer other(count_);
        check(cudaMemcpy(other.data_, data_, count_ * sizeof(X), cudaMemcpyDeviceToDevice));
        return other;
    }
    operator X *() const { return data_; }
    int64_t size() const { return count_; }
    std::vector<X> host() const {
        std::vector<X> values(count_);
        check(cudaMemcpy(values.data(), data_, count_ * sizeof(X), cudaMemcpyDeviceToHost));
        return values;
    }

  private:
    X *data_;
    int64_t count_;
};

// Runs launch() `launches` times on the default stream and prints the fastest and the median time; operations of one launch.
template <typename Launch> void measure(int launches, double operations, Launch &&launch) {
    std::vector<cudaEvent_t> events(launches + 1);
    for (auto &event : events) check(cudaEventCreate(&event));
    check(cudaEventRecord(events[0]));
    for (int i = 0; i < launches; ++i) {
        check(launch());
        check(cudaEventRecord(events[i + 1]));
    }
    check(cudaDeviceSynchronize());
    std::vector<float> times(launches);
    for (int i = 0; i < launches; ++i) check(cudaEventElapsedTime(&times[i], events[i], events[i + 1]));
    for (auto &event : events) check(cudaEventDestroy(event));
    if (times.empty()) return;
    std::sort(times.begin(), times.end());
    std::printf("fastest of %d launches %.4f ms = %.0f TFLOP/s, median %.4f ms\n", launches, times[0], operations / times[0] / 1e9,
                times[launches / 2]);
}

// A CUDA graph of launches launch(i, stream), i = 0 .. sets - 1 in turn, on a stream of its own.
class Chain {
  public:
    template <typename Launch> Chain(int length, int64_t sets, Launch &&launch) : length_(length) {
        check(cudaStreamCreate(&stream_));
        check(cudaEventCreate(&begin_));
        check(cudaEventCreate(&end_));
        check(launch(int64_t{0}, stream_));  // loads the kernel
        cudaGraph_t graph;
        check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
        for (int64_t i = 0; i < length; ++i) check(launch(i % sets, stream_));
        check(cudaStreamEndCapture(stream_, &graph));
        check(cudaGraphInstantiate(&graph_, graph, 0));
    }
    void run() {
        check(cudaEventRecord(begin_, stream_));
        for (int i = 0; i < 2; ++i) check(cudaGraphLaunch(graph_, stream_));
        check(cudaEventRecord(end_, stream_));
        check(cudaStreamSynchronize(stream_));
        float time;
        check(cudaEventElapsedTime(&time, begin_, end_));
        fastest_us_ = std::min(fastest_us_, time * 1e3f / (2 * length_));
    }
    float fastest_us() const { return fastest_us_; }  // of a launch

  private:
    int length_;
    cudaStream_t stream_;
    cudaEvent_t begin_, end_;
    cudaGraphExec_t graph_;
    float fastest_us_ = std::numeric_limits<float>::infinity();
};

// Prints the fastest time of a launch in a chain of 40. Nothing without sets.
template <typename Launch> void measure_chain(int64_t sets, Launch &&launch) {
    if (sets == 0) return;
    Chain chain(40, sets, launch);
    for (int round = 0; round < 12; ++round) chain.run();
    std::printf("in a chain %.2f us a launch\n", chain.fastest_us());
}

// Prints what the stamps of the last launch say, in a build with FLASHMHF_TRACE: for each step of a warp from one stamp to its next one
// how often it occurs and the clocks that it takes. $FLASHMHF_TRACE_FILE gets every stamp. Nothing in other builds.
inline void print_trace() {
#ifdef FLASHMHF_TRACE
    using namespace flashmhf;
    const char *path = std::getenv("FLASHMHF_TRACE_FILE");
    std::FILE *file = path ? std::fopen(path, "w") : nullptr;
    if (path && !file) throw std::runtime_error(std::string("cannot write ") + path);
    if (file) std::fprintf(file, "cta,warp,stamp,round,time_ns,clock\n");
    std::map<std::pair<int, int>, std::vector<double>> steps;
    std::vector<TraceRecord> all(sizeof(TraceStamps) / sizeof(TraceRecord));
    for (const auto &read : trace_readers()) {
        check(read(all.data()));
        for (int warp = 0; warp < trace_ctas * trace_warps; ++warp) {
            std::vector<std::pair<uint64_t, int>> events;
            for (int i = 0; i < stamp_count * trace_rounds; ++i) {
                const TraceRecord &x = all[warp * stamp_count * trace_rounds + i];
                if (x.time == 0) continue;
                events.emplace_back(x.clock, i / trace_rounds);
                if (file)
                    std::fprintf(file, "%d,%d,%s,%d,%llu,%llu\n", warp / trace_warps, warp % trace_warps, stamp_names[i / trace_rounds],
                                 i % trace_rounds, (unsigned long long)x.time, (unsigned long long)x.clock);
            }
            std::sort(events.begin(), events.end());
            for (size_t i = 1; i < events.size(); ++i)
                steps[{events[i - 1].second, events[i].second}].push_back(double(events[i].first - events[i - 1].first));
        }
    }
    if (file) std::fclose(file);
    for (auto &[step, clocks] : steps) {
        std::sort(clocks.begin(), clocks.end());
        std::printf("%-22s to %-22s %6zu times, clocks: least %8.0f, median %8.0f, most %8.0f\n", stamp_names[step.first],
                    stamp_names[step.second], clocks.size(), clocks.front(), clocks[clocks.size() / 2], clocks.back());
    }
#endif
}

inline double relative_l2(const std::vector<double> &expected, const std::vector<double> &got) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
        error += (expected[i] - got[i]) * (expected[i] - got[i]);
        norm += expected[i] * expected[i];
    }
    return std::sqrt(error / norm);
}

// What the rounding of results in T allows.
template <typename T> constexpr double rounding_limit = std::is_same_v<T, __nv_bfloat16> ? 2.6e-3 : 3.5e-4;

// Prints the relative L2 error; whether it is within the limit.
inline bool report(const char *what, const std::vector<double> &expected, const std::vector<double> &got, double limit) {
    const double relative = relative_l2(expected, got);
    const bool ok = relative <= limit;
    std::printf("%-4s relative L2 error %.2e of %zu values, limit %.1e: %s\n", what, relative, expected.size(), limit, ok ? "ok" : "WRONG");
    return ok;
}

// Whether so many further launches give `out` the bits that it has.
template <typename T, typename Launch> bool repeats_bits(const Buffer<T> &out, int64_t times, Launch &&launch) {
    if (times == 0) return true;
    const std::vector<T> first = out.host();
    int64_t different = 0;
    for (int64_t i = 0; i < times; ++i) {
        check(cudaMemset(out, 0xFF, out.size() * sizeof(T)));
        check(launch());
        different += std::memcmp(first.data(), out.host().data(), first.size() * sizeof(T)) != 0;
    }
    std::printf("%lld of %lld further launches gave other bits\n", (long long)different, (long long)times);
    return different == 0;
}

// How many of `all` rows to compare, and how far apart they lie: a distance that no head is left out at.
inline std::pair<int64_t, int64_t> sample(int64_t all, int64_t most, int heads) {
    int64_t stride = std::max<int64_t>(1, all / std::max<int64_t>(1, most));
    while (std::gcd(stride, int64_t{heads}) > 1) --stride;
    return {std::min(all, most), stride};
}

// The gate in fp64: r [T, H, E] from R, from the router's W (with the sum of the sigmoids + eps in sums [T, H]), or ones.
constexpr float router_eps = 1e-20f;
template <typename T, typename W>
__global__ void gate_values(double *gate, double *sums, const T *q, const float *r, const W *w, flashmhf::Gate kind, flashmhf::Shape s) {
    const int64_t row = blockIdx.x * int64_t{blockDim.x} + threadIdx.x, head = row % s.heads;
    if (row >= s.length * s.heads) return;
    const bool router = has_router(kind);
    double sum = router_eps;
    for (int e = 0; e < s.subnets; ++e) {
        double p = 0;
        if (router)
            for (int i = 0; i < s.head_dim; ++i)
                p += double(float(q[row * s.head_dim + i])) * double(float(w[(head * s.head_dim + i) * s.subnets + e]));
        gate[row * s.subnets + e] = router ? 1 / (1 + exp(-p)) : gate_is_given(kind) ? r[row * s.subnets + e] : 1.0;
        sum += gate[row * s.subnets + e];
    }
    sums[row] = router ? sum : 1.0;
    for (int e = 0; e < s.subnets; ++e) gate[row * s.subnets + e] /= sums[row];
}

// Random operands of a call. one_sign: U = K and V >= 0, so that the terms of an output's sum have one sign.
template <typename T> struct Inputs {
    flashmhf::Shape s;
    flashmhf::Gate gate;
    int64_t rows, inter;   // of Q; of K
    float scale, scale_v;  // root mean square of K, U and W, and of V
    Buffer<T> q, k, u, v;
    Buffer<float> r, w;
    Buffer<T> w16;

    explicit Inputs(const Arguments &options, bool one_sign = false)
        : s(shape_of(options)),
          gate(options.choice<flashmhf::Gate>("gate", {{"r", flashmhf::Gate::r_float},
                                                       {"ones", flashmhf::Gate::ones},
                                                       {"w", flashmhf::Gate::w_float},
                                                       {"w16", flashmhf::Gate::w_half}})),
          rows(s.length * s.heads),
          inter(s.weight_heads() * s.subnets * s.subnet_dim),
          scale(1.f / std::sqrt(float(s.head_dim))),
          scale_v(1.f / std::sqrt(float(s.subnets * s.subnet_dim))),
          q(Buffer<T>::random(rows * s.head_dim, 1.f, 1)),
          k(Buffer<T>::random(inter * s.head_dim, scale, 2)),
          u(Buffer<T>::random(inter * s.head_dim, scale, one_sign ? 2 : 3)),
          v(Buffer<T>::random(inter * s.head_dim, scale_v, 4, one_sign ? Values::positive : Values::normal)),
          r(Buffer<float>::random(rows * s.subnets, 1.f, 5, Values::gate)),
          w(Buffer<float>::random(int64_t{s.heads} * s.head_dim * s.subnets, scale, 6)),
          w16(Buffer<T>::random(w.size(), scale, 6)) {}

    // Of the call with these K, U and V.
    flashmhf::Operands operands(const void *k, const void *u, const void *v) const {
        const void *router = gate == flashmhf::Gate::w_half ? static_cast<const void *>(w16) : w;
        return {.bf16 = std::is_same_v<T, __nv_bfloat16>,
                .shape = s,
                .q = dense(s, q, s.head_dim),
                .k = k,
                .u = u,
                .v = v,
                .gate = gate,
                .r = dense(s, r, s.subnets),
                .w = router,
                .eps = router_eps,
                .dense = {s.length, 1}};
    }
    void gates(double *values, double *sums) const {
        const int64_t blocks = (rows + 127) / 128;
        if (gate == flashmhf::Gate::w_half) gate_values<T, T><<<blocks, 128>>>(values, sums, q, r, w16, gate, s);
        else gate_values<T, float><<<blocks, 128>>>(values, sums, q, r, w, gate, s);
    }
};

template <typename X> __global__ void gather_rows(double *out, const X *x, int64_t width, int64_t stride) {
    for (int64_t i = threadIdx.x; i < width; i += blockDim.x)
        out[blockIdx.x * width + i] = double(float(x[blockIdx.x * stride * width + i]));
}
// Rows 0, stride, ... of x [.., width], so many, on the host.
template <typename X> std::vector<double> rows_of(const Buffer<X> &x, int64_t count, int64_t width, int64_t stride) {
    const Buffer<double> rows(count * width);
    gather_rows<X><<<count, 128>>>(rows, x, width, stride);
    return rows.host();
}
// A block's `width` sums in fp64 over `count` elements: add(j, sums) adds the terms of element j to sums in shared memory, by atomicAdd, and
// put(i, sum) writes sum i. A thread begins with another column than its neighbours, so that they do not meet at a sum.
template <typename Add, typename Put> __device__ void sum_over(int64_t count, int width, Add &&add, Put &&put) {
    extern __shared__ double sums[];
    for (int i = threadIdx.x; i < width; i += blockDim.x) sums[i] = 0;
    __syncthreads();
    for (int64_t j = threadIdx.x; j < count; j += blockDim.x) add(j, sums);
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += blockDim.x) put(i, sums[i]);
}
template <typename Body> __device__ void each_column(int d_h, Body &&body) {
    for (int i = 0; i < d_h; ++i) body((i + threadIdx.x) % d_h);
}

}  // namespace harness
