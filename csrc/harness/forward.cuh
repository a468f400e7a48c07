// What the harnesses of the forward in 16 bits and in FP8 share: arguments, inputs, the definition in fp64, timing.
#pragma once

#include "common/driver.h"
#include "forward/launch.h"
#include "harness/harness.cuh"

namespace harness {

// Arguments of both, with their defaults; `more` are those of one.
inline Arguments forward_arguments(int argc, char **argv, std::map<std::string, std::string> more = {}) {
    more.merge(std::map<std::string, std::string>{{"T", "4096"},
                                                  {"H", "16"},
                                                  {"group", "1"},
                                                  {"d_h", "128"},
                                                  {"E", "22"},
                                                  {"d_e", "384"},
                                                  {"gate", "r"},
                                                  {"dtype", "bf16"},
                                                  {"launches", "20"},
                                                  {"chain", "0"},
                                                  {"check", "1"},
                                                  {"repeat", "0"},
                                                  {"combine", ""},
                                                  {"behind_waves", ""},
                                                  {"next_item", ""}});
    return Arguments(argc, argv, std::move(more));
}
// The planner's costs as given on the command line.
inline flashmhf::ForwardCostModel costs_of(const Arguments &options, flashmhf::ForwardCostModel cost) {
    auto override_cost = [&](const char *name, int &value) {
        if (options.given(name)) value = static_cast<int>(options.number(name));
    };
    override_cost("combine", cost.combine);
    override_cost("behind_waves", cost.behind_waves);
    override_cost("next_item", cost.next_item);
    return cost;
}

template <typename T> __global__ void absolute(T *x, int64_t n) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
        x[i] = T(fabsf(float(x[i])));
}

// x, rounded, in both.
template <typename T> __global__ void round_values(T *rounded, float *x, int64_t n) {
    for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
        x[i] = float(rounded[i] = T(x[i]));
}

// Random inputs of a forward, and its output. one_sign: U = K and V >= 0, so that the terms of an output's sum have one sign.
template <typename T> struct ForwardInputs {
    flashmhf::Shape s;
    flashmhf::Gate gate;
    int64_t rows, weights, subnets;  // rows of Q; elements of K; sub-networks of all heads of K
    Buffer<T> q, k, u, v, out;
    Buffer<float> w, r;
    Buffer<T> w16;

    explicit ForwardInputs(const Arguments &options, bool one_sign = false)
        : s(shape_of(options)),
          gate(gate_of(options, {"r", "ones", "w", "w16"})),
          rows(s.length * s.heads),
          weights(s.weight_heads() * s.subnets * s.subnet_dim * s.head_dim),
          subnets(s.weight_heads() * s.subnets),
          q(Buffer<T>::random(rows * s.head_dim, 1.f, 1)),
          k(Buffer<T>::random(weights, scale(), 2)),
          u(Buffer<T>::random(weights, scale(), one_sign ? 2 : 3)),
          v(Buffer<T>::random(weights, 1.f / std::sqrt(float(s.subnets * s.subnet_dim)), 4)),
          out(rows * s.head_dim),
          w(Buffer<float>::random(int64_t{s.heads} * s.head_dim * s.subnets, scale(), 6)),
          r(rows * s.subnets),
          w16(w.size()) {
        if (gate == flashmhf::Gate::w_half) round_values<T><<<64, 256>>>(w16, w, w.size());
        if (one_sign) absolute<T><<<1024, 256>>>(v, weights);
        fill_gate<<<1024, 256>>>(static_cast<float *>(r), r.size(), 5);
    }
    // Everything but the weights.
    void describe(flashmhf::ForwardProblem &problem) const {
        problem.bf16 = std::is_same_v<T, __nv_bfloat16>;
        problem.shape = s;
        problem.q = dense(s, q, s.head_dim);
        problem.gate = gate;
        problem.r = dense(s, r, s.subnets);
        if (gate == flashmhf::Gate::w_half) problem.w = w16;
        else problem.w = w;
        problem.eps = 1e-20f;
        problem.out = out;
        problem.dense = {s.length, 1};
    }
    // R [T, H, E] in fp64.
    void gates(double *values, double *sums) const {
        gate_values<T><<<(rows + 127) / 128, 128>>>(values, sums, q, gate_is_given(gate) ? static_cast<const float *>(r) : nullptr,
                                                    has_router(gate) ? static_cast<const float *>(w) : nullptr, 1e-20, s);
    }

  private:
    float scale() const { return 1.f / std::sqrt(float(s.head_dim)); }
};

inline void print_plan(const flashmhf::ForwardPlan &plan) {
    const flashmhf::ForwardSchedule &schedule = plan.schedule;
    std::printf(
        "row tiles of a CTA %d, heads of a row tile %d, clusters %d x %d of %d CTAs, slices %d, waves %d, inter tiles %d, items %d split "
        "over %d clusters, %.1f MB of partial sums, added by %s\n",
        plan.consumers, plan.bundle, schedule.lanes, schedule.clusters, plan.cluster_size, schedule.slices, schedule.waves,
        schedule.inter_tiles, schedule.rest, schedule.splits, plan.partials * 4e-6,
        plan.flags      ? "forward"
        : plan.partials ? "combine"
                        : "nobody");
}

// Plans and times the problem, alone and in a chain of launches that take copies of its weights in turn. Whether `repeat` further launches
// gave equal bits. The output is that of the problem's own weights.
template <typename T, typename W>
bool measure_forward(const Arguments &options, const ForwardInputs<T> &in, flashmhf::ForwardProblem problem,
                     std::initializer_list<const Buffer<W> *> weights) {
    const flashmhf::Shape &s = in.s;
    flashmhf::Device device;
    check(flashmhf::describe_device(&device));
    const flashmhf::ForwardPlan plan =
        flashmhf::plan_forward(s, device, problem.format, may_bundle(problem), costs_of(options, flashmhf::forward_costs(problem.format)));
    const Buffer<float> workspace(flashmhf::workspace_of(problem, plan));
    const flashmhf::ForwardLaunch launch = flashmhf::prepare_forward(problem, plan, workspace);
    print_plan(plan);
    auto once = [&] { return flashmhf::launch_forward(s.head_dim, launch, nullptr); };
    measure(static_cast<int>(options.number("launches")), 6.0 * in.rows * s.head_dim * s.subnets * s.subnet_dim, once);
    const Copies<W> copies(options.number("chain"), weights);
    std::vector<flashmhf::ForwardLaunch> launches;
    for (int64_t i = 0; i < copies.sets; ++i) {
        problem.k = copies(i, 0), problem.u = copies(i, 1), problem.v = copies(i, 2);
        launches.push_back(flashmhf::prepare_forward(problem, plan, workspace));
    }
    measure_chain(copies.sets, [&](int64_t i, cudaStream_t stream) { return flashmhf::launch_forward(s.head_dim, launches[i], stream); });
    print_trace();
    return in.rows == 0 || repeats_bits(in.out, options.number("repeat"), once);
}

// out of row blockIdx.x * stride of [T * H] in fp64.
template <typename T>
__global__ void reference(double *out, const T *q, const T *k, const T *u, const T *v, const double *gate, flashmhf::Shape s,
                          int64_t stride) {
    extern __shared__ double acc[];
    const int64_t row = blockIdx.x * stride, head = row % s.heads;
    const int d = s.head_dim;
    for (int i = threadIdx.x; i < d; i += blockDim.x) acc[i] = 0;
    __syncthreads();
    for (int64_t j = threadIdx.x; j < s.subnets * s.subnet_dim; j += blockDim.x) {
        const int64_t at = (head / s.group * s.subnets * s.subnet_dim + j) * d;
        double m = 0, n = 0;
        for (int i = 0; i < d; ++i) {
            const double x = float(q[row * d + i]);
            m += x * double(float(k[at + i]));
            n += x * double(float(u[at + i]));
        }
        const double a = m / (1 + exp(-m)) * n * gate[row * s.subnets + j / s.subnet_dim];
        for (int i = 0; i < d; ++i) atomicAdd(&acc[i], a * double(float(v[at + i])));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < d; i += blockDim.x) out[blockIdx.x * int64_t{d} + i] = acc[i];
}

}  // namespace harness
