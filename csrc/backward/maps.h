// Tensor maps of the backward kernels.
#pragma once

#include <cuda.h>

namespace flashmhf {

struct BackwardMaps {
    CUtensorMap q, grad_out;  // [batch][length][H][d_h], boxes of 64 tokens; rows behind the last token read as zeros
    CUtensorMap k, u, v;      // [H * E][d_e][d_h]; rows from d_e on read as zeros
};

}  // namespace flashmhf
