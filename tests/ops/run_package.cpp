// An AOTInductor package in a process without Python: run_package LIBRARY PACKAGE INPUT OUTPUT.
// LIBRARY is flashmhf/libflashmhf_hopper.so, or "" for a package without its operators; INPUT is of torch.save, torch.load reads OUTPUT.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

int main(int, char **arguments) {
    if (*arguments[1] && !dlopen(arguments[1], RTLD_NOW | RTLD_GLOBAL)) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    std::ifstream input(arguments[3], std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(input), {}};
    torch::inductor::AOTIModelPackageLoader loader(arguments[2]);
    const std::vector<at::Tensor> outputs = loader.run({torch::jit::pickle_load(bytes).toTensor()});
    const std::vector<char> result = torch::jit::pickle_save(outputs.at(0));
    std::ofstream(arguments[4], std::ios::binary).write(result.data(), static_cast<std::streamsize>(result.size()));
}
