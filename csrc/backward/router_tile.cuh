// A tile of tokens as the router's kernels see it.
#pragma once

#include "backward/params.h"
#include "backward/policy.h"
#include "common/token_tile.cuh"

namespace flashmhf {

// A row tile in q (strided) and in the dense [T, H, ...] tensors.
struct RouterTile : TokenTile {
    int rows;  // that hold a token
    __device__ __forceinline__ RouterTile(const RouterParams &g, int index)
        : TokenTile(index, g.row_tiles),
          rows(static_cast<int>(min(static_cast<int64_t>(tile_rows), g.length - token()))) {}
    __device__ __forceinline__ int64_t q_offset(const RouterParams &g, int head, int row) const {
        return sequence * g.q.batch_stride + (token() + row) * g.q.token_stride + head * g.q.head_stride;
    }
    __device__ __forceinline__ int64_t dense_row(const RouterParams &g, int head, int row) const {
        return g.dense.index(sequence, token() + row) * g.heads + head;
    }
};

}  // namespace flashmhf
