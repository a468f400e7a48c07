// What the planners know of a device, and asking for it. Pure C++.
#pragma once

#include <array>

namespace flashmhf {

constexpr int max_slices = 8;     // CTAs of a cluster, on every chip
constexpr int large_slices = 16;  // where a chip has room for them

struct Device {
    std::array<int, max_slices> clusters{};  // of 1, 2, ... CTAs of an SM each that run at once; 0: the device takes none
    int large_clusters = 0;                  // of large_slices CTAs
    int sms() const { return clusters[0]; }
};

// What the current context may use of its device: of a green context, its partition. Each context is asked once. Throws std::runtime_error
// where it runs no CTA that takes an SM, and on a device that the kernels are not for.
const Device &describe_device();

}  // namespace flashmhf
