// Argument checks of the flashmhf_hopper::* operators, in one order for all: type, device, shape, layout. They are asked first:
// flashmhf/checks.py explains to callers from Python what they refuse.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "common/geometry.h"
#include "common/head_dims.h"
#include "common/problem.h"
#include "project/plan.h"
#include "scope.h"

namespace flashmhf {

using torch::headeronly::ScalarType;

inline std::string shape_of(const Tensor &x) {
    std::string text = "[";
    for (int64_t i = 0; i < x.dim(); ++i) text += (i ? ", " : "") + std::to_string(x.size(i));
    return text + "]";
}

template <typename Shape> bool has_shape(const Tensor &x, const Shape &shape) {
    return std::equal(x.sizes().begin(), x.sizes().end(), shape.begin(), shape.end());
}

// What a message about a wrong dtype ends with.
inline std::string type_of(const Tensor &x) { return std::string(", is ") + torch::headeronly::toString(x.scalar_type()); }

// x has the dtype that `wanted` names, and lies on the device of q, which the caller knows as q_name.
inline void check_type_and_device(const Tensor &x, const char *name, bool has_type, const char *wanted, const Tensor &q,
                                  const char *q_name = "q") {
    STD_TORCH_CHECK(has_type, name, " must ", wanted, type_of(x));
    STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == q.get_device_index(), name, " must be on the same CUDA device as ", q_name);
}
inline void check_float32_or_type_of_q(const Tensor &x, const char *name, const Tensor &q) {
    const bool has_type = x.scalar_type() == ScalarType::Float || x.scalar_type() == q.scalar_type();
    check_type_and_device(x, name, has_type, "be float32 or have the dtype of q", q);
}

inline void check_floats(const Tensor &x, const char *name) {
    STD_TORCH_CHECK(x.scalar_type() == ScalarType::BFloat16 || x.scalar_type() == ScalarType::Half, name, " must be bfloat16 or float16",
                    type_of(x));
    STD_TORCH_CHECK(x.is_cuda(), name, " must be on a CUDA device");
}
// q: [..., H, d_h]; k, u, v: [H_kv, E, d_e, d_h], contiguous, in q's type. packed: in e4m3, and v is [H_kv, E, d_h, d_e].
// HeadDims: of the direction.
template <typename HeadDims>
ProblemSizes check_operands(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, bool packed = false) {
    check_floats(q, "q");
    STD_TORCH_CHECK(q.dim() >= 2, "q must be [..., H, d_h], is ", shape_of(q));
    const std::string k_name = packed ? "k8" : "k";
    const ScalarType type = packed ? ScalarType::Float8_e4m3fn : q.scalar_type();
    auto check = [&](const Tensor &x, const std::string &name, const char *axes, std::array<int64_t, 4> shape) {
        check_type_and_device(x, name.c_str(), x.scalar_type() == type, packed ? "be float8_e4m3fn" : "have the dtype of q", q);
        STD_TORCH_CHECK(has_shape(x, shape), name, " must be ", axes, ", is ", shape_of(x), " but ", k_name, " is ", shape_of(k));
        STD_TORCH_CHECK(x.is_contiguous() && aligned(x.data_ptr()), name, " must be contiguous and start at a multiple of 16 bytes");
    };
    STD_TORCH_CHECK(k.dim() == 4, k_name, " must be [H_kv, E, d_e, d_h], is ", shape_of(k));
    const std::array rows{k.size(0), k.size(1), k.size(2), k.size(3)};
    check(k, k_name, "[H_kv, E, d_e, d_h]", rows);
    check(u, packed ? "u8" : "u", "[H_kv, E, d_e, d_h]", rows);
    if (packed) check(v, "v8", "[H_kv, E, d_h, d_e]", {rows[0], rows[1], rows[3], rows[2]});
    else check(v, "v", "[H_kv, E, d_e, d_h]", rows);

    ProblemSizes sizes{1, q.size(q.dim() - 2), q.size(q.dim() - 1), k.size(1), k.size(2), 1};
    for (int64_t i = 0; i < q.dim() - 2; ++i) sizes.tokens *= q.size(i);
    STD_TORCH_CHECK(sizes.heads >= 1 && k.size(0) >= 1 && sizes.subnets >= 1, "H, H_kv and E must be at least 1");
    STD_TORCH_CHECK(sizes.heads % k.size(0) == 0 && k.size(3) == sizes.head_dim, "q is ", shape_of(q), " but ", k_name, " is ",
                    shape_of(k));
    sizes.group = sizes.heads / k.size(0);
    STD_TORCH_CHECK(HeadDims::contains(sizes.head_dim), "d_h is ", sizes.head_dim, "; supported: ", HeadDims::names());
    STD_TORCH_CHECK(sizes.subnet_dim >= 16 && sizes.subnet_dim % 16 == 0, "d_e is ", sizes.subnet_dim, "; supported: multiples of 16");
    return sizes;
}

// r: [..., H, E] with q's leading dimensions.
inline void check_r(const Tensor &r, const Tensor &q, const ProblemSizes &sizes) {
    check_float32_or_type_of_q(r, "r", q);
    std::vector<int64_t> shape(q.sizes().begin(), q.sizes().end());
    shape.back() = sizes.subnets;
    STD_TORCH_CHECK(has_shape(r, shape), "r must be [..., H, E] with the leading dimensions of q; r is ", shape_of(r), " but q is ",
                    shape_of(q));
    STD_TORCH_CHECK(sizes.subnets == 1 || r.stride(r.dim() - 1) == 1, "the last dimension of r must be contiguous");
}

// w: [H, d_h, E], contiguous.
inline void check_w(const Tensor &w, const Tensor &q, const ProblemSizes &sizes) {
    check_float32_or_type_of_q(w, "w", q);
    STD_TORCH_CHECK(has_shape(w, std::array{sizes.heads, sizes.head_dim, sizes.subnets}), "w must be [H, d_h, E] = [", sizes.heads, ", ",
                    sizes.head_dim, ", ", sizes.subnets, "], is ", shape_of(w));
    STD_TORCH_CHECK(w.is_contiguous(), "w must be contiguous");
}

// The tokens of q as batch sequences of length tokens, and how q and tensors with its leading dimensions step through them.
struct TokenAxes {
    static constexpr int q = 0, r = 1, grad_out = 2, dense = 3, count = 4;  // dense: a dense [T], whose elements are tokens
    struct Strides {
        int64_t batch = 0, token = 0;  // in elements
    };
    int64_t batch = 1, length = 1;
    std::array<Strides, count> of{};
};

// Merges the leading dimensions of q as far as it and the others, null for none, allow; nothing when more than two axes remain.
inline std::optional<TokenAxes> collapse(const Tensor &q, const Tensor *r, const Tensor *grad_out = nullptr) {
    struct Axis {
        int64_t size;
        std::array<int64_t, TokenAxes::count> strides;
    } axes[2];
    int count = 0;
    int64_t dense = 1;
    for (int64_t i = q.dim() - 3; i >= 0; --i) {  // innermost first
        const Axis axis{q.size(i), {q.stride(i), (r ? *r : q).stride(i), (grad_out ? *grad_out : q).stride(i), dense}};
        dense *= axis.size;
        if (axis.size == 1) continue;
        auto merges = [&](const Axis &inner) {
            for (int x = 0; x < TokenAxes::count; ++x)
                if (axis.strides[x] != inner.size * inner.strides[x]) return false;
            return true;
        };
        if (count && merges(axes[count - 1])) axes[count - 1].size *= axis.size;
        else if (count == 2) return std::nullopt;
        else axes[count++] = axis;
    }
    TokenAxes t;
    // Tiles of 64 tokens run along one axis: the one that wastes fewer of their rows.
    auto tiles = [&](int along) { return ceil_div(axes[along].size, tile_rows) * axes[1 - along].size; };
    const int along = count == 2 && tiles(1) < tiles(0) ? 1 : 0;
    if (count > 0) t.length = axes[along].size;
    if (count == 2) t.batch = axes[1 - along].size;
    for (int x = 0; x < TokenAxes::count; ++x)
        t.of[x] = {count == 2 ? axes[1 - along].strides[x] : 0, count > 0 ? axes[along].strides[x] : 0};
    return t;
}

// Whether TMA can read x [..., H, d_h] through these strides of its tokens.
inline bool readable(const Tensor &x, const TokenAxes &axes, TokenAxes::Strides strides) {
    const int64_t head_axis = x.dim() - 2;
    return x.stride(head_axis + 1) == 1 && aligned(x.data_ptr()) && strided(x.size(head_axis), x.stride(head_axis), element_bytes) &&
           strided(axes.length, strides.token, element_bytes) && strided(axes.batch, strides.batch, element_bytes);
}
inline void check_readable(const Tensor &q) {
    const std::optional<TokenAxes> axes = collapse(q, nullptr);
    STD_TORCH_CHECK(axes, "the leading dimensions of q do not collapse to one or two token strides");
    STD_TORCH_CHECK(readable(q, *axes, axes->of[TokenAxes::q]),
                    "q's last dimension must be contiguous, and its strides and storage offset positive multiples of 16 bytes");
}
// The token axes of q, which is readable, and, where given, R. An R with other axes than q's is copied to a contiguous tensor, which has
// every axis.
inline TokenAxes token_axes(const Tensor &q, std::optional<Tensor> &r) {
    if (const std::optional<TokenAxes> axes = collapse(q, r ? &*r : nullptr)) return *axes;
    *r = torch::stable::contiguous(*r);
    return *collapse(q, &*r);
}
inline TokenTensor token_tensor(const Tensor &x, TokenAxes::Strides strides) {
    return {x.data_ptr(), strides.batch, strides.token, x.stride(x.dim() - 2)};
}

// A checked call's operands; `axes` are those of q and, where given, r. At most one of R and the router's W is given.
inline Operands operands_of(const Tensor &q, const Tensor &k, const Tensor &u, const Tensor &v, const std::optional<Tensor> &r,
                            const std::optional<Tensor> &w, double eps, const TokenAxes &axes, const ProblemSizes &sizes) {
    auto is_float = [](const Tensor &x) { return x.scalar_type() == ScalarType::Float; };
    const TokenAxes::Strides &dense = axes.of[TokenAxes::dense];
    return {.bf16 = q.scalar_type() == ScalarType::BFloat16,
            .shape = {.batch = axes.batch,
                      .length = axes.length,
                      .heads = static_cast<int>(sizes.heads),
                      .head_dim = static_cast<int>(sizes.head_dim),
                      .subnets = static_cast<int>(sizes.subnets),
                      .subnet_dim = sizes.subnet_dim,
                      .group = static_cast<int>(sizes.group)},
            .q = token_tensor(q, axes.of[TokenAxes::q]),
            .k = k.data_ptr(),
            .u = u.data_ptr(),
            .v = v.data_ptr(),
            .gate = w   ? (is_float(*w) ? Gate::w_float : Gate::w_half)
                    : r ? (is_float(*r) ? Gate::r_float : Gate::r_half)
                        : Gate::ones,
            .r = r ? token_tensor(*r, axes.of[TokenAxes::r]) : TokenTensor{},
            .w = w ? w->data_ptr() : nullptr,
            .eps = static_cast<float>(eps),
            .dense = {dense.batch, dense.token}};
}

// Rows that the kernels read where they lie: at any stride of whole 16 bytes.
inline bool readable_rows(const Tensor &x) {
    return x.stride(1) == 1 && (x.size(0) == 0 || strided(x.size(0), x.stride(0), element_bytes)) && aligned(x.data_ptr());
}

// x: [T, K], readable_rows; w: [N, K] and bias [N], contiguous, in x's type.
inline void check_projection(const Tensor &x, const Tensor &w, const std::optional<Tensor> &bias) {
    check_floats(x, "x");
    check_type_and_device(w, "w", w.scalar_type() == x.scalar_type(), "have the dtype of x", x, "x");
    STD_TORCH_CHECK(x.dim() == 2, "x must be [T, K], is ", shape_of(x));
    STD_TORCH_CHECK(w.dim() == 2 && w.size(1) == x.size(1), "w must be [N, K] with K = ", x.size(1), ", is ", shape_of(w));
    STD_TORCH_CHECK(x.size(0) <= project_tokens, "x must be [T, K] with T at most ", project_tokens, ", is ", shape_of(x));
    auto supported = [](int64_t size, int64_t most) { return size > 0 && size % project_multiple == 0 && size <= most; };
    STD_TORCH_CHECK(supported(w.size(0), INT32_MAX) && supported(w.size(1), INT32_MAX), "w is ", shape_of(w), "; supported: multiples of ",
                    project_multiple);
    STD_TORCH_CHECK(w.is_contiguous() && aligned(w.data_ptr()), "w must be contiguous and start at a multiple of 16 bytes");
    STD_TORCH_CHECK(x.size(0) == 0 || readable_rows(x),
                    "x's last dimension must be contiguous, its rows at positive multiples of 16 bytes");
    if (!bias) return;
    check_type_and_device(*bias, "bias", bias->scalar_type() == x.scalar_type(), "have the dtype of x", x, "x");
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == w.size(0) && bias->is_contiguous(), "bias must be [N] with N = ", w.size(0),
                    " and contiguous, is ", shape_of(*bias));
}

}  // namespace flashmhf
