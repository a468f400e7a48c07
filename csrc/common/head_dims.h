// The head dimensions that a direction has kernels for, and the one way from a number to a template argument.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace flashmhf {

template <int... sizes> struct HeadDims {
    static constexpr bool contains(int64_t d_h) { return ((d_h == sizes) || ...); }
    // "64, 96, ..."
    static std::string names() {
        std::string text;
        ((text += (text.empty() ? "" : ", ") + std::to_string(sizes)), ...);
        return text;
    }
    // use<head_dim>(). Throws std::invalid_argument where there is no kernel.
    template <typename Use> static auto dispatch(int head_dim, Use &&use) {
        std::optional<std::common_type_t<decltype(use.template operator()<sizes>())...>> result;
        auto matches = [&]<int d_h>() {
            if (head_dim == d_h) result = use.template operator()<d_h>();
        };
        (matches.template operator()<sizes>(), ...);
        if (!result) throw std::invalid_argument("d_h = " + std::to_string(head_dim) + " has no kernel; supported: " + names());
        return *result;
    }
    // use<d_h>() for each of them.
    template <typename Use> static void each(Use &&use) { (use.template operator()<sizes>(), ...); }
};

using ForwardHeadDims = HeadDims<64, 96, 128, 256>;
using ForwardFp8HeadDims = HeadDims<64, 96, 128, 256>;
using BackwardHeadDims = HeadDims<64, 96, 128, 256>;
using QNormHeadDims = HeadDims<64, 96, 128, 256>;

}  // namespace flashmhf
