// Tensor maps for strided 16-bit tensors, encoded by the driver without linking libcuda.
#pragma once

#include <cstdint>
#include <initializer_list>

#include <cuda.h>

namespace flashmhf {

struct MapAxis {
    int64_t size, stride;  // stride in elements; unused for the innermost axis, which is contiguous
    int box;               // elements of this axis in one copy
};

// Axes innermost first. Elements outside the tensor read as zeros and are not written. Throws std::runtime_error naming `what`.
CUtensorMap tensor_map(const char *what, const void *base, bool bf16, std::initializer_list<MapAxis> axes, int swizzle_bytes);

}  // namespace flashmhf
