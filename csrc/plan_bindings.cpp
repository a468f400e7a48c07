// flashmhf._plan: the launch planner in Python, for tests and for flashmhf.info(). The package works without it.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_plan, m) {
    m.doc() = "The launch planner of the Hopper kernels.";
}
