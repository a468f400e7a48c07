"""Another GPU's Triton code on this GPU: what it makes of a kernel for sm_80 (mma.sync, cp.async, no tensor maps), say,
assembled for this GPU. The instructions are the other GPU's; clocks, memory and shared memory are this one's.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable

import torch


def capability(text: str) -> tuple[int, int]:
    """Return (8, 0) for "sm80". Raises ValueError for anything else than "sm" and a capability."""
    found = re.fullmatch(r"sm(\d+)(\d)", text)
    if found is None:
        raise ValueError(f"an architecture is sm80, sm89, ...; got {text!r}")
    return int(found[1]), int(found[2])


def pretend(architecture: str) -> None:
    """Have this process, and processes that it starts, make Triton code for ``architecture``; flashmhf's back end takes
    that GPU's kernels and block shapes. To be called before anything is launched.
    """
    instead = capability(architecture)
    os.environ["TRITON_OVERRIDE_ARCH"] = architecture  # Triton's own, read whenever it compiles
    from flashmhf.backends.triton import launch

    here = launch.gpu
    launch.gpu = functools.cache(lambda device: here(device)._replace(capability=instead))


def of_triton(call: Callable) -> Callable:
    """Return ``call`` compiled so that its products are Triton's own, tuned, where this process pretends; else itself:
    cuBLAS and others have no code for another GPU than this."""
    return torch.compile(call, dynamic=False, options=options()) if "TRITON_OVERRIDE_ARCH" in os.environ else call


def options() -> dict[str, object] | None:
    """Return Inductor's options for that."""
    if "TRITON_OVERRIDE_ARCH" not in os.environ:
        return None
    return {"max_autotune": True, "max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON"}
