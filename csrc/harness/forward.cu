// Launches the forward kernel on one shape without Python or PyTorch: checks it against plain fp64 kernels and times it.
//
//   forward_harness [name=value ...]      format=f16|e4m3 T=4096 H=16 group=1 d_h=128 E=22 d_e=384 gate=r|ones|w|w16 dtype=bf16|fp16
//                                        signs=random|one launches=20 check=1 repeat=0 chain=0
//   and, instead of what the planner chooses,   slices= row_ctas=1|2 consumers= abreast=   (slices=1: none; abreast=2: all blocks of a head)
//   or plans=1: times every such plan in turn, and prints a line of JSON for each
//
// format=e4m3: two comparisons, with the definition on the weights before quantisation, and with sums in fp64 of the same quantised operands
// (Q, K, U, V and A in e4m3). signs=one: U = K and V >= 0, so that the terms of an output's sum have one sign.
#include <cuda_fp8.h>

#include "common/device.h"
#include "forward/launch.h"
#include "harness/harness.cuh"

namespace {

using namespace flashmhf;
using namespace harness;

ForwardChoice choice_of(const Arguments &options) {
    auto number = [&](const char *name) { return static_cast<int>(options.number(name)); };
    const ForwardChoice choice{number("slices"), number("row_ctas"), number("consumers"), number("abreast")};
    if (choice.row_ctas < 0 || choice.row_ctas > 2) throw std::invalid_argument("row_ctas must be 1 or 2");
    return choice;
}

bool one_sign(const Arguments &options) { return options.choice<bool>("signs", {{"random", false}, {"one", true}}); }

void print_plan(const ForwardPlan &plan) {
    const ForwardSchedule &schedule = plan.schedule;
    std::printf(
        "division %s, row tiles of a CTA %d, heads of a row tile %d, blocks of a head side by side %d, clusters %d of %d CTAs, slices %d, "
        "waves %d, "
        "inter tiles %d, items %d split over %d clusters, %.1f MB of partial sums, added by %s\n",
        division_names[static_cast<int>(schedule.division())], plan.consumers, plan.bundle, schedule.abreast,
        schedule.clusters * schedule.abreast, plan.cluster_size, schedule.slices, schedule.waves, schedule.inter_tiles,
        schedule.rest * schedule.abreast, schedule.splits * schedule.abreast, plan.partials * 4e-6,
        plan.flags      ? "forward"
        : plan.partials ? "combine"
                        : "nobody");
}

// Times the planner's plan and every other that can be forced, each in a chain of prepare(plan, workspace), round by round.
template <typename Prepare> void compare_plans(const ForwardProblem &problem, const Device &device, Prepare &&prepare) {
    struct Timed {
        ForwardPlan plan;
        Chain chain;
    };
    auto key = [](const ForwardPlan &p) {
        return std::tuple(p.consumers, p.row_ctas, p.schedule.slices, p.schedule.abreast, p.schedule.splits, p.schedule.clusters);
    };
    std::vector<Timed> all;
    std::vector<Buffer<float>> workspaces;
    auto add = [&](const ForwardChoice &choice) {
        const ForwardCostModel cost = forward_costs(problem.format);
        const ForwardPlan plan = plan_forward(problem.shape, device, problem.format, may_bundle(problem), cost, choice);
        for (const Timed &other : all)
            if (key(plan) == key(other.plan)) return;
        workspaces.emplace_back(workspace_of(problem, plan));
        const std::vector<ForwardLaunch> launches = prepare(plan, static_cast<float *>(workspaces.back()));
        auto launch = [&](int64_t i, cudaStream_t stream) { return launch_forward(problem.shape.head_dim, launches[i], stream); };
        all.push_back({plan, Chain(20, launches.size(), launch)});
    };
    add({});
    for (int consumers : {1, 2, 3, 4})
        for (int slices : {1, 2, 3, 4, 5, 6, 7, 8, 16})
            for (int row_ctas : {1, 2})
                for (int abreast : {1, 2}) try {
                        if (slices == 1 || (row_ctas == 1 && abreast == 1)) add({slices, row_ctas, consumers, abreast});
                    } catch (const std::invalid_argument &) {
                    }  // no such plan
    for (int round = 0; round < 8; ++round)
        for (Timed &timed : all) timed.chain.run();
    for (const Timed &x : all) {
        const ForwardSchedule &s = x.plan.schedule;
        std::printf(
            "{\"taken\": %s, \"slices\": %d, \"row_ctas\": %d, \"consumers\": %d, \"abreast\": %d, \"bundle\": %d, \"waves\": %d, "
            "\"split\": %s, \"us\": %.2f}\n",
            &x == &all[0] ? "true" : "false", s.slices, x.plan.row_ctas, x.plan.consumers, s.abreast, x.plan.bundle, s.waves,
            s.splits > s.rest ? "true" : "false", x.chain.fastest_us());
    }
}

// Plans and times the problem, alone and in a chain of launches that take copies of its weights in turn. Whether `repeat` further launches
// gave equal bits. The output is that of the problem's own weights.
template <typename T, typename W>
bool measure_forward(const Arguments &options, const Inputs<T> &in, const Buffer<T> &out, const ForwardProblem &problem,
                     std::initializer_list<const Buffer<W> *> weights) {
    const Shape &s = in.s;
    const Device device = describe_device();
    const ForwardPlan plan =
        plan_forward(s, device, problem.format, may_bundle(problem), forward_costs(problem.format), choice_of(options));
    const Buffer<float> workspace(workspace_of(problem, plan));
    const ForwardLaunch launch = prepare_forward(problem, plan, workspace);
    print_plan(plan);
    auto once = [&] { return launch_forward(s.head_dim, launch, nullptr); };
    measure(static_cast<int>(options.number("launches")), 6.0 * in.rows * s.head_dim * s.subnets * s.subnet_dim, once);
    std::vector<Buffer<W>> copies;
    for (int64_t i = 0; i < options.number("chain"); ++i)
        for (const Buffer<W> *tensor : weights) copies.push_back(tensor->copy());
    auto prepare = [&](const ForwardPlan &plan, float *workspace) {  // for each copy of the weights
        std::vector<ForwardLaunch> launches;
        ForwardProblem of_copy = problem;
        for (size_t i = 0; i < copies.size(); i += 3) {
            of_copy.k = copies[i];
            of_copy.u = copies[i + 1];
            of_copy.v = copies[i + 2];
            launches.push_back(prepare_forward(of_copy, plan, workspace));
        }
        return launches;
    };
    if (options.number("plans")) {
        if (copies.empty()) throw std::invalid_argument("plans=1 needs chain=1 or more");
        compare_plans(problem, device, prepare);
        return true;
    }
    const std::vector<ForwardLaunch> launches = prepare(plan, workspace);
    measure_chain(launches.size(), [&](int64_t i, cudaStream_t stream) { return launch_forward(s.head_dim, launches[i], stream); });
    print_trace();
    return repeats_bits(out, options.number("repeat"), once);
}

// out of row blockIdx.x * stride of [T * H] in fp64.
template <typename T>
__global__ void reference(double *out, const T *q, const T *k, const T *u, const T *v, const double *gate, Shape s, int64_t stride) {
    const int64_t row = blockIdx.x * stride, first = row % s.heads / s.group * s.subnets * s.subnet_dim;
    const int d = s.head_dim;
    auto add = [&](int64_t j, double *sums) {
        const int64_t at = (first + j) * d;
        double m = 0, n = 0;
        for (int i = 0; i < d; ++i) {
            const double x = float(q[row * d + i]);
            m += x * double(float(k[at + i]));
            n += x * double(float(u[at + i]));
        }
        const double a = m / (1 + exp(-m)) * n * gate[row * s.subnets + j / s.subnet_dim];
        each_column(d, [&](int i) { atomicAdd(&sums[i], a * double(float(v[at + i]))); });
    };
    sum_over(s.subnets * s.subnet_dim, d, add, [&](int i, double sum) { out[blockIdx.x * int64_t{d} + i] = sum; });
}

template <typename T> int run_f16(const Arguments &options) {
    const Inputs<T> in(options, one_sign(options));
    const Shape &s = in.s;
    const Buffer<T> out(in.rows * s.head_dim);
    const ForwardProblem problem{in.operands(in.k, in.u, in.v), WeightFormat::same, nullptr, out};
    const bool ok = measure_forward(options, in, out, problem, {&in.k, &in.u, &in.v});
    if (!options.number("check")) return ok ? 0 : 1;

    const auto [sampled, stride] = sample(in.rows, 4096, s.heads);
    const Buffer<double> gates(in.rows * s.subnets), sums(in.rows), expected(sampled * s.head_dim);
    in.gates(gates, sums);
    reference<T><<<sampled, 256, s.head_dim * sizeof(double)>>>(expected, in.q, in.k, in.u, in.v, gates, s, stride);
    return report("out", expected.host(), rows_of(out, sampled, s.head_dim, stride), rounding_limit<T>) && ok ? 0 : 1;
}

__device__ double of_fp8(__nv_fp8_storage_t x) { return double(__half2float(__half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)))); }
__device__ __nv_fp8_storage_t to_fp8(double x) { return __nv_cvt_float_to_fp8(float(x), __NV_SATFINITE, __NV_E4M3); }

// What a unit of K, U and V stands for, [3, heads of K, E]: their root mean square and up to 3/8 more, K's the same for all of a head.
__global__ void set_scales(float *scales, float of_ku, float of_v, int heads, int subnets) {
    const int plane = heads * subnets;
    for (int i = threadIdx.x; i < plane; i += blockDim.x) {
        scales[i] = of_ku * (1 + i / subnets % 4 / 8.f);
        scales[plane + i] = of_ku * (1 + i % 4 / 8.f);
        scales[2 * plane + i] = of_v * (1 + i % 3 / 8.f);
    }
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
    extern __shared__ double shared[];
    const int64_t row = blockIdx.x * stride, head = row % s.heads, plane = int64_t{s.heads / s.group} * s.subnets;
    const int d = s.head_dim;
    double *q8 = shared + d;  // behind the sums
    double largest = smallest_query, squares = 0;
    for (int i = 0; i < d; ++i) {
        const double x = fabs(double(float(q[row * d + i])));
        largest = fmax(largest, x);
        squares += x * x;
    }
    const double unit = largest / (query_norm * exp2(floor(log2(largest / sqrt(fmax(squares, largest * largest))))));
    for (int i = threadIdx.x; i < d; i += blockDim.x) q8[i] = of_fp8(to_fp8(double(float(q[row * d + i])) / unit));
    auto add = [&](int64_t j, double *sums) {
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
        each_column(d, [&](int i) { atomicAdd(&sums[i], factor * a * of_fp8(v[at + i * s.subnet_dim + place(j % s.subnet_dim)])); });
    };
    sum_over(s.subnets * s.subnet_dim, d, add, [&](int i, double sum) { out[blockIdx.x * int64_t{d} + i] = sum; });
}

template <typename T> int run_e4m3(const Arguments &options) {
    const Inputs<T> in(options, one_sign(options));
    const Shape &s = in.s;
    const int plane = s.weight_heads() * s.subnets;
    const Buffer<float> scales(3 * plane);
    const Buffer<__nv_fp8_storage_t> k8(in.k.size()), u8(in.u.size()), v8(in.v.size());
    set_scales<<<1, 128>>>(scales, in.scale, in.scale_v, s.weight_heads(), s.subnets);
    quantise<T><<<1024, 256>>>(k8, in.k, scales, s, false);
    quantise<T><<<1024, 256>>>(u8, in.u, scales + plane, s, false);
    quantise<T><<<1024, 256>>>(v8, in.v, scales + 2 * plane, s, true);

    const Buffer<T> out(in.rows * s.head_dim);
    const ForwardProblem problem{in.operands(k8, u8, v8), WeightFormat::e4m3, scales, out};
    bool ok = measure_forward(options, in, out, problem, {&k8, &u8, &v8});
    if (!options.number("check")) return ok ? 0 : 1;

    const auto [sampled, stride] = sample(in.rows, 2048, s.heads);
    const Buffer<double> gates(in.rows * s.subnets), sums(in.rows), expected(sampled * s.head_dim), quantised(sampled * s.head_dim);
    in.gates(gates, sums);
    reference<T><<<sampled, 256, s.head_dim * sizeof(double)>>>(expected, in.q, in.k, in.u, in.v, gates, s, stride);
    quantised_reference<T><<<sampled, 256, 2 * s.head_dim * sizeof(double)>>>(quantised, in.q, k8, u8, v8, scales, gates, s, stride);
    const auto values = rows_of(out, sampled, s.head_dim, stride), exact = expected.host(), same_points = quantised.host();
    // Sums of few terms do not average out the rounding of the operands: these then have the larger error themselves.
    const double limit = std::max(one_sign(options) ? 1.2e-2 : 7e-2, 1.05 * relative_l2(exact, same_points));
    ok = report("out against the definition", exact, values, limit) && ok;
    ok = report("out against the same quantised operands", same_points, values, 1.2e-2) && ok;
    report("these against the definition", exact, same_points, 7e-2);
    return ok ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
    const std::string defaults = "format=f16 signs=random chain=0 repeat=0 plans=0 slices=0 row_ctas=0 consumers=0 abreast=0";
    return run_typed(argc, argv, shape_arguments + defaults, [&]<typename T>(const Arguments &options) {
        return options.choice<bool>("format", {{"f16", false}, {"e4m3", true}}) ? run_e4m3<T>(options) : run_f16<T>(options);
    });
}
