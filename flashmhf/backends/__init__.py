"""Which back end runs: the first of hopper, triton, eager that supports the device, dtype and shape, or the one asked for."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, field

import torch

from .. import checks
from . import eager, hopper, triton
from . import reference as definition
from .contract import Backend

BACKENDS: dict[str, Backend] = {"hopper": hopper, "triton": triton, "eager": eager}  # in the order in which "auto" takes them
REFERENCE = "reference"  # the definition in plain operations; only by name
NAMES = ("auto", *BACKENDS, REFERENCE)


def check_name(backend: object, *, names: tuple[str, ...] = NAMES) -> None:
    """TypeError for what is not a string, ValueError for a name that is not in ``names``."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a str, got {type(backend).__name__}")
    if backend not in names:
        raise ValueError(f"backend is {backend!r}; supported: {', '.join(map(repr, names))}")


@functools.cache
def select(backend: str, device: torch.device, dtype: torch.dtype, d_h: int, d_e: int, activation: str = "silu") -> Backend:
    """The back end for this device, dtype and shape.

    Raises ValueError for an unknown name and NotImplementedError for an explicit back end that cannot run, with the reason.
    """
    if backend != "auto":
        check_name(backend)
        chosen = definition if backend == REFERENCE else BACKENDS[backend]
        reason = chosen.why_not(device, dtype, d_h=d_h, d_e=d_e, activation=activation)
        if reason is not None:
            raise NotImplementedError(f"backend={backend!r} cannot run: {reason}")
        return chosen
    for name, candidate in BACKENDS.items():
        reason = candidate.why_not(device, dtype, d_h=d_h, d_e=d_e, activation=activation)
        if reason is None:
            return candidate
        if name == "hopper":
            _warn_hopper_unused(device, reason)
    raise AssertionError("the eager back end supports everything")


@functools.cache
def _warn_hopper_unused(device: torch.device, reason: str) -> None:
    """Once per reason: a Hopper GPU without the Hopper kernels is slower than its owner expects."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == hopper.CAPABILITY:
        warnings.warn(f"flashmhf: this Hopper GPU does not get the hopper back end: {reason}", stacklevel=2)


@dataclass(frozen=True)
class Info:
    """What :func:`info` found: the back end chosen, and for every back end why it is not usable (None: usable).

    ``other_devices`` has the same reasons for each CUDA device that :func:`info` was not asked about, by "cuda:INDEX (NAME)".
    """

    chosen: str | None
    reasons: dict[str, str | None]
    details: dict[str, object]
    other_devices: dict[str, dict[str, str | None]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = _lines(self.reasons)
        if self.chosen is not None:
            lines.append(f"chosen  {self.chosen}")
        lines += [f"{key}: {value}" for key, value in self.details.items()]
        for device, reasons in self.other_devices.items():
            lines += [f"{device}:", *("  " + line for line in _lines(reasons))]
        return "\n".join(lines)


def _lines(reasons: dict[str, str | None]) -> list[str]:
    return [f"{name:<7} {'usable' if reason is None else f'not usable: {reason}'}" for name, reason in reasons.items()]


def _reasons(device: torch.device, dtype: torch.dtype, d_h: int, d_e: int, activation: str = "silu") -> dict[str, str | None]:
    return {name: module.why_not(device, dtype, d_h=d_h, d_e=d_e, activation=activation) for name, module in BACKENDS.items()}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def info(q: torch.Tensor | None = None, k: torch.Tensor | None = None, *, activation: str = "silu") -> Info:
    """Which back end serves q [..., H, d_h] and k [H_kv, E, d_e, d_h], and why each other does not.

    Without arguments: what this machine has, judged by the current CUDA device (else the CPU) with bf16 (fp32 on a CPU), d_h = 128 and
    d_e = 384; ``other_devices`` has the other CUDA devices. This initialises CUDA in the process, after which a fork cannot use CUDA.

    Raises TypeError for dtypes and non-tensors, ValueError for shapes, strides and devices, and for one argument without the other.
    """
    if (q is None) != (k is None):
        raise ValueError(f"{'q' if q is None else 'k'} is None; info takes both q and k, or neither")
    others: dict[str, dict[str, str | None]] = {}
    if q is None:
        on_gpu = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        case = (torch.bfloat16 if on_gpu else torch.float32, 128, 384)
        for index in range(torch.cuda.device_count() if on_gpu else 0):
            if index != device.index:
                other = torch.device("cuda", index)
                others[f"{other} ({_device_name(other)})"] = _reasons(other, *case, activation=activation)
    else:
        checks.tensors(q=q, k=k)
        checks.operands(q, k, k, k)
        device, case = q.device, (q.dtype, k.shape[3], k.shape[2])
    checks.activation(activation)
    reasons = _reasons(device, *case, activation=activation)
    details: dict[str, object] = {"device": _device_name(device), "torch": torch.__version__}
    if hopper.library() is None:
        details["hopper library"] = hopper.build_info()
    chosen = next(name for name, reason in reasons.items() if reason is None)
    return Info(None if q is None else chosen, reasons, details, others)
