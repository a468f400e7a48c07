#include "backward/launch.h"

namespace flashmhf {

cudaError_t launch_backward(int head_dim, const BackwardLaunch &launch) {
    switch (head_dim) {
        case 64: return launch_backward<64>(launch);
        case 96: return launch_backward<96>(launch);
        case 128: return launch_backward<128>(launch);
        default: return launch_backward<256>(launch);
    }
}

}  // namespace flashmhf
