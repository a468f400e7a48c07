// What the host asks the CUDA driver, without linking libcuda.
#pragma once

#include <cuda_runtime_api.h>

namespace flashmhf {

// By its name in CUDA 12.0. Throws std::runtime_error where the driver has none.
void *driver_function(const char *name);

// Makes the device's primary context current in the calling thread, unless a context of that device is: a green context's default stream is
// another one than the primary context's.
cudaError_t ensure_context(int device);

}  // namespace flashmhf
