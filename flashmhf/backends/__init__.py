"""Which back end runs: the first of hopper, triton, eager that supports the device, dtype and shape, or the one asked for."""

from __future__ import annotations

import functools
import types
import warnings
from dataclasses import dataclass

import torch

from . import eager, hopper, triton

BACKENDS: dict[str, types.ModuleType] = {"hopper": hopper, "triton": triton, "eager": eager}


@functools.cache
def select(backend: str, device: torch.device, dtype: torch.dtype, d_h: int, d_e: int, E: int, H: int) -> types.ModuleType:  # noqa: N803
    """The back end module for this device, dtype and shape.

    Raises ValueError for an unknown name and NotImplementedError for an explicit back end that cannot run, with the reason.
    """
    sizes = {"d_h": d_h, "d_e": d_e, "E": E, "H": H}
    if backend != "auto":
        if backend not in BACKENDS:
            raise ValueError(f"backend is {backend!r}; supported: 'auto', {', '.join(map(repr, BACKENDS))}")
        reason = BACKENDS[backend].why_not(device, dtype, **sizes)
        if reason is not None:
            raise NotImplementedError(f"backend={backend!r} cannot run: {reason}")
        return BACKENDS[backend]
    for name, module in BACKENDS.items():
        reason = module.why_not(device, dtype, **sizes)
        if reason is None:
            return module
        if name == "hopper":
            _warn_hopper_unused(device, reason)
    raise AssertionError("the eager back end supports everything")


@functools.cache
def _warn_hopper_unused(device: torch.device, reason: str) -> None:
    """Once per reason: a Hopper GPU without the Hopper kernels is slower than its owner expects."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == hopper.CAPABILITY:
        warnings.warn(f"flashmhf: this Hopper GPU does not get the hopper back end: {reason}", stacklevel=2)


@dataclass(frozen=True)
class Info:
    """What :func:`info` found: the back end chosen, and for every back end why it is not usable (None: usable)."""

    chosen: str | None
    reasons: dict[str, str | None]
    details: dict[str, object]

    def __str__(self) -> str:
        lines = [f"{name:<7} {'usable' if reason is None else f'not usable: {reason}'}" for name, reason in self.reasons.items()]
        if self.chosen is not None:
            lines.append(f"chosen  {self.chosen}")
        return "\n".join(lines + [f"{key}: {value}" for key, value in self.details.items()])


def info(q: torch.Tensor | None = None, k: torch.Tensor | None = None) -> Info:
    """Which back end serves q [..., H, d_h] and k [H, E, d_e, d_h], and why each other does not.

    Without arguments: what this machine has, judged by its first CUDA device (else the CPU), bf16 (fp32 on a CPU), d_h = 128.
    """
    if (q is None) != (k is None):
        raise ValueError("info takes both q and k, or neither")
    if q is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        sizes = {"d_h": 128, "d_e": 384, "E": 1, "H": 1}
    else:
        device, dtype = q.device, q.dtype
        sizes = dict(zip(("H", "E", "d_e", "d_h"), k.shape, strict=True))
    reasons = {name: module.why_not(device, dtype, **sizes) for name, module in BACKENDS.items()}
    details: dict[str, object] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
    }
    if hopper.library() is None:
        details["hopper library"] = hopper.build_info()
    chosen = next(name for name, reason in reasons.items() if reason is None)
    return Info(None if q is None else chosen, reasons, details)
