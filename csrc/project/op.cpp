// check -> allocate -> launch
#include "checks.h"
#include "device.h"
#include "operators.h"
#include "project/launch.h"
#include "tensors.h"

namespace flashmhf {
namespace {

Tensor project_with(const Tensor &x, const Tensor &w, const Tensor *scale, const std::optional<Tensor> &bias, bool weights_ready) {
    check_projection(x, w, scale, bias);
    const DeviceScope scope(x.get_device_index(), "flashmhf project");
    Tensor out = new_dense(x, std::array{x.size(0), w.size(0)});
    if (x.size(0) == 0) return out;

    ProjectParams params{};
    params.x = x.data_ptr(), params.w = w.data_ptr(), params.out = out.data_ptr();
    params.bias = bias ? bias->data_ptr() : nullptr;
    params.scale = scale ? static_cast<const float *>(scale->data_ptr()) : nullptr;
    params.tokens = static_cast<int>(x.size(0));
    params.depth = static_cast<int>(w.size(1)), params.features = static_cast<int>(w.size(0));
    params.x_stride = x.stride(0);
    params.weights_ready = weights_ready;
    const ProjectPlan plan = plan_project(params.tokens, params.features, scale != nullptr);
    params.block_tokens = plan.block_tokens, params.box_tokens = plan.box_tokens;
    const bool bf16 = x.scalar_type() == ScalarType::BFloat16;
    auto launch = scale  ? (bf16 ? launch_project_fp8<true> : launch_project_fp8<false>)
                  : bf16 ? launch_project<true>
                         : launch_project<false>;
    check_cuda(launch(plan, params, current_stream(x.get_device_index())));
    return out;
}

}  // namespace

Tensor project(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias, bool weights_ready) {
    return project_with(x, w, nullptr, bias, weights_ready);
}

Tensor project_fp8(const Tensor &x, const Tensor &w, const Tensor &scale, const std::optional<Tensor> &bias, bool weights_ready) {
    return project_with(x, w, &scale, bias, weights_ready);
}

}  // namespace flashmhf
