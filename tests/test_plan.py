"""The launch planner: every token, head and inner tile exactly once, balanced, within the device's limits. Runs without a GPU."""

from __future__ import annotations

import collections

import pytest

plan = pytest.importorskip("flashmhf._plan")

SHAPES = [  # batch, length, heads, head_dim, subnets, subnet_dim
    (1, 1, 1, 128, 1, 16),
    (1, 64, 16, 128, 22, 384),
    (1, 129, 2, 64, 22, 64),
    (1, 1536, 16, 128, 22, 384),
    (1, 1537, 16, 128, 22, 384),
    (1, 32256, 16, 128, 22, 384),
    (8, 192, 6, 96, 8, 256),
    (3, 200, 5, 256, 7, 112),
    (1, 70_000, 3, 256, 22, 704),
    (1, 1 << 20, 16, 128, 22, 384),
    (1, 100, 1, 128, 1, 100_000),
]
DEVICES = [(132, 66), (114, 57), (132, 0), (1, 0), (2, 1)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_once_and_balanced(shape, device):
    batch, length, heads, _, subnets, subnet_dim = shape
    sms, pairs = device
    p = plan.plan_forward(*shape, sms=sms, pairs=pairs)
    assert p["subnet_tiles"] * 64 >= subnet_dim > (p["subnet_tiles"] - 1) * 64
    assert p["inter_tiles"] == subnets * p["subnet_tiles"]
    assert p["row_tiles"] * 64 >= length > (p["row_tiles"] - 1) * 64
    rows = p["consumers"] * p["cluster_size"]
    assert p["blocks"] * rows >= batch * p["row_tiles"] > (p["blocks"] - 1) * rows
    assert p["clusters"] <= (pairs if p["cluster_size"] == 2 else sms)

    items = p["blocks"] * heads
    ranges = collections.defaultdict(list)
    load = collections.Counter()
    whole = set()
    for cluster, item, begin, end, part in p["work"]:
        assert 0 <= begin < end <= p["inter_tiles"]
        ranges[item].append((begin, end, cluster, part))
        load[cluster] += end - begin
        if end - begin == p["inter_tiles"]:
            whole.add(item)
    assert set(ranges) == set(range(items))
    parts = set()
    for item, pieces in ranges.items():
        pieces.sort()
        assert pieces[0][0] == 0 and pieces[-1][1] == p["inter_tiles"]
        assert all(a[1] == b[0] for a, b in zip(pieces, pieces[1:], strict=False))
        clusters = [piece[2] for piece in pieces]
        assert clusters == sorted(clusters)  # the order in which the parts are added
        if item not in whole:
            first, last = p["owners"][item - p["waves"] * p["clusters"]]
            assert clusters == list(range(first, last + 1))
            for _, _, cluster, part in pieces:
                assert part in (0, 1) and (cluster, part) not in parts
                parts.add((cluster, part))
    # equal up to one tile, unless parts would become shorter than two tiles
    assert max(load.values()) <= -(-items * p["inter_tiles"] // p["clusters"]) + 2
    assert (p["partials"] > 0) == (len(whole) < items)


def test_empty():
    p = plan.plan_forward(1, 0, 4, 128, 2, 64)
    assert p["work"] == [] and p["partials"] == 0


def test_head_dimension_without_kernel():
    with pytest.raises(ValueError, match="d_h = 80"):
        plan.plan_forward(1, 64, 4, 80, 2, 64)


def test_index_range():
    with pytest.raises(ValueError, match="index range"):
        plan.plan_forward(1, 1 << 40, 64, 128, 2, 64)


def test_pairs_only_where_they_waste_few_rows():
    assert plan.plan_forward(1, 64, 16, 128, 22, 384)["cluster_size"] == 1
    assert plan.plan_forward(1, 320, 16, 128, 22, 384)["cluster_size"] == 1
    assert plan.plan_forward(1, 1536, 16, 128, 22, 384)["cluster_size"] == 2


def test_budgets():
    for policy in plan.forward_policies():
        assert policy["shared_memory"] <= 227 * 1024
        warpgroups = policy["consumers"] + 1
        assert policy["producer_registers"] + policy["consumers"] * policy["consumer_registers"] == warpgroups * policy["launch_registers"]
        assert 128 * warpgroups * policy["launch_registers"] <= 65536
        assert policy["tile_registers"] < policy["consumer_registers"]
