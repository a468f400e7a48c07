"""The standalone harnesses: one shape without Python, each result against fp64. FLASHMHF_BUILD names the CMake build
folder of them."""

import os
import subprocess
from pathlib import Path

import pytest

SMALL = ("T=300", "H=2", "E=3", "d_e=80", "launches=2")


def harness(direction: str) -> Path:
    path = Path(os.environ.get("FLASHMHF_BUILD", "FLASHMHF_BUILD")) / f"{direction}_harness"
    if not path.exists():
        pytest.skip(f"{path} does not exist: FLASHMHF_BUILD names the CMake build folder with the target {path.name}")
    return path


def run(direction: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([harness(direction), *arguments], capture_output=True, text=True)


SIZES = ("T=many", "T=0", "dtype=fp32", "d_h=80", "d_e=20", "H=0", "size=3", "T")
BAD = [(direction, x) for direction in ("forward", "backward") for x in SIZES]
BAD += [("project", x) for x in ("T=0", "T=385", "dtype=fp32", "depth=100", "features=0", "size=3")]


@pytest.mark.parametrize(("direction", "argument"), BAD)
def test_bad_arguments_are_named_on_one_line(direction, argument):
    done = run(direction, argument)
    assert done.returncode == 2 and argument.split("=")[0] in done.stderr
    assert len(done.stderr.splitlines()) == 1


CALLS = """\
forward gate=r
forward gate=w dtype=fp16
forward gate=ones
forward format=e4m3 gate=r
forward format=e4m3 gate=w dtype=fp16
forward format=e4m3 gate=ones signs=one
forward format=e4m3 gate=r E=30 d_e=48            # more sub-networks than a chunk of the gate
forward format=e4m3 gate=w E=30 d_e=48
forward format=e4m3 gate=w T=1 H=16 E=22          # CTAs divide an item; one value between two numbers decides nothing
forward format=e4m3 gate=r T=4400 H=8 repeat=20   # items are split
forward format=e4m3 gate=w T=16384 H=8 repeat=20  # several items a CTA, of as many row tiles as there are consumers
forward format=e4m3 gate=w group=2
backward gate=r
backward gate=w dtype=fp16
backward gate=w deterministic=1
backward gate=ones deterministic=1
backward gate=r needs=tokens
backward gate=w needs=weights
backward gate=r groups=2
"""


@pytest.mark.gpu
@pytest.mark.parametrize("d_h", [64, 96, 128, 256])
@pytest.mark.parametrize("call", [line.partition("#")[0].strip() for line in CALLS.splitlines()])
def test_values(call, d_h):
    direction, *arguments = call.split()
    done = run(direction, *SMALL, f"d_h={d_h}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("d_h", [64, 96, 128])
@pytest.mark.parametrize("kernels", ["fused", "ordered", "pair"])
def test_kernels_can_be_forced(d_h, kernels):
    done = run("backward", *SMALL, f"d_h={d_h}", f"kernels={kernels}", f"deterministic={int(kernels != 'fused')}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"kernels {kernels}," in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 30, 64, 96, 128, 200, 384])
@pytest.mark.parametrize(
    "arguments", [("bias=1", "dtype=fp16"), ("weights_ready=1", "features=1024"), ("depth=192", "features=320")]
)
def test_project(tokens, arguments):
    done = run("project", f"T={tokens}", "launches=2", "repeat=5", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
