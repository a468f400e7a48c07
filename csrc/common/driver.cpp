#include "common/driver.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace flashmhf {
namespace {

// A function of the driver as CUDA `version` has it, or null.
void *find_driver_function(const char *name, [[maybe_unused]] unsigned version = 12000) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &found);
#else  // CUDA 12.4 knows the entry point of its own version only
    const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#endif
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}
void *driver_function(const char *name) {
    if (void *function = find_driver_function(name)) return function;
    throw std::runtime_error(std::string("the NVIDIA driver has no ") + name + " (CUDA 12.0)");
}

}  // namespace

CUtensorMap tensor_map(const char *what, const void *base, MapType type, std::initializer_list<MapAxis> axes, int swizzle_bytes,
                       int fetch_bytes) {
    constexpr int max_rank = 5;
    const int bytes = type == MapType::fp32 ? 4 : type == MapType::fp8 ? 1 : 2;
    const CUtensorMapDataType element = type == MapType::fp32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                        : type == MapType::fp8  ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                        : type == MapType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    const CUtensorMapSwizzle swizzle = swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                       : swizzle_bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                             : CU_TENSOR_MAP_SWIZZLE_NONE;
    cuuint64_t sizes[max_rank], strides[max_rank];
    cuuint32_t box[max_rank], step[max_rank];
    int rank = 0;
    cuuint64_t dense = bytes;  // an axis of one element may have any stride: give it a valid one
    for (const MapAxis &axis : axes) {
        sizes[rank] = axis.size;
        if (rank > 0) strides[rank - 1] = axis.size == 1 ? (dense + 15) / 16 * 16 : axis.stride * bytes;
        dense = (rank > 0 ? strides[rank - 1] : bytes) * axis.size;
        box[rank] = axis.box;
        step[rank++] = 1;
    }
    CUtensorMap map;
    static const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(driver_function("cuTensorMapEncodeTiled"));
    const CUresult result = encode(&map, element, rank, const_cast<void *>(base), sizes, strides, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   swizzle, fetch_bytes == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw std::runtime_error(std::string("the driver refuses a tensor map for ") + what + " (CUDA error " + std::to_string(result) +
                                 ")");
    return map;
}

CUtensorMap token_map(const char *what, bool bf16, const Shape &shape, const TokenTensor &x, int box_rows) {
    const int d_h = shape.head_dim;
    return tensor_map(what, x.data, map_type(bf16),
                      {{d_h, 1, panel_cols_of(d_h)},
                       {shape.heads, x.head_stride, 1},
                       {shape.length, x.token_stride, box_rows},
                       {shape.batch, x.batch_stride, 1}},
                      swizzle_bytes_of(d_h));
}

CUtensorMap weight_map(const char *what, bool bf16, const Shape &shape, const void *weights, int box_rows, int fetch_bytes) {
    const int d_h = shape.head_dim;
    return tensor_map(what, weights, map_type(bf16),
                      {{d_h, 1, panel_cols_of(d_h)},
                       {shape.subnet_dim, d_h, box_rows},
                       {int64_t{shape.weight_heads()} * shape.subnets, shape.subnet_dim * d_h, 1}},
                      swizzle_bytes_of(d_h), fetch_bytes);
}

cudaError_t ensure_context(int device) {
    static const auto device_of_context = reinterpret_cast<decltype(&cuCtxGetDevice)>(driver_function("cuCtxGetDevice"));
    CUdevice current;
    return device_of_context(&current) == CUDA_SUCCESS && current == device ? cudaSuccess : cudaSetDevice(device);
}

uint64_t context_id() {
    static const auto id_of = reinterpret_cast<decltype(&cuCtxGetId)>(driver_function("cuCtxGetId"));
    unsigned long long id = 0;
    if (id_of(nullptr, &id) != CUDA_SUCCESS) throw std::runtime_error("the thread has no CUDA context");
    return id;
}

int context_sms(int all) {
    static const auto current = reinterpret_cast<decltype(&cuCtxGetCurrent)>(driver_function("cuCtxGetCurrent"));
    static const auto resource_of = reinterpret_cast<decltype(&cuCtxGetDevResource)>(find_driver_function("cuCtxGetDevResource", 12040));
    CUcontext context;
    CUdevResource resource;
    if (!resource_of || current(&context) != CUDA_SUCCESS || resource_of(context, &resource, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS)
        return all;
    return std::min(all, static_cast<int>(resource.sm.smCount));
}

}  // namespace flashmhf
