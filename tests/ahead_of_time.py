"""Compiles the launches of the Triton back end for any GPU, without one."""

import functools
import os
import re
import subprocess
import tempfile
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from flashmhf.backends.triton import launch

DEVICE = torch.device("cuda", 0)
SHARED_KB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # that a block may have
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv"}


class Compiled(NamedTuple):
    ptx: str
    shared: int  # bytes
    stack: int  # bytes of a thread that are no registers: what was spilled


def facts(*shape: int, dtype: torch.dtype) -> launch.Facts:
    """Of a contiguous tensor."""
    return launch.facts(torch.empty(shape, dtype=dtype, device="meta"))


def gpu(monkeypatch, capability: int) -> None:
    """Have launches planned as on a GPU of ``capability``."""
    monkeypatch.setattr(launch, "gpu", lambda device: launch.Gpu(divmod(capability, 10), 132))


def compile_plan(plan: launch.Plan, types: dict[str, torch.dtype | str], capability: int) -> Compiled:
    """Compile a launch. types: of its tensors by their names, or Triton's word for the type."""
    names, constants, attributes, signature = plan.kernel.arg_names, {}, {}, {}

    def describe(place: tuple[int, ...], value, *, specialised: bool, constexpr: bool):
        if constexpr or value is None or (specialised and value == 1 and not isinstance(value, bool)):
            constants[place] = value
            return "constexpr"
        if isinstance(value, tuple):
            parts = (describe((*place, i), x, specialised=True, constexpr=False) for i, x in enumerate(value))
            return tuple(parts)
        if isinstance(value, float):
            return "fp32"
        if specialised and value % 16 == 0:
            attributes[place] = [["tt.divisibility", 16]]
        return "i32" if abs(value) < 2**31 else "i64"

    for parameter in plan.kernel.params:
        name, place = parameter.name, (parameter.num,)
        if name in types:
            kind = types[name]
            signature[name] = kind if isinstance(kind, str) else f"*{NAMES[kind]}"
            if not isinstance(kind, str):
                attributes[place] = [["tt.divisibility", 16]]
            continue
        how = {"specialised": not parameter.do_not_specialize, "constexpr": parameter.is_constexpr}
        signature[name] = describe(place, plan.arguments.get(name), **how)
    assert set(types) | set(plan.arguments) == set(names)
    source = triton.compiler.ASTSource(plan.kernel, signature, constants, attributes)
    options = {"num_warps": plan.config.warps, "num_stages": plan.config.stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(compiled.asm["ptx"], compiled.metadata.shared, stack_bytes(compiled.asm["cubin"]))


def stack_bytes(cubin: bytes) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(cubin)
        usage = subprocess.run([cuobjdump(), "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


@functools.cache
def cuobjdump() -> str:
    return triton.knobs.nvidia.cuobjdump.path
