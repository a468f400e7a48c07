#!/usr/bin/env bash
# Cross-compiles the library for aarch64 (GH200) on x86_64 and packs its wheel; no kernel of it has run on a GPU yet.
#
#   CUDA_HOME=/path/of/cuda-13.0 VERSION=0.2.0 tools/cross_compile_aarch64.sh
#
# Needs Debian's g++-12-aarch64-linux-gnu, pip, unzip, cmake, ninja, and build/venv of docs/build.md. nvcc stays that of x86_64: it takes
# headers and libraries of another target from targets/ of its own folder, so it gets a copy of that folder with one
# target more. nvidia-cuda-runtime must have nvcc's version.
set -euo pipefail
: "${CUDA_HOME:?the folder of the CUDA toolkit}" "${VERSION:?of the package}"
cd "$(dirname "$0")/.."
mkdir -p build/arm/cuda/targets/sbsa-linux && cd build/arm
pip download --no-deps --only-binary=:all: --platform manylinux_2_17_aarch64 "nvidia-cuda-runtime==13.0.*"
pip download --no-deps --only-binary=:all: --platform manylinux_2_28_aarch64 --python-version 3.12 "torch==2.13.*"
unzip -qo "nvidia_cuda_runtime-*.whl" && unzip -qo "torch-*.whl"
cp -r "$CUDA_HOME/bin" cuda/bin && ln -sfn "$CUDA_HOME/nvvm" cuda/nvvm
ln -sfn "$CUDA_HOME/targets/x86_64-linux/include" cuda/targets/sbsa-linux/include
ln -sfn "$PWD/nvidia/cu13/lib" cuda/targets/sbsa-linux/lib
ln -sfn sbsa-linux cuda/targets/aarch64-linux # where CMake looks
cd ../..
cmake -G Ninja -S . -B build/aarch64 -DFLASHMHF_MANYLINUX=ON -DFLASHMHF_VERSION="$VERSION" -DTORCH_ROOT="$PWD/build/arm/torch" \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++-12 \
  -DCMAKE_CUDA_COMPILER="$PWD/build/arm/cuda/bin/nvcc" -DCMAKE_CUDA_HOST_COMPILER=aarch64-linux-gnu-g++-12 \
  -DCMAKE_CUDA_FLAGS=--target-directory=sbsa-linux -DCUDA_CUDART="$PWD/build/arm/cuda/targets/sbsa-linux/lib/libcudart_static.a"
cmake --build build/aarch64 --target flashmhf_hopper
python build_backend/kernel_resources.py build/aarch64 > build/aarch64/kernel_resources.json
build/venv/bin/python tools/build_wheel.py --machine aarch64 --library build/aarch64/libflashmhf_hopper.so
