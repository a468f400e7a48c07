// Registrations of flashmhf_hopper::*, and nothing else. The schemas of flashmhf::* live in flashmhf/ops (networks.py, layer.py).
#include <string>

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/library.h>

#include "common/head_dims.h"
#include "operators.h"

namespace {

// The oldest NVIDIA driver that runs this file's static CUDA runtime (minor-version compatibility).
constexpr const char *driver_minimum = CUDART_VERSION >= 13000 ? "580.65.06" : "525.60.13";

// JSON; FLASHMHF_* come from CMakeLists.txt.
std::string build_info() {
    return std::string("{\"version\": \"" FLASHMHF_VERSION "\", \"thunderkittens\": \"" FLASHMHF_THUNDERKITTENS
                       "\", \"cuda_version\": \"" FLASHMHF_NVCC "\", \"driver_minimum\": \"") +
           driver_minimum + "\", \"kernels\": [{\"name\": \"forward\", \"d_h\": [" + flashmhf::ForwardHeadDims::names() +
           "]}, {\"name\": \"backward\", \"d_h\": [" + flashmhf::BackwardHeadDims::names() + "]}]}";
}

// An operator of a compiled graph, where what the kernels read was known when the graph was made, and a result has to be a tensor.
template <auto op> struct OfGraph;
template <typename... Args, std::optional<flashmhf::Tensor> (*op)(Args...)> struct OfGraph<op> {
    static flashmhf::Tensor call(Args... args) {
        std::optional<flashmhf::Tensor> result = op(args...);
        STD_TORCH_CHECK(result.has_value(), "layer: a tensor has another dtype, shape, device or layout than the graph was compiled for");
        return *result;
    }
};

// Schemas from the arguments in which the operators of a kind differ.
#define FLASHMHF_LAYER(weights)                                                           \
    "(Tensor x, Tensor in_w, Tensor? in_bias, Tensor? q_norm, float q_norm_eps, " weights \
    ", Tensor w, float eps, Tensor out_w,"                                                \
    " Tensor? out_bias) -> Tensor"
#define FLASHMHF_BACKWARD(gate)                                       \
    "(Tensor grad_out, Tensor q, Tensor k, Tensor u, Tensor v, " gate \
    ", bool deterministic, bool needs_tokens, bool needs_weights)"    \
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"

}  // namespace

STABLE_TORCH_LIBRARY(flashmhf_hopper, m) {
    m.def("build_info() -> str");
    m.def("forward(Tensor q, Tensor k, Tensor u, Tensor v, Tensor? r, bool deterministic) -> Tensor");
    m.def("gated_forward(Tensor q, Tensor k, Tensor u, Tensor v, Tensor w, float eps, bool deterministic) -> Tensor");
    m.def("fp8_forward(Tensor q, Tensor k8, Tensor u8, Tensor v8, Tensor scales, Tensor? r, Tensor? w, float eps) -> Tensor");
    m.def("project(Tensor x, Tensor w, Tensor? bias) -> Tensor");
    m.def("layer" FLASHMHF_LAYER("Tensor k, Tensor u, Tensor v") "?");
    m.def("fp8_layer" FLASHMHF_LAYER("Tensor k8, Tensor u8, Tensor v8, Tensor scales") "?");
    m.def("graph_layer" FLASHMHF_LAYER("Tensor k, Tensor u, Tensor v"));
    m.def("graph_fp8_layer" FLASHMHF_LAYER("Tensor k8, Tensor u8, Tensor v8, Tensor scales"));
    m.def("backward" FLASHMHF_BACKWARD("Tensor? r"));
    m.def("gated_backward" FLASHMHF_BACKWARD("Tensor w, float eps"));
}

// An op without tensor arguments has no device to dispatch on.
STABLE_TORCH_LIBRARY_IMPL(flashmhf_hopper, CompositeExplicitAutograd, m) { m.impl("build_info", TORCH_BOX(&build_info)); }

STABLE_TORCH_LIBRARY_IMPL(flashmhf_hopper, CUDA, m) {
    m.impl("forward", TORCH_BOX(&flashmhf::forward));
    m.impl("gated_forward", TORCH_BOX(&flashmhf::gated_forward));
    m.impl("fp8_forward", TORCH_BOX(&flashmhf::fp8_forward));
    m.impl("project", TORCH_BOX(&flashmhf::project));
    m.impl("layer", TORCH_BOX(&flashmhf::layer));
    m.impl("fp8_layer", TORCH_BOX(&flashmhf::fp8_layer));
    m.impl("graph_layer", TORCH_BOX(&OfGraph<&flashmhf::layer>::call));
    m.impl("graph_fp8_layer", TORCH_BOX(&OfGraph<&flashmhf::fp8_layer>::call));
    m.impl("backward", TORCH_BOX(&flashmhf::backward));
    m.impl("gated_backward", TORCH_BOX(&flashmhf::gated_backward));
}
