// check -> allocate -> plan -> launch
#include "checks.h"
#include "operators.h"
#include "project/launch.h"
#include "scope.h"
#include "tensors.h"

namespace flashmhf {
namespace {

Tensor run(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias, bool weights_ready) {
    check_projection(x, w, bias);
    const DeviceScope scope(x.get_device_index(), "project", {.tokens = x.size(0)});
    Tensor out = new_dense(x, std::array{x.size(0), w.size(0)});
    if (x.size(0) == 0) return out;

    const ProjectPlan plan = plan_project(x.size(0), w.size(0), describe_device());
    const ProjectParams params{.x = x.data_ptr(),
                               .w = w.data_ptr(),
                               .bias = bias ? bias->data_ptr() : nullptr,
                               .out = out.data_ptr(),
                               .tokens = static_cast<int>(x.size(0)),
                               .depth = static_cast<int>(w.size(1)),
                               .features = static_cast<int>(w.size(0)),
                               .block_tokens = plan.block_tokens,
                               .box_tokens = plan.box_tokens,
                               .x_stride = x.stride(0),
                               .weights_ready = weights_ready};
    auto launch = x.scalar_type() == ScalarType::BFloat16 ? launch_project<true> : launch_project<false>;
    check_cuda(launch(plan, params, current_stream(x.get_device_index())));
    return out;
}

}  // namespace

Tensor project(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias) { return run(x, w, bias, false); }

Tensor project_behind_forward(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias) { return run(x, w, bias, true); }

}  // namespace flashmhf
