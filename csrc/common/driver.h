// What the host asks the CUDA driver, without linking libcuda: tensor maps for strided tensors, and the context that they need.
#pragma once

#include <cstdint>
#include <initializer_list>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "common/geometry.h"
#include "common/problem.h"

namespace flashmhf {

enum class MapType { bf16, fp16, fp32, fp8 };
inline MapType map_type(bool bf16) { return bf16 ? MapType::bf16 : MapType::fp16; }

struct MapAxis {
    int64_t size, stride;  // stride in elements; unused for the innermost axis, which is contiguous
    int box;               // elements of this axis in one copy
};

// Axes innermost first. Elements outside the tensor read as zeros and are not written. Throws std::runtime_error naming `what`.
// swizzle_bytes: 128, 64, 32, or 0 for none. fetch_bytes: what the L2 brings from memory at least, 128 or 256.
CUtensorMap tensor_map(const char *what, const void *base, MapType type, std::initializer_list<MapAxis> axes, int swizzle_bytes,
                       int fetch_bytes = 256);

// Q, the output or their gradients: boxes of box_rows tokens of a head.
CUtensorMap token_map(const char *what, bool bf16, const Shape &shape, const TokenTensor &x, int box_rows = tile_rows);
// K, U or V: boxes of box_rows inter rows of a sub-network; rows from d_e on read as zeros.
CUtensorMap weight_map(const char *what, bool bf16, const Shape &shape, const void *weights, int box_rows, int fetch_bytes = 256);

// Makes the device's primary context current in the calling thread, unless a context of that device is: a green context's default stream is
// another one than the primary context's.
cudaError_t ensure_context(int device);

// The number of the current context, which no other one of the process has, had or gets.
uint64_t context_id();
// The SMs that the current context may use: in a green context fewer than `all` of the device, where the driver can say so (CUDA 12.4).
int context_sms(int all);

}  // namespace flashmhf
