// Launches the projection of few tokens on one shape without Python or PyTorch: checks it against a plain fp64 kernel and times it.
//
//   project_harness [name=value ...]      T=128 depth=2048 features=2048 dtype=bf16|fp16 bias=0|1 weights_ready=0|1 launches=20 check=1
//                                        chain=0 repeat=0
#include "common/device.h"
#include "harness/harness.cuh"
#include "project/launch.h"

namespace {

using namespace flashmhf;
using namespace harness;

// out[t, n] of row blockIdx.y = t in fp64.
template <typename T> __global__ void reference(double *out, const T *x, const T *w, const T *bias, int depth, int features) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= features) return;
    double sum = bias ? double(float(bias[n])) : 0;
    for (int k = 0; k < depth; ++k) sum += double(float(x[int64_t{blockIdx.y} * depth + k])) * double(float(w[int64_t{n} * depth + k]));
    out[int64_t{blockIdx.y} * features + n] = sum;
}

template <typename T> int run(const Arguments &options) {
    const int64_t tokens = options.number("T"), depth = options.number("depth"), features = options.number("features");
    if (tokens < 1 || tokens > project_tokens) throw std::invalid_argument("T must be from 1 to " + std::to_string(project_tokens));
    for (const char *name : {"depth", "features"})
        if (options.number(name) < 1 || options.number(name) % project_multiple)
            throw std::invalid_argument(std::string(name) + " must be a multiple of " + std::to_string(project_multiple));
    constexpr bool bf16 = std::is_same_v<T, __nv_bfloat16>;
    const auto x = Buffer<T>::random(tokens * depth, 1.f, 1), w = Buffer<T>::random(features * depth, 1.f / std::sqrt(float(depth)), 2),
               bias = Buffer<T>::random(features, 1.f, 3);
    const Buffer<T> out(tokens * features);
    const Device device = describe_device();
    const ProjectPlan plan = plan_project(tokens, features, device);
    const ProjectTile &tile = project_tiles[plan.tile];
    ProjectParams params{.x = x,
                         .w = w,
                         .bias = options.number("bias") ? static_cast<T *>(bias) : nullptr,
                         .out = out,
                         .tokens = static_cast<int>(tokens),
                         .depth = static_cast<int>(depth),
                         .features = static_cast<int>(features),
                         .block_tokens = plan.block_tokens,
                         .box_tokens = plan.box_tokens,
                         .x_stride = depth,
                         .weights_ready = options.number("weights_ready") != 0};
    std::printf("features of a CTA %d, tokens of a CTA at most %d, CTAs of a cluster %d, blocks of %d tokens %d\n", 64 * tile.warpgroups,
                tile.max_tokens, tile.cluster, plan.block_tokens, plan.blocks);
    check(cudaDeviceSynchronize());  // with weights_ready the kernel reads W at once
    auto once = [&] { return launch_project<bf16>(plan, params, nullptr); };
    measure(static_cast<int>(options.number("launches")), 2.0 * tokens * depth * features, once);
    print_trace();
    std::vector<Buffer<T>> copies;
    for (int64_t i = 0; i < options.number("chain"); ++i) copies.push_back(w.copy());
    measure_chain(copies.size(), [&](int64_t i, cudaStream_t stream) {
        ProjectParams of_copy = params;
        of_copy.w = copies[i];
        return launch_project<bf16>(plan, of_copy, stream);
    });
    const bool ok = repeats_bits(out, options.number("repeat"), once);
    if (!options.number("check")) return ok ? 0 : 1;
    const Buffer<double> expected(tokens * features);
    reference<T><<<dim3((features + 127) / 128, tokens), 128>>>(expected, x, w, static_cast<const T *>(params.bias), depth, features);
    return report("out", expected.host(), rows_of(out, tokens, features, 1), rounding_limit<T>) && ok ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
    const char *defaults = "T=128 depth=2048 features=2048 dtype=bf16 bias=0 weights_ready=0 launches=20 chain=0 repeat=0 check=1";
    return run_typed(argc, argv, defaults, [&]<typename T>(const Arguments &options) { return run<T>(options); });
}
