// Tile primitives for Hopper (sm_90a) with part of the interface of ThunderKittens; see ../README.md for what is covered.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

// Each needs the ones before it.
#include "types/base.cuh"

#include "types/tiles.cuh"

#include "ops/thread.cuh"

#include "ops/group.cuh"
