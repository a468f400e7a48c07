"""Numbers of csrc/*/policy.h that a reader may change: what they may not be stops the build with a sentence."""

import re
import shutil
import subprocess

import pytest
from processes import ROOT, script

from flashmhf.backends import hopper

USES = """
#include "backward/policy.h"
#include "forward/e4m3/policy.h"
#include "forward/f16/policy.h"
using namespace flashmhf;
template <typename... P> constexpr int sum() { return (P::shared_memory + ...); }
template <int d_h> constexpr int budgets() {
    int all = sum<ForwardPolicy<d_h>, ForwardFp8Policy<d_h, false>, ForwardFp8Policy<d_h, true>, TokenPolicy<d_h>>();
    if constexpr (d_h < 256) return all + sum<InterPolicy<d_h, all_grads>, InterPolicy<d_h, weight_grads>>();
    else return all + sum<InterPolicy<d_h, key_grads>, InterPolicy<d_h, value_grad>>();
}
static_assert(budgets<64>() + budgets<96>() + budgets<128>() + budgets<256>() > 0);
"""
CHANGES = [  # file, what stands there, what it becomes, what the compiler says
    ("forward/e4m3/policy.h", "few_rows && (d_h == 96 || d_h == 128)", "d_h == 128", "a consumer has one item"),
    ("forward/e4m3/policy.h", "? tile_inter : 32, chunks", "? tile_inter : 16, chunks", "two buffers of"),
    ("forward/e4m3/policy.h", "d_h == 64 ? 4 : 3;", "d_h == 64 ? 5 : 3;", "named barriers count four"),
    ("forward/e4m3/policy.h", "fp8_box_rows = 32", "fp8_box_rows = 64", "a box lies in one chunk"),
    ("forward/e4m3/policy.h", "gate_chunk = 28", "gate_chunk = 32", "a lane has a column"),
    ("forward/e4m3/policy.h", "d_h == 128 ? 6 : 3;", "d_h == 128 ? 7 : 3;", "does not fit the shared memory"),
    ("forward/f16/policy.h", "consumers = 2;", "consumers = 3;", "named barriers count two"),
    ("forward/f16/policy.h", "slice_box_rows = 32", "slice_box_rows = 48", "whole boxes"),
    ("forward/f16/policy.h", "q_in_registers ? 12 * 1024", "q_in_registers ? 160 * 1024", "does not fit"),
    ("backward/policy.h", "grad_buffers = 2;", "grad_buffers = 3;", "the other buffer"),
    ("backward/policy.h", "token_consumers = 2;", "token_consumers = 3;", "issue in turn"),
    ("backward/policy.h", "staged_slices = d_h == 128 ? 2", "staged_slices = d_h == 128 ? 4", "one or two slices"),
    ("backward/policy.h", "q_stages = d_h > 128 ? 2", "q_stages = d_h > 128 ? 1", "waits for the next one"),
    ("backward/policy.h", "static_assert(stages >= 2", "static_assert(stages >= 5", "waits for the next one"),
]  # fmt: skip


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(
    ("file", "old", "new", "says"), [(None, "", "", ""), *CHANGES], ids=lambda x: str(x)[:24] if x else ""
)
def test_a_number_that_the_kernels_cannot_take_stops_the_build(tmp_path, file, old, new, says):
    if file:
        text = (ROOT / "csrc" / file).read_text("utf-8")
        assert text.count(old) == 1, "the line that this changes is another one by now"
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text.replace(old, new), "utf-8")
    (tmp_path / "uses.cpp").write_text(USES, "utf-8")
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{tmp_path}", f"-I{ROOT}/csrc", tmp_path / "uses.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    if file is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode and re.search(f"static assertion failed: .*{says}", done.stderr), done.stderr


def test_the_tables_of_the_readmes_are_those_of_the_policies():
    policies, roofline = pytest.importorskip("flashmhf._plan").policies(), script("tools/roofline.py")
    pages = roofline.pages(policies)
    assert [path for path, (was, text) in pages.items() if was != text] == [], "python tools/roofline.py writes them"
    changed = [p | {"slots": p["slots"] + 1, "q_stages": 9, "stages": 9} if "slots" in p else p for p in policies]
    assert sum(was != text for was, text in roofline.pages(changed).values()) == 2


def test_python_offers_the_head_dimensions_of_each_direction():
    text = (ROOT / "csrc/common/head_dims.h").read_text("utf-8")
    lists = re.findall(r"^using (\w+) = HeadDims<(.+)>;$", text, re.M)
    dims = {name: tuple(map(int, sizes.split(","))) for name, sizes in lists}
    assert hopper.FORWARD_HEAD_DIMS == dims["ForwardHeadDims"] and hopper.BACKWARD_HEAD_DIMS == dims["BackwardHeadDims"]
    assert set(hopper.HEAD_DIMS) == set(dims["ForwardHeadDims"]) & set(dims["BackwardHeadDims"])
    assert set(hopper.HEAD_DIMS) <= set(dims["ForwardFp8HeadDims"]) & set(dims["QNormHeadDims"])
