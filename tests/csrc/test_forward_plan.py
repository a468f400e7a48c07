"""The forward planner, on any machine: every token, head and inter tile once, balanced, within the limits."""

import collections
import functools
import itertools

import forward_plans
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

plan = pytest.importorskip("flashmhf._plan")
f16, fp8 = plan.plan_forward, functools.partial(plan.plan_forward, fp8=True)
SHAPES = [
    # batch, length, heads, head_dim, subnets, subnet_dim
    (1, 1, 1, 128, 1, 16), (1, 64, 16, 128, 22, 384), (1, 129, 2, 64, 22, 64), (1, 1536, 16, 128, 22, 384),
    (1, 1537, 16, 128, 22, 384), (1, 3072, 16, 128, 22, 384), (1, 12288, 16, 128, 22, 384), (1, 2000, 8, 96, 7, 384),
    (2, 5000, 6, 64, 15, 256), (1, 4288, 16, 128, 8, 256), (1, 5000, 3, 256, 22, 384), (1, 32256, 16, 128, 22, 384),
    (8, 192, 6, 96, 8, 256), (3, 200, 5, 256, 7, 112), (1, 70_000, 3, 256, 22, 704), (1, 1 << 20, 16, 128, 22, 384),
    (1, 100, 1, 128, 1, 100_000),
]  # fmt: skip
CHIPS = {name: clusters for name, (clusters, _) in forward_plans.DEVICES.items()}
DEVICES = [*CHIPS.values(), (1, 0, 0, 0, 0, 0, 0, 0), (2, 1, 0, 0, 0, 0, 0, 0)]


def check_adders(p) -> None:
    """Parts come first and are added behind by the last cluster, or else come last."""
    whole = p["waves"] * p["clusters"]  # items in waves
    parts, seen = collections.defaultdict(list), collections.defaultdict(list)
    for cluster, _, item, begin, end, part in p["work"]:
        seen[cluster].append(item < whole)
        if item >= whole and end - begin < p["inter_tiles"]:
            parts[item].append((cluster, part))
    for order in seen.values():
        assert order == sorted(order, reverse=not p["flags"]), "spans first where parts are added behind them"
    held = collections.Counter(cluster for pieces in parts.values() for cluster, _ in pieces)
    assert max(held.values(), default=0) <= 2
    if not p["flags"]:
        assert set(p["adds"]) <= {-1}
        return
    assert p["waves"] <= 1 and p["splits"] > p["rest"] and p["slices"] == 1
    assert p["flags"] == p["splits"] * 2 * p["row_ctas"]
    last_work = {cluster: (item, part) for cluster, _, item, _, _, part in p["work"]}
    adders = collections.defaultdict(list)
    for cluster, index in enumerate(p["adds"]):
        if index >= 0:
            adders[whole + index].append(cluster)
    assert set(adders) == set(parts)
    for item, pieces in parts.items():
        first, last = p["owners"][item - whole]
        clusters = sorted(cluster for cluster, _ in pieces)
        assert 2 <= len(clusters) <= (8 if p["waves"] else 4)
        (adder,) = adders[item]
        assert adder >= last, "it waits for no cluster behind it"
        # where the adding cluster looks for them: only the first can hold its part as the second of its span
        assert all(part == 0 for cluster, part in pieces if cluster > first)
        if p["waves"]:
            assert len(clusters) * 8 <= p["inter_tiles"], "the whole items are too short to add under"
        else:
            assert adder == last and last_work[last] == (item, 0), "the adding cluster has its own part in registers"


def check_work(p, heads, head_dim) -> collections.Counter:
    """Every tile of every item once, in pieces that the clusters hold in their order. Returns the tiles of each CTA."""
    assert p["cluster_size"] == p["row_ctas"] * p["slices"]
    ranges, load, parts = collections.defaultdict(list), collections.Counter(), set()
    for cluster, rank, item, begin, end, part in p["work"]:
        assert 0 <= begin < end <= p["inter_tiles"] and 0 <= rank < p["slices"]
        ranges[item].append((begin, end, cluster, part))
        load[cluster, rank] += end - begin
    assert set(ranges) == set(range(p["blocks"] * heads))
    for item, pieces in ranges.items():
        pieces.sort()
        assert pieces[0][0] == 0 and pieces[-1][1] == p["inter_tiles"]
        assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:], strict=False))
        clusters = [piece[2] for piece in pieces]
        assert clusters == sorted(clusters)  # the order in which the parts are added
        if p["slices"] > 1:
            assert clusters == [item] * p["slices"]
        elif len(pieces) > 1:
            first, last = p["owners"][item - p["waves"] * p["clusters"]]
            assert clusters == list(range(first, last + 1, p["abreast"]))
            for _, _, cluster, part in pieces:
                assert part in (0, 1) and (cluster, part) not in parts
                parts.add((cluster, part))
    # The blocks of a head side by side take the same tiles: else each would bring the weights from memory again.
    same = [[piece[:2] for piece in ranges[item]] for item in range(len(ranges))]
    assert all(same[item] == same[item - item % p["abreast"]] for item in ranges)
    assert p["partials"] == (p["splits"] * 2 * p["consumers"] * p["row_ctas"] * 64 * head_dim if parts else 0)
    assert p["workspace"] == p["partials"] + 2 * p["flags"]
    check_adders(p)
    return load


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_once_and_balanced(shape, device):
    batch, length, heads, head_dim, subnets, subnet_dim = shape
    p = plan.plan_forward(*shape, clusters=device)
    assert p["subnet_tiles"] * 64 >= subnet_dim > (p["subnet_tiles"] - 1) * 64
    assert p["inter_tiles"] == subnets * p["subnet_tiles"]
    assert p["row_tiles"] * 64 >= length > (p["row_tiles"] - 1) * 64
    rows = p["consumers"] * p["row_ctas"]
    assert p["blocks"] * rows >= batch * p["row_tiles"] > (p["blocks"] - 1) * rows
    assert p["clusters"] <= device[p["cluster_size"] - 1]
    load = check_work(p, heads, head_dim)
    # equal up to one tile, unless parts would become shorter than two tiles, or adding them up would take longer than
    # it saves: combine 512 / d_h tiles, behind whole waves 1792 / d_h; going on to a second item 512 / d_h, which a
    # cluster with parts of two is spared
    loss = (1792 if p["waves"] else 512) // head_dim + 1
    stream = heads * p["inter_tiles"] * 9 // 5 // device[0]  # fewer CTAs suffice where memory is the bound
    even = -(-p["blocks"] * heads * p["inter_tiles"] // device[p["row_ctas"] - 1])
    assert max(load.values()) <= max(even, stream) + loss


SIZES = (range(1, 5), range(2001), range(1, 21), (64, 96, 128, 256), range(1, 9), range(1, 301))


@settings(max_examples=300, deadline=None)
@given(
    shape=st.tuples(*(st.sampled_from(sizes) for sizes in SIZES)),
    device=st.sampled_from(DEVICES),
    planner=st.sampled_from([f16, fp8]),
    group=st.sampled_from([1, 2, 4, 6]),
)
@example(shape=(1, 0, 4, 128, 2, 64), device=DEVICES[0], planner=f16, group=1)
# a head's row tile is divided by a cluster of 16
@example(shape=(1, 16, 4, 128, 22, 384), device=DEVICES[0], planner=f16, group=4)
def test_every_tile_once_whatever_the_shape(shape, device, planner, group):
    """``shape`` has the heads of K, U and V, each for ``group`` of Q's."""
    batch, length, heads, *network = shape
    p = planner(batch, length, heads * group, *network, clusters=device, group=group, large_clusters=7)
    assert bool(p["candidates"]) == (length > 0)
    check_work(p, heads, network[0])
    rows = p["blocks"] * p["row_ctas"] * p["consumers"] * p["bundle"]
    assert rows >= batch * group * p["row_tiles"] and p["row_tiles"] * 64 >= length * p["bundle"]
    assert p["slices"] <= max(1, p["inter_tiles"]), "a CTA without a tile would leave before the barrier of its cluster"
    if p["slices"] > 1:
        assert p["slices"] * p["slice_pieces"] + p["spare_pieces"] == shape[3] // (8 if planner is f16 else 16)
        assert p["spare_pieces"] < p["slices"]
    if planner is fp8:
        assert p["consumers"] <= {64: 4, 256: 2}.get(shape[3], 3)
    if planner is fp8 or shape[3] == 256:
        assert p["flags"] == 0, "the clusters have no room to add parts"


def test_plans_of_2000_calls_are_those_of_the_file():
    """A plan that changes on purpose comes with a measurement; then forward_plans.py writes the file anew."""
    expected, actual = forward_plans.read(), forward_plans.rows(plan)
    assert len(expected) == len(actual) == 2000
    changed = [(was, now) for was, now in zip(expected, actual, strict=True) if was != now]
    assert not changed, (len(changed), changed[:5])


@pytest.mark.parametrize("features", [64, 128, 320, 768, 2048])
def test_projections_cover_every_token_and_feature(features):
    quads = {(1, 16, 4), (1, 32, 4), (1, 64, 4), (2, 96, 4), (2, 128, 4)}
    pairs = {(1, 48, 2), (1, 64, 2), (1, 96, 2), (1, 128, 2), (1, 192, 2)}
    for tokens, device in itertools.product(range(1, 385), CHIPS.values()):
        if device == CHIPS["single"]:
            with pytest.raises(ValueError, match="runs no clusters of [24] CTAs"):
                plan.plan_project(tokens, features, device)
            continue
        p = plan.plan_project(tokens, features, device)
        assert (p["warpgroups"], p["max_tokens"], p["cluster"]) in quads | pairs
        assert p["block_tokens"] % 8 == 0 and p["block_tokens"] <= p["max_tokens"]
        assert p["blocks"] * p["block_tokens"] >= tokens > (p["blocks"] - 1) * p["block_tokens"]
        assert p["blocks"] * p["block_tokens"] < tokens + 8 * p["blocks"], "only alignment takes rows without a token"
        assert p["box_tokens"] == (tokens if p["blocks"] == 1 else p["block_tokens"])
        assert features % (64 * p["warpgroups"]) == 0


@pytest.mark.parametrize(("shape", "group", "message"), [
    ((1, 64, 4, 80, 2, 64), 1, "d_h = 80"), ((1, 1 << 40, 64, 128, 2, 64), 1, "index range"),
    # of the output, of heads that share one of K, U and V
    ((1, 1, (1 << 23) + 1, 256, 2, 64), (1 << 23) + 1, r"H \* d_h exceeds"),
])  # fmt: skip
def test_refusals(shape, group, message):
    with pytest.raises(ValueError, match=message):
        plan.plan_forward(*shape, group=group)
