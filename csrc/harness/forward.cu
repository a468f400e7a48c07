// Launches the forward kernel on one shape without Python or PyTorch: checks it against a plain fp64 kernel and times it.
//
//   forward_harness [name=value ...]      T=4096 H=16 group=1 d_h=128 E=22 d_e=384 gate=r|ones|w|w16 dtype=bf16|fp16 launches=20
//                                        check=1 repeat=0 chain=0
//   and the planner's costs, in tiles * d_h:   combine= behind_waves= next_item=   (0: split whatever it costs; large: never split)
//
// chain=N: also the time of a launch in a CUDA graph of launches that take N copies of the weights in turn, as layers do at decode.
//
// repeat: further launches whose outputs must be bitwise equal.
//
// Exit status: 0 correct, 1 wrong, 2 bad arguments or a CUDA error. With launches=1 check=0 it is what ncu and compute-sanitizer want.
#include "harness/forward.cuh"

namespace {

using namespace harness;

template <typename T> int run(const Arguments &options) {
    const ForwardInputs<T> in(options);
    const flashmhf::Shape &s = in.s;
    flashmhf::ForwardProblem problem{};
    in.describe(problem);
    problem.k = in.k, problem.u = in.u, problem.v = in.v;
    const bool ok = measure_forward(options, in, problem, {&in.k, &in.u, &in.v});
    if (in.rows == 0) return 0;
    if (!options.number("check")) return ok ? 0 : 1;

    const auto [sampled, stride] = sample(in.rows, 4096, s.heads);
    const Buffer<double> gates(in.rows * s.subnets), sums(in.rows), expected(sampled * s.head_dim), got(sampled * s.head_dim);
    in.gates(gates, sums);
    reference<T><<<sampled, 256, s.head_dim * sizeof(double)>>>(expected, in.q, in.k, in.u, in.v, gates, s, stride);
    gather_rows<T><<<sampled, 128>>>(got, in.out, s.head_dim, stride);
    return report("out", expected.host(), got.host(), problem.bf16 ? 2.6e-3 : 3.5e-4) && ok ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
    return guarded([&] {
        const Arguments options = forward_arguments(argc, argv);
        return run_typed(options, [&]<typename T>() { return run<T>(options); });
    });
}
