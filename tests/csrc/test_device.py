"""The planners ask the context that a call runs in for its SMs: of a green context they are a part of the chip."""

import pytest
import torch
from processes import run_python

PROGRAM = """
import os, sys, torch
from flashmhf.ops import gated_flash_mhf

os.dup2(1, 2)  # FLASHMHF_LOG_PLANS writes to stderr
green = torch.cuda.green_contexts.GreenContext.create(16)
q = {}
for length in (16, 8192):  # a cluster of 16 CTAs where there is room for one; waves
    q[length] = torch.randn(length, 8, 64, device="cuda", dtype=torch.bfloat16)
k, u, v = (torch.randn(2, 32, 64, 64, device="cuda", dtype=torch.bfloat16) / 8 for _ in range(3))
w = torch.randn(8, 64, 32, device="cuda") / 8
torch.cuda.synchronize()

def call(name):
    for length, x in q.items():
        print(f"{name} {length}", flush=True)
        results[name, length] = gated_flash_mhf(x, k, u, v, w, 1e-20, backend="hopper")
    torch.cuda.synchronize()

results = {}
for name in sys.argv[1:]:
    if name == "green":
        green.set_context()
    call(name)
    if name == "green":
        green.pop_context()
for length in q:
    a, b = (results[name, length].float() for name in ("green", "chip"))
    assert torch.allclose(a, b, rtol=2e-2, atol=2e-2), (a - b).abs().max()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("order", [("green", "chip"), ("chip", "green")])
def test_a_green_context_is_planned_for_its_own_sms(needs_hopper, order):
    plan = pytest.importorskip("flashmhf._plan")
    if not torch.cuda.green_contexts.SUPPORTED:
        pytest.skip("this torch has no green contexts")
    printed = run_python("-c", PROGRAM, *order, FLASHMHF_LOG_PLANS="1")
    sms = {"green": 16, "chip": torch.cuda.get_device_properties(0).multi_processor_count}
    for name, all_sms in sms.items():
        said = printed.partition(f"{name} 8192\n")[2]
        clusters = (all_sms, all_sms // 2, *6 * [0])  # the candidates of so many rows ask for no others
        expected = plan.plan_forward(1, 8192, 8, 64, 32, 64, clusters=clusters, group=4)["candidates"]
        assert said.partition("\n")[2].startswith(expected), f"{name}: expected\n{expected}of\n{printed}"
