"""The backward planner: every tile of tokens of every item exactly once, balanced, within the device's limits. Runs without a GPU."""

from __future__ import annotations

import collections

import pytest

plan = pytest.importorskip("flashmhf._plan")

SHAPES = [  # batch, length, heads, subnets, subnet_dim
    (1, 1, 1, 1, 16),
    (1, 64, 16, 22, 384),
    (1, 1537, 16, 22, 384),
    (1, 32256, 16, 22, 384),
    (8, 4096, 8, 7, 384),
    (8, 4096, 6, 8, 256),
    (3, 200, 5, 7, 112),
    (1, 4096, 1, 1, 64),
    (1, 1 << 20, 16, 22, 384),
]


@pytest.mark.parametrize("sms", [132, 114, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_once_and_balanced(shape, sms):
    batch, length, heads, subnets, subnet_dim = shape
    p = plan.plan_backward(*shape, sms=sms)
    tiles = batch * -(-length // 64)
    assert p["row_tiles"] * batch == tiles
    assert p["items"] == heads * subnets * -(-subnet_dim // 64)
    assert p["whole"] <= p["items"] and (p["items"] - p["whole"]) * p["parts"] <= max(768, p["items"])
    pieces = collections.defaultdict(list)
    for item, begin, end in p["work"]:
        assert begin < end
        pieces[item].append((begin, end))
    assert set(pieces) == set(range(p["items"]))
    for item, parts in pieces.items():
        assert len(parts) == (1 if item < p["whole"] else p["parts"])
        assert parts[0][0] == 0 and parts[-1][1] == tiles
        assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
    # in launch order, each CTA to the SM that is free first; 4 tiles are what a CTA costs besides its own
    free = [0] * sms
    for _, begin, end in p["work"]:
        first = min(range(sms), key=free.__getitem__)
        free[first] += end - begin + 4
    ideal = p["items"] * tiles / sms
    if tiles >= 128:
        assert max(free) <= 1.10 * ideal + 8


def test_few_tokens_share_the_subnets():
    p = plan.plan_backward(1, 64, 16, 22, 384)
    assert p["token_blocks"] == 1 and 1 < p["token_parts"] <= 22
    assert plan.plan_backward(1, 32256, 16, 22, 384)["token_parts"] == 1


def test_index_range():
    with pytest.raises(ValueError, match="2\\^31"):
        plan.plan_backward(1, 1 << 31, 16, 22, 384)


def test_budgets_fit_an_sm():
    for policy in plan.backward_policies():
        assert policy["shared_memory"] <= 227 * 1024
        assert policy["registers"] * 128 <= 65536
