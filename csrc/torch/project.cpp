// check -> plan -> allocate -> launch
#include "operators.h"
#include "project/launch.h"

namespace flashmhf {

Tensor run_project(const DeviceScope &scope, const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias, bool behind_forward) {
    const NvtxRange range("project", {.tokens = x.size(0)});
    const std::array sizes{x.size(0), w.size(0)};
    if (x.size(0) == 0) return new_dense(x, sizes);
    const ProjectPlan plan = plan_project(x.size(0), w.size(0), scope.device);
    Tensor out = new_dense(x, sizes);
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
                               .weights_ready = behind_forward};
    auto launch = x.scalar_type() == ScalarType::BFloat16 ? launch_project<true> : launch_project<false>;
    check_cuda(launch(plan, params, scope.stream));
    return out;
}

Tensor project(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias) {
    check_projection(x, w, bias);
    return run_project(DeviceScope(x.get_device_index()), x, w, bias, false);
}

}  // namespace flashmhf
