"""``flashmhf plan``: what the launch planner of the hopper back end decides for a shape, to be read beside a profile.

Runs without a GPU. Needs the module flashmhf._plan, which an installation from source builds.
"""

from __future__ import annotations

import argparse
import collections
import sys

from ..backends import hopper
from .arguments import positive_integer

MATRIX_TFLOPS, MEMORY_GB_PER_S, MEMORY_GB = 989, 4800, 141  # of an H200: dense bf16 products, HBM3e
SMS = 132
BYTES = 2  # of an element of Q, K, U, V and the output
_FLOAT = 4
_MIB = 1 << 20


class NoPlannerError(RuntimeError):
    """flashmhf._plan is not installed; the message says how to get it."""


def register(subparsers) -> argparse.ArgumentParser:
    """Adds the sub-command; ``run`` is a function of the parsed options that returns the exit status."""
    parser = subparsers.add_parser(
        "plan",
        help="what the planner of the Hopper kernels decides for a shape",
        description="The launch of the Hopper kernels for a shape, its expected time and the least time that the GPU allows (H200, bf16).",
    )
    for name, what in (
        ("H", "heads"),
        ("E", "sub-networks of a head"),
        ("d_e", "width of a sub-network"),
        ("d_h", "width of a head: 64, 96, 128, 256"),
        ("T", "tokens of a sequence"),
    ):
        parser.add_argument(name, type=positive_integer, help=what)
    parser.add_argument("--batch", type=positive_integer, default=1, help="sequences whose tokens do not lie at one stride (1)")
    parser.add_argument("--backward", action="store_true", help="the backward launches, for all gradients with a router")
    parser.add_argument("--deterministic", action="store_true", help="with --backward: bitwise equal gradients from run to run")
    parser.set_defaults(run=run)
    return parser


def planner():
    """The module flashmhf._plan. Raises NoPlannerError where it is not installed."""
    try:
        from .. import _plan
    except ImportError:
        advice = "a wheel has none; install from source with a C++20 compiler: pip install --no-binary flashmhf flashmhf"
        raise NoPlannerError(f"the planner module flashmhf._plan is not installed: {advice}") from None
    return _plan


def run(options: argparse.Namespace) -> int:
    shape = (options.batch, options.T, options.H, options.d_h, options.E, options.d_e)
    try:
        check(*shape)
        if options.deterministic and not options.backward:
            raise ValueError("--deterministic needs --backward; the forward always sums in one order")
        print(backward(*shape, options.deterministic) if options.backward else forward(*shape))
    except (NoPlannerError, ValueError) as error:
        print(f"flashmhf: {error}", file=sys.stderr)
        return 2
    return 0


def check(batch: int, length: int, heads: int, head_dim: int, subnets: int, subnet_dim: int) -> None:
    """ValueError for widths that the Hopper kernels do not take and for tensors beyond the GPU's memory (millions of items)."""
    if head_dim not in hopper.HEAD_DIMS:
        raise ValueError(f"d_h is {head_dim}; supported: {', '.join(map(str, hopper.HEAD_DIMS))}")
    if subnet_dim % hopper.SUBNET_DIM_MULTIPLE:
        raise ValueError(f"d_e is {subnet_dim}; supported: multiples of {hopper.SUBNET_DIM_MULTIPLE}")
    moved = operand_bytes(batch * length, heads, head_dim, subnets, subnet_dim)
    if moved > MEMORY_GB * 10**9:
        raise ValueError(f"Q, K, U, V and the output take {moved / 1e9:.3g} GB; supported: {MEMORY_GB} GB, an H200's memory")


def operand_bytes(tokens: int, heads: int, head_dim: int, subnets: int, subnet_dim: int) -> int:
    """Of Q, K, U, V and the output."""
    return BYTES * heads * head_dim * (2 * tokens + 3 * subnets * subnet_dim)


def longest_work(plan: dict) -> int:
    """Inter tiles of the CTA that has most, among the work (cluster, rank, item, begin, end, part) of all."""
    tiles: collections.Counter = collections.Counter()
    for cluster, rank, _, begin, end, _ in plan["work"]:
        tiles[cluster, rank] += end - begin
    return max(tiles.values(), default=0)


def stream_tiles(plan: dict, costs: dict, heads: int) -> float:
    """The time in which the memory brings all weights, in tiles of a CTA."""
    return heads * plan["inter_tiles"] * costs["stream"] / SMS


def forward_us(plan: dict, costs: dict, heads: int) -> float:
    """The planner's own estimate of a forward launch: the longest CTA, or the stream of all weights where that takes longer."""
    tiles = max(longest_work(plan), stream_tiles(plan, costs, heads))
    if plan["flags"]:
        tiles += costs["next_item"]
    elif plan["partials"]:
        tiles += costs["combine"]
    return tiles * costs["tile_us"]


def least_us(flops: int, moved: int) -> tuple[float, float]:
    """The least time for so many operations and so many bytes: of the tensor cores and of the memory."""
    return flops / MATRIX_TFLOPS / 1e6, moved / MEMORY_GB_PER_S / 1e3


def _lines(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _duration(us: float) -> str:
    return f"{us / 1000:.2f} ms" if us >= 1000 else f"{us:.1f} us"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _title(direction: str, batch: int, length: int, heads: int, head_dim: int, subnets: int, subnet_dim: int) -> str:
    tokens = f"T = {length:,}" if batch == 1 else f"T = {batch} x {length:,}"
    return f"{direction}: H = {heads}, E = {subnets}, d_e = {subnet_dim}, d_h = {head_dim}, {tokens}, {SMS} SMs"


def _time_rows(expected: float, flops: int, moved: int, basis: str) -> list[tuple[str, str]]:
    products, memory = least_us(flops, moved)
    bound, least = ("tensor cores", products) if products >= memory else ("memory", memory)
    return [
        ("expected time", f"{_duration(expected)} ({basis}; the constants are fitted to an H200 at d_h = 128)"),
        ("bound", f"{bound}: {_duration(least)}, {least / expected:.0%} of the expected time"),
        ("", f"products {_duration(products)} at {MATRIX_TFLOPS} TFLOP/s, memory {_duration(memory)} at {MEMORY_GB_PER_S / 1000} TB/s"),
    ]


def forward(batch: int, length: int, heads: int, head_dim: int, subnets: int, subnet_dim: int) -> str:
    """The plan of a forward launch as text. Raises ValueError for what has no kernel."""
    module = planner()
    plan, costs = module.plan_forward(batch, length, heads, head_dim, subnets, subnet_dim), module.forward_costs(head_dim)
    slices = plan["cluster_size"] // plan["row_ctas"]
    rows = 64 * plan["consumers"] * plan["row_ctas"]
    if slices > 1:
        waves = f"1: every cluster has one item, whose inter tiles its {slices} CTAs divide"
        sums = "in the order of the CTAs of a cluster, in shared memory"
    elif plan["splits"] > plan["rest"]:
        spans = f"{_count(plan['rest'], 'item')} in {_count(plan['splits'], 'span')}"
        waves = f"{_count(plan['waves'], 'wave')} of whole items, then {spans}: an item's inter tiles are split"
        if plan["lanes"] > 1:
            waves += f", the {plan['lanes']} blocks of a head side by side"
        where = "the clusters that hold last parts" if plan["flags"] else "a second kernel"
        sums = f"in the order of the clusters, by {where}"
    else:
        rest = f", then {_count(plan['rest'], 'item')}" if plan["rest"] else ""
        waves = f"{_count(plan['waves'], 'wave')} of whole items{rest}; nothing is split"
        sums = "in one CTA, tile after tile"
    moved = operand_bytes(batch * length, heads, head_dim, subnets, subnet_dim) + 2 * _FLOAT * plan["workspace"]
    longest, stream = longest_work(plan), stream_tiles(plan, costs, heads)
    basis = (
        f"{longest:,} tiles of {costs['tile_us']:.2f} us in the longest CTA" if longest >= stream else "streaming the weights of all heads"
    )
    return _lines(
        _title("forward", batch, length, heads, head_dim, subnets, subnet_dim),
        [
            ("clusters", f"{plan['clusters']:,} of {_count(plan['cluster_size'], 'CTA')}"),
            ("items", f"{plan['blocks'] * heads:,}: {_count(heads, 'head')} x {_count(plan['blocks'], 'block')} of up to {rows} tokens"),
            ("inter tiles", f"{plan['inter_tiles']:,} an item: {subnets} x {plan['subnet_tiles']} of 64 rows"),
            ("waves", waves),
            ("sums", sums),
            ("workspace", f"{_FLOAT * plan['workspace'] / _MIB:.1f} MiB"),
            ("shared memory", f"{plan['shared_memory']:,} bytes a CTA"),
            *_time_rows(
                forward_us(plan, costs, heads),
                6 * batch * length * heads * head_dim * subnets * subnet_dim,
                moved,
                basis,
            ),
        ],
    )


def backward(batch: int, length: int, heads: int, head_dim: int, subnets: int, subnet_dim: int, deterministic: bool = False) -> str:
    """The plan of the backward launches for all gradients with a router, as text. Raises ValueError for what has no kernel."""
    module = planner()
    plan = module.plan_head_groups(batch, length, heads, head_dim, subnets, subnet_dim, router=True, deterministic=deterministic)
    first, last = plan["heads"][0]
    launch = module.plan_backward(batch, length, last - first, subnets, subnet_dim)
    if not plan["fused"]:
        kernels = "a token-stationary kernel for dQ and dR, an inter-stationary one for dK, dU, dV: 11 products" + (
            "; at d_h = 256 the second is two: 13 products" if head_dim == 256 else ""
        )
        sums = "in a fixed order"
    else:
        kernels = "one fused kernel: 8 products"
        sums = "dQ and dR in the order of the items" if plan["ordered"] else "dQ and dR in no fixed order: low bits vary from run to run"
    split = launch["items"] - launch["whole"]
    parts = f"{launch['whole']:,} whole" + (f", {split:,} in {launch['parts']} parts" if split else "")
    moved = BYTES * heads * head_dim * (3 * batch * length + 6 * subnets * subnet_dim)
    return _lines(
        _title("backward", batch, length, heads, head_dim, subnets, subnet_dim),
        [
            ("kernels", kernels),
            ("launches", f"{len(plan['heads'])}, of heads {', '.join(f'{a}-{b - 1}' for a, b in plan['heads'])}"),
            ("items", f"{launch['items']:,} in the first: {last - first} x {subnets} x {launch['subnet_tiles']} tiles of 64 rows; {parts}"),
            ("token tiles", f"{batch * launch['row_tiles']:,} of 64"),
            ("sums", sums),
            ("workspace", f"{_FLOAT * plan['workspace'] / _MIB:.1f} MiB"),
            *_time_rows(
                plan["time_us"],
                16 * batch * length * heads * head_dim * subnets * subnet_dim,
                moved,
                "the planner's model of the main kernels; the router's kernels come on top",
            ),
        ],
    )
