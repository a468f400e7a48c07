"""FLASHMHF_NVTX=1 marks each operator call as an NVTX range, seen by a tool of ours in place of a profiler."""

import shutil
import subprocess

import pytest
from processes import run_python

# What a profiler does: NVTX loads it, and it puts its functions into the table of callbacks
# (nvtx3/nvtxDetail/nvtxTypes.h).
TOOL = r"""
#include <stddef.h>
#include <stdio.h>
enum { callbacks_table = 1, core2_module = 5, range_push = 4, range_pop = 5, domain_create = 12 };
typedef void (*function)(void);
struct callbacks { size_t size; int (*module_functions)(int module, function ***table, unsigned *size); };
struct event { unsigned short version, size; unsigned category; int color_type; unsigned color;
               int payload_type, reserved; long long payload; int message_type; const char *message; };
static void *create(const char *name) { printf("domain %s\n", name); fflush(stdout); return (void *)create; }
static int push(void *domain, const struct event *e) {
    if (domain == (void *)create) printf("push %s, payload %lld\n", e->message, e->payload);
    return fflush(stdout);
}
static int pop(void *domain) { if (domain == (void *)create) puts("pop"); return fflush(stdout); }
int InitializeInjectionNvtx2(const void *(*export_table)(unsigned)) {
    const struct callbacks *callbacks = export_table(callbacks_table);
    function **table; unsigned size;
    if (!callbacks || !callbacks->module_functions(core2_module, &table, &size)) return 0;
    *table[domain_create] = (function)create;
    *table[range_push] = (function)push;
    *table[range_pop] = (function)pop;
    return 1;
}
"""
PROGRAM = """
import torch, flashmhf
module = flashmhf.FlashMHF(128, 2, 2, 64, backend="hopper", device="cuda", dtype=torch.bfloat16)
module(torch.randn(100, 128, device="cuda", dtype=torch.bfloat16)).sum().backward()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("enabled", ["1", "0"])
def test_hopper_ranges(needs_hopper, tmp_path, enabled):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, tool = tmp_path / "tool.c", tmp_path / "tool.so"
    source.write_text(TOOL)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tool, source], check=True)
    lines = run_python("-c", PROGRAM, FLASHMHF_NVTX=enabled, NVTX_INJECTION64_PATH=str(tool)).splitlines()
    ours = [line for line in lines if line.startswith(("domain", "push", "pop"))]
    shape = "T=100 H=2 d_h=64 E=2 d_e=64, payload 100"
    both = [line for name in ("gated_forward", "gated_backward") for line in (f"push {name} {shape}", "pop")]
    assert [line for line in ours if line != "domain flashmhf"] == (both if enabled == "1" else [])
    assert ("domain flashmhf" in ours) == (enabled == "1")
