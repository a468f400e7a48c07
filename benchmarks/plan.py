"""Prints what the launch planner of the hopper back end decides for a shape, to be read beside a profile.

    $ python -m benchmarks.plan 16 22 384 128 32256             # H E d_e d_h T
    $ python -m benchmarks.plan 16 22 384 128 32256 --backward

The fields are those of csrc/forward/plan.h and csrc/backward/plan.h, which say what they mean. Runs without a GPU, by
the module flashmhf._plan, which an installation from source builds. Exit status 2: there is no such module, or no
kernel for the shape.
"""

from __future__ import annotations

import argparse
import sys

from flashmhf.backends import hopper

TFLOPS, FP8_TFLOPS, GB_PER_S, GB = 989, 1979, 4800, 141  # of an H200, dense
LARGE_CLUSTERS = 7  # of 16 CTAs at once: one in each GPC that has room for two of 8


def bound(flops: int, moved: int, tflops: int) -> str:
    """The least time for so many operations and so many bytes, of the tensor cores and of the memory."""
    products, memory = flops / tflops / 1e6, moved / GB_PER_S / 1e3
    name = "tensor cores" if products >= memory else "memory"
    return f"{name}; products {products:.1f} us at {tflops} TFLOP/s, memory {memory:.1f} us at {GB_PER_S} GB/s"


def described(options: argparse.Namespace) -> str:
    """The plan as lines "name  value", and the candidates. Raises ValueError for what has no kernel."""
    from flashmhf import _plan

    heads, kv_heads = options.H, options.kv_heads or options.H
    for name, value in vars(options).items():
        if value is not None and not isinstance(value, bool) and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if options.d_h not in hopper.HEAD_DIMS:
        raise ValueError(f"d_h is {options.d_h}; supported: {', '.join(map(str, hopper.HEAD_DIMS))}")
    if options.d_e % hopper.SUBNET_DIM_MULTIPLE:
        raise ValueError(f"d_e is {options.d_e}; supported: multiples of {hopper.SUBNET_DIM_MULTIPLE}")
    if heads % kv_heads:
        raise ValueError(f"H_kv is {kv_heads}; supported: divisors of H = {heads}")
    if options.deterministic and not options.backward:
        raise ValueError("--deterministic needs --backward; the forward always sums in one order")
    group, tokens = heads // kv_heads, options.batch * options.T
    product = 2 * tokens * heads * options.d_h * options.E * options.d_e
    q, weights = 2 * tokens * heads * options.d_h, 6 * kv_heads * options.E * options.d_e * options.d_h
    if 2 * q + weights > GB * 10**9:
        raise ValueError(f"Q, K, U, V and the output take {(2 * q + weights) / 1e9:.3g} GB; supported: {GB} GB")
    if options.backward:
        # the operator copies the tokens of several sequences into one where heads share weights
        rows = (options.batch, options.T) if group == 1 else (1, tokens)
        sizes = (*rows, heads, options.d_h, options.E, options.d_e)
        plan = _plan.plan_backward(*sizes, router=True, deterministic=options.deterministic, group=group)
        first, last = plan["heads"][0]
        launch = _plan.plan_head_group(*rows, (last - first) * group, options.E, options.d_e, group=group)
        plan = {"launches": len(plan["heads"])} | plan | {f"first launch, {name}": x for name, x in launch.items()}
        plan["bound"] = bound(8 * product, 3 * q + 2 * weights, TFLOPS)
    else:
        sizes = (options.batch, options.T, heads, options.d_h, options.E, options.d_e)
        plan = _plan.plan_forward(*sizes, fp8=options.fp8, group=group, large_clusters=LARGE_CLUSTERS)
        moved = 2 * q + (weights // 2 if options.fp8 else weights)
        plan["bound"] = bound(3 * product, moved, FP8_TFLOPS if options.fp8 else TFLOPS)
    candidates = plan.pop("candidates", "")
    width = max(map(len, plan))
    lines = [f"{name:<{width}}  {value}" for name, value in plan.items() if isinstance(value, (int, float, str))]
    return "\n".join([*lines, *([f"compared (us, fitted to an H200):\n{candidates.rstrip()}"] if candidates else [])])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("H", "E", "d_e", "d_h", "T"):
        parser.add_argument(name, type=int)
    parser.add_argument("--batch", type=int, default=1, help="sequences whose tokens do not lie at one stride (1)")
    parser.add_argument("--kv-heads", type=int, metavar="H_kv", help="heads of K, U and V; divides H (H)")
    parser.add_argument("--backward", action="store_true", help="the launches for all gradients with a router")
    parser.add_argument("--fp8", action="store_true", help="the forward with K, U and V in e4m3")
    parser.add_argument("--deterministic", action="store_true", help="with --backward")
    try:
        print(described(parser.parse_args(arguments)))
    except (ImportError, ValueError) as error:
        print(f"benchmarks.plan: {error}; pip install from source builds flashmhf._plan", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
