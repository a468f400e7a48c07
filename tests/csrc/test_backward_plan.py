"""The backward planner, on any machine: every tile of tokens of every item once, balanced, within the limits."""

import collections

import forward_plans
import pytest

plan = pytest.importorskip("flashmhf._plan")
DEVICES = [*(clusters for clusters, _ in forward_plans.DEVICES.values()), (1, 0, 0, 0, 0, 0, 0, 0)]
SHAPES = [
    # batch, length, heads, subnets, subnet_dim
    (1, 1, 1, 1, 16), (1, 64, 16, 22, 384), (1, 1537, 16, 22, 384), (1, 32256, 16, 22, 384), (8, 4096, 8, 7, 384),
    (8, 4096, 6, 8, 256), (3, 200, 5, 7, 112), (1, 4096, 1, 1, 64), (1, 1 << 20, 16, 22, 384),
]  # fmt: skip


@pytest.mark.parametrize("clusters", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_once_and_balanced(shape, clusters):
    sms = clusters[0]
    batch, length, heads, subnets, subnet_dim = shape
    p = plan.plan_head_group(*shape, clusters=clusters)
    assert p["may_pair"] == bool(clusters[1] and shape[3] * p["subnet_tiles"] % 2 == 0 and p["whole"] % 2 == 0)
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


FLAGSHIP = {"heads": 16, "head_dim": 128, "subnets": 22, "subnet_dim": 384}
TASKS = [
    {"router": True}, {"gate": True}, {}, {"router": True, "deterministic": True}, {"gate": True, "tokens": False},
    {"router": True, "weights": False}, {"router": True, "head_dim": 256}, {"router": True, "subnets": 33},
    {"router": True, "subnets": 33, "deterministic": True},
]  # fmt: skip
GROUP_SHAPES = [
    {"batch": 1, "length": 32256} | FLAGSHIP,
    {"batch": 8, "length": 4033, "heads": 16, "head_dim": 128, "subnets": 15, "subnet_dim": 384},
    {"batch": 8, "length": 4096, "heads": 7, "head_dim": 96, "subnets": 7, "subnet_dim": 272},
    {"batch": 1, "length": 129_024, "heads": 6, "head_dim": 64, "subnets": 1, "subnet_dim": 64},
    {"batch": 1, "length": 100} | FLAGSHIP,
]


def buffers_of(shape, task, heads, p, ordered):
    """Floats that the kernels of a launch use of each buffer."""
    head_dim = shape["head_dim"]
    may_fuse = task.get("tokens", True) and task.get("weights", True) and head_dim < 256
    fused = may_fuse and (ordered or not task.get("deterministic"))
    tiles = shape["batch"] * p["row_tiles"] * heads
    tokens = shape["batch"] * shape["length"] * heads
    return {
        "query": tiles * 64 * head_dim * (1 if fused else p["token_parts"]), "dr_sums": tiles * 64 * shape["subnets"],
        "query_added": tiles, "dr_added": tiles * shape["subnets"],
        "weight_parts": (p["items"] - p["whole"]) * p["parts"] * 3 * 64 * head_dim, "r": tokens * shape["subnets"],
        "scale": tokens, "dr": tokens * shape["subnets"], "dw_parts": head_dim * shape["subnets"],
    }  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("shape", GROUP_SHAPES)
def test_groups_take_every_head_once_and_their_buffers_do_not_overlap(shape, task):
    shape = shape | {name: task[name] for name in ("head_dim", "subnets") if name in task}
    p = plan.plan_backward(**(shape | task))
    ordered = p["kernels"] == "ordered"
    ends = [end for _, end in p["heads"]]
    assert [begin for begin, _ in p["heads"]] == [0, *ends[:-1]] and ends[-1] == shape["heads"]
    sizes = [end - begin for begin, end in p["heads"]]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    for heads, places in zip(sizes, p["workspaces"], strict=True):
        one = plan.plan_head_group(shape["batch"], shape["length"], heads, shape["subnets"], shape["subnet_dim"])
        used = buffers_of(shape, task, heads, one, ordered)
        used = {name: size for name, size in used.items() if places[name] is not None}
        ranges = sorted((places[name], places[name] + size, name) for name, size in used.items())
        for (_, end, name), (begin, _, following) in zip(ranges, ranges[1:], strict=False):
            assert end <= begin, f"{name} reaches into {following}"
        assert all(begin % 64 == 0 for begin, _, _ in ranges)
        assert not ranges or max(end for _, end, _ in ranges) <= places["floats"]
        if places["sums_floats"]:
            cleared = [name for name in ("query", "dr_sums", "query_added", "dr_added") if name in used]
            assert places["query"] == 0 and ordered == ("query_added" in cleared)
            assert max(places[name] + used[name] for name in cleared) <= places["sums_floats"]
            assert all(places[name] >= places["sums_floats"] for name in used if name not in cleared)


def test_training_workspace_of_the_flagship():
    p = plan.plan_backward(8, 4032, **FLAGSHIP, router=True)
    assert max(w["floats"] for w in p["workspaces"]) <= 0.4 * 16 * 32256 * (128 + 2 * 22)  # of one launch


def test_index_range():
    with pytest.raises(ValueError, match="2\\^31"):
        plan.plan_head_group(1, 1 << 31, 16, 22, 384)
