"""The standalone harnesses: one shape without Python, each result against fp64; and every tile operation of
thunderkittens/ that the kernels use, against the host. FLASHMHF_BUILD names the CMake build folder of both. What the
planner can choose is here, and a test without a GPU asks it."""

import os
import subprocess
from pathlib import Path

import forward_plans
import pytest

SMALL = ("T=300", "H=2", "E=3", "d_e=80")


def harness(direction: str) -> Path:
    return built(f"{direction}_harness")


def built(program: str) -> Path:
    path = Path(os.environ.get("FLASHMHF_BUILD", "FLASHMHF_BUILD")) / program
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


# Every way to launch that the planners can choose, by plans that are forced where a new estimate might change them. Of
# the forward: weights, how the launch divides its items, who adds their parts | d_h | arguments.
FORWARD_PLANS = """\
f16  waves   nobody  | 64 96 128 256 | slices=1 row_ctas=2 E=1 H=32 T=1100 gate=w  # items in several waves
f16  waves   nobody  | 64 96 128 256 | slices=1 row_ctas=1 E=1
f16  waves   combine | 64 96 128 256 | slices=1 row_ctas=2 E=8
f16  waves   combine | 64 96 128 256 | slices=1 row_ctas=1 E=8 gate=w dtype=fp16
f16  waves   forward | 64 96 128     | slices=1 row_ctas=2 T=6600 H=4 E=15 gate=w  # parts are added behind a whole item
f16  waves   forward | 64 96 128     | slices=1 row_ctas=1 T=6600 H=4 E=15
f16  gathers forward | 64 96 128     | slices=1 row_ctas=2 T=2000 E=8
f16  gathers forward | 64 96 128     | slices=1 row_ctas=1 T=2000 E=8 gate=w
f16  slices  nobody  | 64 96 128     | slices=3 gate=w
f16  slices  nobody  | 64 96 128     | slices=2 T=20                               # of one row tile
f16  slices  nobody  | 64 96 128     | slices=16 T=16 H=8 E=16 group=4 gate=w      # of four heads
f16  slices  nobody  | 64 96 128     | slices=8 T=30 H=4 E=8 group=2               # of two heads
e4m3 waves   nobody  | 64 96 128 256 | slices=1 row_ctas=2 E=1 H=32 T=1700 gate=w
e4m3 waves   nobody  | 64 96 128 256 | slices=1 row_ctas=1 E=1
e4m3 waves   combine | 64 96 128 256 | slices=1 row_ctas=2 E=8
e4m3 waves   combine | 64 96 128 256 | slices=1 row_ctas=1 E=8 gate=w dtype=fp16
e4m3 slices  nobody  | 64 96 128     | slices=2 consumers=3 gate=w
e4m3 slices  nobody  | 64            | slices=3 consumers=4
e4m3-few-rows slices nobody | 64 96 128 256 | slices=3 consumers=2 gate=w
e4m3-few-rows slices nobody | 64 96 128 256 | slices=2 consumers=1
"""
# Of the backward: kernels, and whether CTAs of the fused one are pairs.
BACKWARD_PLANS = """\
fused   pairs  | 64 96 128     | gate=w
fused   single | 64 96 128     | d_e=64
fused   pairs  | 64 96 128     | d_e=64 E=70 gate=w                         # CTAs of all tokens, and of parts of them
ordered pairs  | 64 96 128     | kernels=ordered deterministic=1
ordered single | 64 96 128     | kernels=ordered deterministic=1 d_e=64 gate=w
pair           | 64 96 128 256 | kernels=pair deterministic=1 gate=w
pair           | 64 96 128 256 | kernels=pair deterministic=1 d_e=64 E=70
"""
# Of projections: warpgroups, tokens of a CTA at most, CTAs of a cluster | depth.
PROJECT_PLANS = """\
1 16 4  | 256 | T=10 features=256 bias=1
1 32 4  | 256 | T=30 features=256
1 64 4  | 192 | T=64 features=320 weights_ready=1
2 96 4  | 256 | T=90 features=2048
2 128 4 | 256 | T=120 features=2176 dtype=fp16 bias=1
1 48 2  | 256 | T=90 features=256
1 64 2  | 256 | T=128 features=320 weights_ready=1
1 96 2  | 192 | T=190 features=256
1 128 2 | 256 | T=256 features=256 dtype=fp16 bias=1
1 192 2 | 256 | T=384 features=256
"""


def planned(direction: str, lines: str, size: str) -> list[tuple[str, tuple, tuple[str, ...]]]:
    """Direction, plan and arguments of each call of the table `lines`."""
    calls = []
    for line in lines.splitlines():
        plan, sizes, arguments = line.partition("#")[0].split("|")
        weights = {"forward": [f"format={plan.partition(' ')[0].partition('-')[0]}"]}.get(direction, [])
        for each in sizes.split():
            call = (*(() if direction == "project" else SMALL), *weights, *arguments.split(), f"{size}={each}")
            calls.append((direction, tuple(plan.split()) + ((int(each),) if size == "d_h" else ()), call))
    return calls


PLANNED = planned("forward", FORWARD_PLANS, "d_h") + planned("backward", BACKWARD_PLANS, "d_h")
PLANNED += planned("project", PROJECT_PLANS, "depth")


def forward_kind(p: dict, fp8: bool, d_h: int) -> tuple:
    """What FORWARD_PLANS calls a plan of flashmhf._plan."""
    weights = "f16" if not fp8 else "e4m3-few-rows" if p["few_rows"] else "e4m3"
    return weights, p["division"], "forward" if p["flags"] else "combine" if p["partials"] else "nobody", d_h


def backward_kind(kernels: str, p: dict, d_h: int) -> tuple:
    return (kernels, d_h) if kernels == "pair" else (kernels, "pairs" if p["may_pair"] else "single", d_h)


def project_kind(p: dict) -> tuple:
    return tuple(str(p[name]) for name in ("warpgroups", "max_tokens", "cluster"))


@pytest.mark.parametrize("device", ["132", "132b"])
def test_the_planned_calls_are_what_they_say(device):
    plan = pytest.importorskip("flashmhf._plan")
    clusters, large = forward_plans.DEVICES[device]
    for direction, kind, call in PLANNED:
        given = dict(argument.split("=") for argument in call)
        number = {name: int(value) for name, value in given.items() if value.isdigit()}
        if direction == "project":
            assert project_kind(plan.plan_project(number["T"], number["features"], clusters)) == kind, call
            continue
        length, heads, d_h, subnets, d_e = (number[x] for x in ("T", "H", "d_h", "E", "d_e"))
        group = number.get("group", 1)
        if direction == "backward":
            p = plan.plan_head_group(1, length, heads, subnets, d_e, clusters, group)
            assert backward_kind(given.get("kernels", "fused"), p, d_h) == kind, call
            continue
        fp8, forced = given["format"] == "e4m3", {"slices", "row_ctas", "consumers"} & given.keys()
        chip = {"fp8": fp8, "clusters": clusters, "group": group, "large_clusters": large}
        p = plan.plan_forward(1, length, heads, d_h, subnets, d_e, **chip, **{x: number[x] for x in forced})
        assert forward_kind(p, fp8, d_h) == kind, call


def test_the_planners_choose_nothing_else():
    plan, chosen = pytest.importorskip("flashmhf._plan"), set()
    for kind, device, batch, length, heads, d_h, subnets, d_e, group in forward_plans.calls():
        clusters, large = forward_plans.DEVICES[device]
        shape, chip = (batch, length, heads, d_h, subnets, d_e), {"clusters": clusters, "group": group}
        p = plan.plan_forward(*shape, fp8=kind == "fp8", large_clusters=large, **chip)
        chosen.add(("forward", forward_kind(p, kind == "fp8", d_h)))
        for deterministic in (False, True):
            p = plan.plan_backward(*shape, router=True, deterministic=deterministic, **chip)
            (_, last), one = p["heads"][0], (batch, length)
            launch = plan.plan_head_group(*one, last * group, subnets, d_e, **chip)
            chosen.add(("backward", backward_kind(p["kernels"], launch, d_h)))
        if length <= 384 and clusters[3]:
            chosen.add(("project", project_kind(plan.plan_project(length, 64 * heads, clusters))))
    assert chosen <= {call[:2] for call in PLANNED}
    assert {direction for direction, _ in chosen} == {"forward", "backward", "project"}


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
forward gate=w T=4400 H=6 E=9 d_e=384 repeat=20   # as the planner chooses: parts behind a whole item
forward gate=w T=2000 E=22 d_e=384 repeat=20      # and parts that the clusters gather
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
    done = run(direction, *SMALL, "launches=2", f"d_h={d_h}", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("direction", "kind", "call"), PLANNED, ids=[" ".join((direction, *call)) for direction, _, call in PLANNED]
)
def test_values_of_every_plan(direction, kind, call):
    done = run(direction, *call, "launches=2", *(() if direction == "backward" else ("repeat=20",)))
    assert done.returncode == 0, done.stdout + done.stderr
    if direction == "forward":
        said = [f"division {kind[1]}, ", f"added by {kind[2]}\n"]
    elif direction == "backward":
        said = [f"kernels {kind[0]}, ", {"pairs": "parts, pairs", "single": "parts, no pairs"}.get(kind[1], "")]
    else:
        said = [
            "features of a CTA {}, tokens of a CTA at most {}, CTAs of a cluster {},".format(
                64 * int(kind[0]), *kind[1:]
            )
        ]
    assert all(text in done.stdout for text in said), done.stdout


@pytest.mark.gpu
def test_every_tile_operation():
    done = subprocess.run([built("kittens_tests")], capture_output=True, text=True, timeout=120)
    failed = [line for line in done.stdout.splitlines() if not line.startswith("PASS")]
    assert done.returncode == 0, "\n".join(failed) + done.stderr
    assert done.stdout.count("PASS") >= 51
