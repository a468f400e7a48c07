"""Prints what the launch planner of the hopper back end decides for a shape, to be read beside a profile.

    $ python -m benchmarks.plan 16 22 384 128 32256             # H E d_e d_h T
    $ python -m benchmarks.plan 16 22 384 128 32256 --backward

Runs without a GPU. Needs the module flashmhf._plan, which an installation from source builds. Exit status 2: there is
no such module, or no kernel for the shape.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from flashmhf.backends import hopper

MATRIX_TFLOPS, FP8_TFLOPS = 989, 1979  # of an H200, dense
MEMORY_GB_PER_S, MEMORY_GB = 4800, 141  # its HBM3e
SMS = 132
LARGE_CLUSTERS = 7  # of 16 CTAs at once: one in each GPC that has room for two of 8
FITTED = "the constants are fitted to an H200 at d_h = 128"
FITTED_FP8 = "times of short runs on an H200; long ones took 1.1 (d_h = 256) to 1.9 times (64) as long"
BYTES = 2  # of an element of Q and the output, and of K, U, V in 16 bits
_FLOAT = 4
_MIB = 1 << 20


@dataclass(frozen=True)
class Problem:
    """The sizes of a call: kv_heads is H_kv of K, U and V, fp8 whether these are in e4m3."""

    batch: int
    length: int
    heads: int
    head_dim: int
    subnets: int
    subnet_dim: int
    kv_heads: int
    fp8: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def product_flops(self) -> int:
        """Of one of the operator's products, such as Q K^T."""
        return 2 * self.tokens * self.heads * self.head_dim * self.subnets * self.subnet_dim

    @property
    def token_bytes(self) -> int:
        """Of Q, which are those of the output."""
        return BYTES * self.tokens * self.heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Of K, U and V together."""
        return (1 if self.fp8 else BYTES) * 3 * self.kv_heads * self.subnets * self.subnet_dim * self.head_dim


class NoPlannerError(RuntimeError):
    """flashmhf._plan is not installed; the message says how to get it."""


def positive_integer(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, what in (
        ("H", "heads"),
        ("E", "sub-networks per head"),
        ("d_e", "width of a sub-network"),
        ("d_h", "width of a head: 64, 96, 128, 256"),
        ("T", "tokens of a sequence"),
    ):
        parser.add_argument(name, type=positive_integer, help=what)
    parser.add_argument(
        "--batch", type=positive_integer, default=1, help="sequences whose tokens do not lie at one stride (1)"
    )
    parser.add_argument("--kv-heads", type=positive_integer, metavar="H_kv", help="heads of K, U and V; divides H (H)")
    kernel = parser.add_mutually_exclusive_group()
    kernel.add_argument(
        "--backward", action="store_true", help="the backward launches, for all gradients with a router"
    )
    kernel.add_argument("--fp8", action="store_true", help="the forward with K, U and V in e4m3")
    parser.add_argument(
        "--deterministic", action="store_true", help="with --backward: bitwise equal gradients from run to run"
    )
    return parser.parse_args(arguments)


def planner():
    """The module flashmhf._plan. Raises NoPlannerError where it is not installed."""
    try:
        from flashmhf import _plan
    except ImportError:
        advice = (
            "a wheel has none; install from source with a C++20 compiler: pip install --no-binary flashmhf flashmhf"
        )
        raise NoPlannerError(f"the planner module flashmhf._plan is not installed: {advice}") from None
    return _plan


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    sizes = (options.batch, options.T, options.H, options.d_h, options.E, options.d_e)
    problem = Problem(*sizes, options.H if options.kv_heads is None else options.kv_heads, options.fp8)
    try:
        check(problem)
        if options.deterministic and not options.backward:
            raise ValueError("--deterministic needs --backward; the forward always sums in one order")
        print(backward(problem, options.deterministic) if options.backward else forward(problem))
    except (NoPlannerError, ValueError) as error:
        print(f"benchmarks.plan: {error}", file=sys.stderr)
        return 2
    return 0


def check(problem: Problem) -> None:
    """ValueError for sizes that the Hopper kernels do not take and for tensors beyond the GPU's memory (millions of
    items).
    """
    if problem.head_dim not in hopper.HEAD_DIMS:
        raise ValueError(f"d_h is {problem.head_dim}; supported: {', '.join(map(str, hopper.HEAD_DIMS))}")
    if problem.subnet_dim % hopper.SUBNET_DIM_MULTIPLE:
        raise ValueError(f"d_e is {problem.subnet_dim}; supported: multiples of {hopper.SUBNET_DIM_MULTIPLE}")
    if problem.heads % problem.kv_heads:
        raise ValueError(f"H_kv is {problem.kv_heads}; supported: divisors of H = {problem.heads}")
    moved = 2 * problem.token_bytes + problem.weight_bytes
    if moved > MEMORY_GB * 10**9:
        raise ValueError(
            f"Q, K, U, V and the output take {moved / 1e9:.3g} GB; supported: {MEMORY_GB} GB, an H200's memory"
        )


def least_us(flops: int, moved: int, tflops: int = MATRIX_TFLOPS) -> tuple[float, float]:
    """The least time for so many operations and so many bytes: of the tensor cores and of the memory."""
    return flops / tflops / 1e6, moved / MEMORY_GB_PER_S / 1e3


def _lines(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _duration(us: float) -> str:
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us:.1f} us"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _title(direction: str, p: Problem) -> str:
    tokens = f"T = {p.length:,}" if p.batch == 1 else f"T = {p.batch} x {p.length:,}"
    shared = "" if p.group == 1 else f", H_kv = {p.kv_heads}"
    return f"{direction}: H = {p.heads}{shared}, E = {p.subnets}, d_e = {p.subnet_dim}, d_h = {p.head_dim}, {tokens}, {SMS} SMs"


def _bound_rows(flops: int, moved: int, tflops: int = MATRIX_TFLOPS) -> list[tuple[str, str]]:
    products, memory = least_us(flops, moved, tflops)
    bound, least = ("tensor cores", products) if products >= memory else ("memory", memory)
    return [
        ("bound", f"{bound}: {_duration(least)}"),
        (
            "",
            f"products {_duration(products)} at {tflops} TFLOP/s, memory {_duration(memory)} at {MEMORY_GB_PER_S / 1000} TB/s",
        ),
    ]


def _items(plan: dict, p: Problem) -> str:
    """A block has the tokens of the first head of a group, then those of the next;

    a bundle's row tile has those of several heads.
    """
    rows = 64 * plan["consumers"] * plan["row_ctas"]
    heads = _count(p.kv_heads, "head") + ("" if p.group == 1 else " of K, U, V")
    what = "tokens" if p.group == 1 else f"rows, the tokens of {p.group} heads of Q"
    together = f", {plan['bundle']} heads in a row tile" if plan["bundle"] > 1 else ""
    return (
        f"{plan['blocks'] * p.kv_heads:,}: {heads} x {_count(plan['blocks'], 'block')} of up to {rows} {what}{together}"
    )


def forward(problem: Problem) -> str:
    """The plan of a forward launch as text. Raises ValueError for what has no kernel."""
    p = problem
    sizes = (p.batch, p.length, p.heads, p.head_dim, p.subnets, p.subnet_dim)
    plan = planner().plan_forward(*sizes, fp8=p.fp8, group=p.group, large_clusters=LARGE_CLUSTERS)
    slices = plan["cluster_size"] // plan["row_ctas"]
    if slices > 1:
        waves = f"1: every cluster has one item, whose inter tiles its {slices} CTAs divide"
        sums = "in the order of the CTAs of a cluster, in shared memory"
    elif plan["splits"] > plan["rest"]:
        spans = f"{_count(plan['rest'], 'item')} in {_count(plan['splits'], 'span')}"
        waves = f"{_count(plan['waves'], 'wave')} of whole items, then {spans}: an item's inter tiles are split"
        if plan["abreast"] > 1:
            waves += f", the {plan['abreast']} blocks of a head side by side"
        where = "the clusters themselves" if plan["flags"] else "a second kernel"
        sums = f"in the order of the clusters, by {where}"
    else:
        rest = f", then {_count(plan['rest'], 'item')}" if plan["rest"] else ""
        waves = f"{_count(plan['waves'], 'wave')} of whole items{rest}; nothing is split"
        sums = "in one CTA, tile after tile"
    moved = 2 * p.token_bytes + p.weight_bytes
    return (
        _lines(
            _title("forward in FP8" if p.fp8 else "forward", p),
            [
                ("clusters", f"{plan['clusters']:,} of {_count(plan['cluster_size'], 'CTA')}"),
                ("items", _items(plan, p)),
                ("inter tiles", f"{plan['inter_tiles']:,} an item: {p.subnets} x {plan['subnet_tiles']} of 64 rows"),
                ("waves", waves),
                ("sums", sums),
                ("workspace", f"{_FLOAT * plan['workspace'] / _MIB:.1f} MiB"),
                ("shared memory", f"{plan['shared_memory']:,} bytes a CTA"),
                *_bound_rows(3 * p.product_flops, moved, FP8_TFLOPS if p.fp8 else MATRIX_TFLOPS),
            ],
        )
        + f"\nwhat the planner compares; {FITTED_FP8 if p.fp8 else FITTED}:\n{plan['candidates'].rstrip()}"
    )


def backward(problem: Problem, deterministic: bool = False) -> str:
    """The plan of the backward launches for all gradients with a router, as text.

    Raises ValueError for what has no kernel.
    """
    # The operator copies the tokens of several sequences into one where heads share weights.
    p = problem if problem.group == 1 else replace(problem, batch=1, length=problem.tokens)
    module = planner()
    sizes = (p.batch, p.length, p.heads, p.head_dim, p.subnets, p.subnet_dim)
    plan = module.plan_head_groups(*sizes, router=True, deterministic=deterministic, group=p.group)
    first, last = plan["heads"][0]
    launch = module.plan_backward(p.batch, p.length, (last - first) * p.group, p.subnets, p.subnet_dim, group=p.group)
    if not plan["fused"]:
        kernels = "a token-stationary kernel for dQ and dR, an inter-stationary one for dK, dU, dV: 11 products" + (
            "; at d_h = 256 the second is two: 13 products" if p.head_dim == 256 else ""
        )
        sums = "in a fixed order"
    else:
        kernels = "one fused kernel: 8 products"
        sums = (
            "dQ and dR in the order of the items"
            if plan["ordered"]
            else "dQ and dR in no fixed order: low bits vary from run to run"
        )
    split = launch["items"] - launch["whole"]
    parts = f"{launch['whole']:,} whole" + (f", {split:,} in {launch['parts']} parts" if split else "")
    moved = 3 * p.token_bytes + 2 * p.weight_bytes
    return _lines(
        _title("backward", problem),
        [
            ("kernels", kernels),
            ("launches", f"{len(plan['heads'])}, of heads {', '.join(f'{a}-{b - 1}' for a, b in plan['heads'])}"),
            (
                "items",
                f"{launch['items']:,} in the first: {last - first} x {p.subnets} x {launch['subnet_tiles']} tiles of 64 rows; {parts}",
            ),
            ("token tiles", f"{p.batch * p.group * launch['row_tiles']:,} of 64"),
            ("sums", sums),
            ("workspace", f"{_FLOAT * plan['workspace'] / _MIB:.1f} MiB"),
            ("planner's time", f"{_duration(plan['time_us'])} without the router's kernels; {FITTED}"),
            *_bound_rows(8 * p.product_flops, moved),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
