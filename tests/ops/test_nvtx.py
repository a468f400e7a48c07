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
enum { callbacks_table = 1, core_module = 1, range_push_a = 9, range_pop = 11 };
typedef void (*function)(void);
struct callbacks { size_t size; int (*module_functions)(int module, function ***table, unsigned *size); };
static int push(const char *name) { printf("push %s\n", name); return fflush(stdout); }
static int pop(void) { puts("pop"); return fflush(stdout); }
int InitializeInjectionNvtx2(const void *(*export_table)(unsigned)) {
    const struct callbacks *callbacks = export_table(callbacks_table);
    function **table; unsigned size;
    if (!callbacks || !callbacks->module_functions(core_module, &table, &size)) return 0;
    *table[range_push_a] = (function)push;
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
    ours = [line for line in lines if line.startswith("push flashmhf")]
    assert ours == (["push flashmhf gated_forward", "push flashmhf gated_backward"] if enabled == "1" else [])
    assert lines.count("pop") >= len(ours)  # PyTorch may mark ranges of its own, whose ends look the same
