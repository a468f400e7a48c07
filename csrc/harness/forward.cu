// Launches the forward kernel on one shape without Python or PyTorch: checks it against a plain fp64 kernel and times it.
//
//   forward_harness [name=value ...]      T=4096 H=16 group=1 d_h=128 E=22 d_e=384 gate=r|ones|w dtype=bf16|fp16 launches=20 check=1
//   and the planner's costs, in tiles * d_h:   combine= behind_waves= next_item=   (0: split whatever it costs; large: never split)
//
// Exit status: 0 correct, 1 wrong, 2 bad arguments or a CUDA error. With launches=1 check=0 it is what ncu and compute-sanitizer want.
#include "forward/launch.h"
#include "harness/harness.cuh"

namespace {

using namespace harness;
using flashmhf::Shape;

// out of row blockIdx.x * stride of [T * H] in fp64.
template <typename T>
__global__ void reference(double *out, const T *q, const T *k, const T *u, const T *v, const double *gate, Shape s, int64_t stride) {
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

template <typename T> int run(const Arguments &options) {
    const Shape s = shape_of(options);
    const flashmhf::Gate gate = gate_of(options);
    const int64_t rows = s.length * s.heads, weights = s.weight_heads() * s.subnets * s.subnet_dim * s.head_dim;
    const float scale = 1.f / std::sqrt(float(s.head_dim));
    const auto q = Buffer<T>::random(rows * s.head_dim, 1.f, 1), k = Buffer<T>::random(weights, scale, 2),
               u = Buffer<T>::random(weights, scale, 3),
               v = Buffer<T>::random(weights, 1.f / std::sqrt(float(s.subnets * s.subnet_dim)), 4);
    const auto w = Buffer<float>::random(int64_t{s.heads} * s.head_dim * s.subnets, scale, 6);
    const Buffer<float> r(rows * s.subnets);
    fill_gate<<<1024, 256>>>(static_cast<float *>(r), r.size(), 5);
    const Buffer<T> out(rows * s.head_dim);

    const flashmhf::ForwardProblem problem{
        .bf16 = std::is_same_v<T, __nv_bfloat16>,
        .shape = s,
        .q = dense(s, q, s.head_dim),
        .k = k,
        .u = u,
        .v = v,
        .gate = gate,
        .r = dense(s, r, s.subnets),
        .w = w,
        .eps = 1e-20f,
        .out = out,
        .dense = {s.length, 1},
    };
    flashmhf::ForwardCostModel cost;
    auto override_cost = [&](const char *name, int &value) {
        if (options.given(name)) value = static_cast<int>(options.number(name));
    };
    override_cost("combine", cost.combine);
    override_cost("behind_waves", cost.behind_waves);
    override_cost("next_item", cost.next_item);
    flashmhf::Device device;
    check(flashmhf::describe_device(s.head_dim, &device));
    const flashmhf::ForwardPlan plan = flashmhf::plan_forward(s, device, may_bundle(problem), cost);
    const Buffer<float> workspace(plan.workspace());
    const flashmhf::ForwardLaunch launch = flashmhf::prepare_forward(problem, plan, workspace);
    const flashmhf::ForwardSchedule &schedule = plan.schedule;
    std::printf(
        "heads of a row tile %d, clusters %d x %d of %d CTAs, slices %d, waves %d, inter tiles %d, items %d split over %d clusters, %.1f "
        "MB of "
        "partial sums, added by "
        "%s\n",
        plan.bundle, schedule.lanes, schedule.clusters, plan.cluster_size, schedule.slices, schedule.waves, schedule.inter_tiles,
        schedule.rest, schedule.splits, plan.partials * 4e-6,
        plan.flags      ? "forward"
        : plan.partials ? "combine"
                        : "nobody");
    measure(static_cast<int>(options.number("launches")), 6.0 * rows * s.head_dim * s.subnets * s.subnet_dim,
            [&] { return flashmhf::launch_forward(s.head_dim, launch, nullptr); });
    if (!options.number("check") || rows == 0) return 0;

    const auto [sampled, stride] = sample(rows, 4096, s.heads);
    const Buffer<double> gates(rows * s.subnets), sums(rows), expected(sampled * s.head_dim), got(sampled * s.head_dim);
    gate_values<T><<<(rows + 127) / 128, 128>>>(gates, sums, q, gate_is_given(gate) ? static_cast<const float *>(r) : nullptr,
                                                has_router(gate) ? static_cast<const float *>(w) : nullptr, 1e-20, s);
    reference<T><<<sampled, 256, s.head_dim * sizeof(double)>>>(expected, q, k, u, v, gates, s, stride);
    gather_rows<T><<<sampled, 128>>>(got, out, s.head_dim, stride);
    return report("out", expected.host(), got.host(), problem.bf16 ? 2.6e-3 : 3.5e-4) ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
    return guarded([&] {
        const Arguments options(argc, argv,
                                {{"T", "4096"},
                                 {"H", "16"},
                                 {"group", "1"},
                                 {"d_h", "128"},
                                 {"E", "22"},
                                 {"d_e", "384"},
                                 {"gate", "r"},
                                 {"dtype", "bf16"},
                                 {"launches", "20"},
                                 {"check", "1"},
                                 {"combine", ""},
                                 {"behind_waves", ""},
                                 {"next_item", ""}});
        return options.choice("dtype", {"bf16", "fp16"}) == "fp16" ? run<__half>(options) : run<__nv_bfloat16>(options);
    });
}
