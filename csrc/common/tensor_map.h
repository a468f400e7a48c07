// Tensor maps for strided tensors, encoded by the driver without linking libcuda.
#pragma once

#include <cstdint>
#include <initializer_list>

#include <cuda.h>

namespace flashmhf {

enum class MapType { bf16, fp16, fp32 };
inline MapType map_type(bool bf16) { return bf16 ? MapType::bf16 : MapType::fp16; }

struct MapAxis {
    int64_t size, stride;  // stride in elements; unused for the innermost axis, which is contiguous
    int box;               // elements of this axis in one copy
};

// Axes innermost first. Elements outside the tensor read as zeros and are not written. Throws std::runtime_error naming `what`.
CUtensorMap tensor_map(const char *what, const void *base, MapType type, std::initializer_list<MapAxis> axes, int swizzle_bytes);

}  // namespace flashmhf
