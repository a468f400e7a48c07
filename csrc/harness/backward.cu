// Launches the backward kernels on one shape without Python or PyTorch: checks every gradient against plain fp64 kernels and times them.
//
//   backward_harness [name=value ...]     T=4096 H=16 group=1 d_h=128 E=22 d_e=384 gate=r|ones|w dtype=bf16|fp16 deterministic=0|1
//                                         needs=both|tokens|weights launches=20 check=1
//   and, instead of what the planner chooses,   kernels=auto|fused|ordered|pair groups=<groups of heads>
#include "backward/launch.h"
#include "backward/policy.h"
#include "common/device.h"
#include "harness/harness.cuh"

namespace {

using namespace flashmhf;
using namespace harness;

// Of one (token, inter) element, in fp64: dM, dN, P, and its term of dR.
struct Element {
    double dm, dn, p, dr;
};
template <typename T> __device__ Element element(const T *q, const T *g, const T *k, const T *u, const T *v, double r, int d_h) {
    double m = 0, n = 0, d = 0;
    for (int i = 0; i < d_h; ++i) {
        const double x = float(q[i]);
        m += x * double(float(k[i]));
        n += x * double(float(u[i]));
        d += double(float(g[i])) * double(float(v[i]));
    }
    const double s = 1 / (1 + exp(-m)), a = m * s;
    return {d * n * r * (s + a * (1 - s)), d * a * r, a * n * r, d * a * n};
}

// dQ (without the router's part) and dR of row blockIdx.x * stride of [T * H].
template <typename T>
__global__ void token_reference(double *dq, double *dr, const T *q, const T *g, const T *k, const T *u, const T *v, const double *gate,
                                Shape s, int64_t stride) {
    const int64_t row = blockIdx.x * stride, first = row % s.heads / s.group * s.subnets * s.subnet_dim;
    const int d = s.head_dim;
    auto add = [&](int64_t j, double *sums) {
        const int64_t at = (first + j) * d, e = j / s.subnet_dim;
        const Element x = element(q + row * d, g + row * d, k + at, u + at, v + at, gate[row * s.subnets + e], d);
        each_column(d, [&](int i) { atomicAdd(&sums[i], x.dm * double(float(k[at + i])) + x.dn * double(float(u[at + i]))); });
        atomicAdd(&sums[d + e], x.dr);
    };
    sum_over(s.subnets * s.subnet_dim, d + s.subnets, add,
             [&](int i, double sum) { (i < d ? dq[blockIdx.x * int64_t{d} + i] : dr[blockIdx.x * int64_t{s.subnets} + i - d]) = sum; });
}

// dK, dU, dV of row blockIdx.x * stride of [weight heads * E * d_e].
template <typename T>
__global__ void weight_reference(double *dk, double *du, double *dv, const T *q, const T *g, const T *k, const T *u, const T *v,
                                 const double *gate, Shape s, int64_t stride) {
    const int64_t row = blockIdx.x * stride, subnet = row / s.subnet_dim, head = subnet / s.subnets, e = subnet % s.subnets;
    const int d = s.head_dim;
    auto add = [&](int64_t j, double *sums) {  // one head of the group after the other
        const int64_t token = j % s.length * s.heads + head * s.group + j / s.length, at = token * d;
        const Element x = element(q + at, g + at, k + row * d, u + row * d, v + row * d, gate[token * s.subnets + e], d);
        each_column(d, [&](int i) {
            atomicAdd(&sums[i], x.dm * double(float(q[at + i])));
            atomicAdd(&sums[d + i], x.dn * double(float(q[at + i])));
            atomicAdd(&sums[2 * d + i], x.p * double(float(g[at + i])));
        });
    };
    double *const out[] = {dk, du, dv};
    sum_over(s.length * s.group, 3 * d, add, [&](int i, double sum) { out[i / d][blockIdx.x * int64_t{d} + i % d] = sum; });
}

// The router: dR of row blockIdx.x * stride becomes dP = r (dR - sum_f dR_f r_f) (1 - sigmoid(P)), and dQ gets dP W^T.
__global__ void router_reference(double *dq, double *dr, const double *gate, const double *sums, const float *w, Shape s, int64_t stride) {
    const int64_t row = blockIdx.x * stride, head = row % s.heads;
    double *dp = dr + blockIdx.x * int64_t{s.subnets};
    if (threadIdx.x == 0) {
        double dot = 0;
        for (int e = 0; e < s.subnets; ++e) dot += dp[e] * gate[row * s.subnets + e];
        for (int e = 0; e < s.subnets; ++e) {
            const double r = gate[row * s.subnets + e];
            dp[e] = r * (dp[e] - dot) * (1 - r * sums[row]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < s.head_dim; i += blockDim.x)
        for (int e = 0; e < s.subnets; ++e) dq[blockIdx.x * int64_t{s.head_dim} + i] += dp[e] * w[(head * s.head_dim + i) * s.subnets + e];
}
// dW of (head, column) = blockIdx.x from dP of all rows.
template <typename T> __global__ void router_weight_reference(double *dw, const double *dp, const T *q, Shape s) {
    const int64_t head = blockIdx.x / s.head_dim, i = blockIdx.x % s.head_dim;
    for (int e = threadIdx.x; e < s.subnets; e += blockDim.x) {
        double sum = 0;
        for (int64_t t = 0; t < s.length; ++t) {
            const int64_t row = t * s.heads + head;
            sum += dp[row * s.subnets + e] * double(float(q[row * s.head_dim + i]));
        }
        dw[blockIdx.x * int64_t{s.subnets} + e] = sum;
    }
}

template <typename T> int run(const Arguments &options) {
    const Inputs<T> in(options);
    if (in.gate == Gate::w_half) throw std::invalid_argument("gate=w16 is for the forward; supported: r, ones, w");
    const Shape &s = in.s;
    using Needs = std::pair<bool, bool>;
    const auto [tokens, weights] =
        options.choice<Needs>("needs", {{"both", {true, true}}, {"tokens", {true, false}}, {"weights", {false, true}}});
    const bool router = has_router(in.gate);
    const int64_t rows = in.rows, inter = in.inter, d = s.head_dim;

    const auto g = Buffer<T>::random(rows * d, 1.f, 7);
    const Buffer<T> dq(rows * d), dk(inter * d), du(inter * d), dv(inter * d);
    const Buffer<float> dr(rows * s.subnets), dw(in.w.size());

    BackwardProblem problem{in.operands(in.k, in.u, in.v)};
    problem.grad_out = dense(s, g, d);
    problem.deterministic = options.number("deterministic") != 0;
    if (tokens) problem.dq = dq;
    if (tokens && gate_is_given(in.gate)) problem.dr = dr;
    if (weights) {
        problem.dk = dk;
        problem.du = du;
        problem.dv = dv;
    }
    if (weights && router) problem.dw = dw;
    const Device device = describe_device();
    const BackwardTask task = backward_task(problem);
    const auto kernels = options.choice<std::optional<Kernels>>(
        "kernels", {{"auto", {}}, {"fused", Kernels::fused}, {"ordered", Kernels::ordered}, {"pair", Kernels::pair}});
    BackwardPlan plan = plan_backward(s, task, device);
    if (kernels || options.number("groups")) {
        const bool may_fuse = task.tokens && task.weights && s.head_dim <= widest_fused;
        const Kernels forced = kernels.value_or(plan.kernels);
        if (forced != Kernels::pair && !may_fuse)
            throw std::invalid_argument(std::string("kernels=") + kernels_names[static_cast<int>(forced)] +
                                        " needs needs=both and a d_h of at most " + std::to_string(widest_fused));
        plan = plan_backward(s, task, device, forced, static_cast<int>(options.number("groups")));
    }
    const Buffer<float> workspace(plan.workspace());
    const BackwardLaunch launch = prepare_backward(problem, plan, workspace);
    std::printf("%s\n", describe(s, plan).c_str());

    const int launches = static_cast<int>(options.number("launches"));
    const double of_element = 2. * d * (tokens && weights ? 8 : tokens ? 5 : 6);
    measure(launches, of_element * rows * s.subnets * s.subnet_dim, [&] { return launch_backward(s.head_dim, launch, nullptr); });
    print_trace();
    if (!options.number("check")) return 0;

    // Every row where dW, which sums over all tokens, is checked.
    const auto [sampled, stride] = sample(rows, problem.dw ? rows : 2048, s.heads);
    const auto [sampled_inter, inter_stride] = sample(inter, 2048, s.weight_heads());
    const Buffer<double> gates(rows * s.subnets), sums(rows);
    in.gates(gates, sums);
    constexpr double limit = rounding_limit<T>, float_limit = 1.5e-5;
    bool ok = true;
    if (task.tokens) {
        const Buffer<double> expected(sampled * d), expected_dr(sampled * s.subnets);
        token_reference<T>
            <<<sampled, 256, (d + s.subnets) * sizeof(double)>>>(expected, expected_dr, in.q, g, in.k, in.u, in.v, gates, s, stride);
        if (router) router_reference<<<sampled, 128>>>(expected, expected_dr, gates, sums, in.w, s, stride);
        if (problem.dq) ok &= report("dq", expected.host(), rows_of(dq, sampled, d, stride), limit);
        if (problem.dr) ok &= report("dr", expected_dr.host(), rows_of(dr, sampled, s.subnets, stride), float_limit);
        if (problem.dw) {
            const Buffer<double> expected_dw(dw.size());
            router_weight_reference<T><<<s.heads * s.head_dim, 64>>>(expected_dw, expected_dr, in.q, s);
            ok &= report("dw", expected_dw.host(), rows_of(dw, s.heads * d, s.subnets, 1), float_limit);
        }
    }
    if (weights) {
        const Buffer<double> expected[3] = {Buffer<double>(sampled_inter * d), Buffer<double>(sampled_inter * d),
                                            Buffer<double>(sampled_inter * d)};
        weight_reference<T><<<sampled_inter, 256, 3 * d * sizeof(double)>>>(expected[0], expected[1], expected[2], in.q, g, in.k, in.u,
                                                                            in.v, gates, s, inter_stride);
        for (const auto &[i, name, grad] : {std::tuple{0, "dk", &dk}, std::tuple{1, "du", &du}, std::tuple{2, "dv", &dv}})
            ok &= report(name, expected[i].host(), rows_of(*grad, sampled_inter, d, inter_stride), limit);
    }
    check(cudaDeviceSynchronize());
    return ok ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
    const std::string defaults = "deterministic=0 needs=both kernels=auto groups=0";
    return run_typed(argc, argv, shape_arguments + defaults, [&]<typename T>(const Arguments &options) { return run<T>(options); });
}
