"""Argument checks of operators, back ends, modules and functions.

Each refusal names the argument, what it got and what is supported: TypeError for dtypes and wrong types, ValueError for
values, shapes, strides and devices. Those of operators run below autograd, so no mode skips them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from numbers import Real
from types import UnionType
from typing import Any

import torch
from torch import Tensor

from .reference import ACTIVATIONS

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


FLOATS = ", ".join(map(name_of, FLOAT_DTYPES))


# Plain values


def instance(name: str, value: Any, kind: type | UnionType, shown: str | None = None) -> Any:
    """Return the value. Raises TypeError unless it is a ``kind``, which the message calls ``shown`` or by its name."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {shown or f'a {kind.__name__}'}, got {type(value).__name__}")
    return value


def flag(name: str, value: object) -> bool:
    """Return the value. Raises TypeError if it is not a bool."""
    return instance(name, value, bool)


def positive(name: str, size: object) -> int:
    """Return the size as an int. Raises TypeError if it is not an integer or is a bool, ValueError if it is below 1."""
    try:
        if type(size).__name__ in ("bool", "bool_"):  # NumPy's too, which some of its versions take for an index
            raise TypeError
        value = operator.index(size)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(size).__name__}") from None
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    return value


def divisor(name: str, size: object, of: str, total: int) -> int:
    """Return the size, or ``total`` if it is None. Raises as :func:`positive`, and ValueError unless it divides it."""
    value = total if size is None else positive(name, size)
    if total % value:
        raise ValueError(f"{name} is {value}; it must divide {of} = {total}")
    return value


def not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:  # false for NaN
        raise ValueError(f"{name} is {value}; supported: finite numbers from 0")


def epsilon(name: str, value: object) -> float:
    """Return the value as a float. Raises TypeError unless it is a real number, ValueError unless finite and >= 0."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a float, got bool")
    not_negative(name, instance(name, value, Real, "a float"))
    return float(value)


def choice(name: str, value: object, supported: Iterable[str]) -> str:
    """Return the value. Raises TypeError unless it is a string, ValueError unless it is one of those supported."""
    if instance(name, value, str) not in supported:
        raise ValueError(f"{name} is {value!r}; supported: {', '.join(map(repr, supported))}")
    return value


def activation(value: object) -> None:
    choice("activation", value, ACTIVATIONS)


def weight_dtype(dtype: object) -> None:
    """Raise TypeError if ``dtype`` is neither None nor one that weights can have."""
    if instance("dtype", dtype, torch.dtype | None, "a torch.dtype or None") not in (None, *FLOAT_DTYPES):
        raise TypeError(f"dtype is {name_of(dtype)}; supported: {FLOATS}")


# Tensors


def tensors(**arguments: object) -> None:
    """Raise TypeError for the first argument that is not a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):  # on every call's way: without another call
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def strided(**arguments: object) -> None:
    """Raise TypeError for the first argument that is not a tensor of dense memory; the dispatcher would not name it."""
    tensors(**arguments)
    for name, value in arguments.items():
        if value.is_nested:  # some of these have the strided layout
            raise TypeError(f"{name} is a nested tensor; supported: dense tensors, such as its values()")
        if value.layout != torch.strided:
            raise TypeError(f"{name} has layout {value.layout}; supported: torch.strided")


def expect_device(name: str, tensor: Tensor, q: Tensor, *, of: str = "q") -> None:
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device} but {of} is on {q.device}; all tensors must be on one device")


def expect_dtype(name: str, tensor: Tensor, q: Tensor, *, or_float32: bool = False, of: str = "q") -> None:
    if tensor.dtype == q.dtype or (or_float32 and tensor.dtype == torch.float32):
        return
    alternative = "float32 or " if or_float32 and q.dtype != torch.float32 else ""
    supported = f"{alternative}{name_of(q.dtype)} ({of}'s dtype)"
    raise TypeError(f"{name} has dtype {name_of(tensor.dtype)}; supported: {supported}")


def expect_shape(name: str, tensor: Tensor, expected: tuple, meaning: str) -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{name} has shape {list(tensor.shape)}; expected {list(expected)} ({meaning})")


def expect_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        found = f"strides {list(tensor.stride())} for shape {list(tensor.shape)}"
        raise ValueError(f"{name} has {found}; it must be contiguous")


def expect_like(
    name: str, tensor: Tensor, like: Tensor, size: tuple, meaning: str, *, or_float32: bool = False, of: str = "q"
) -> None:
    """Refuse another dtype or device than those of ``like``, called ``of``, and another shape than ``size``."""
    expect_dtype(name, tensor, like, or_float32=or_float32, of=of)
    expect_device(name, tensor, like, of=of)
    expect_shape(name, tensor, size, meaning)


def floating(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} has dtype {name_of(tensor.dtype)}; supported: {FLOATS}")


def weight_shape(k: Tensor, name: str = "k") -> None:
    if k.dim() != 4:
        raise ValueError(f"{name} has shape {list(k.shape)}; expected four dimensions [H_kv, E, d_e, d_h]")
    for size, dimension in zip(k.shape, ("H_kv", "E", "d_e", "d_h"), strict=True):
        if size < 1:
            raise ValueError(f"{name} has shape {list(k.shape)}; {dimension} must be at least 1")


def networks(k: Tensor, u: Tensor, v: Tensor, like: Tensor, of: str, contiguous: bool = True) -> None:
    """Refuse k, u, v of another dtype or device than ``like``, called ``of``, and u and v of another shape than k."""
    for name, tensor in (("k", k), ("u", u), ("v", v)):
        # on every call's way: asked first without calls
        if tensor.shape != k.shape or tensor.dtype != like.dtype or tensor.device != like.device:
            expect_like(name, tensor, like, k.shape, "k's shape [H_kv, E, d_e, d_h]", of=of)
        if contiguous:
            expect_contiguous(name, tensor)


def operands(q: Tensor, k: Tensor, u: Tensor, v: Tensor, *, contiguous: bool = True) -> None:
    """Refuse all but q [..., H, d_h] and k, u, v [H_kv, E, d_e, d_h] of one dtype on one device, H a multiple of H_kv.
    k, u, v must be contiguous unless ``contiguous`` is False. The dispatcher lets None pass for a tensor.
    """
    tensors(q=q, k=k, u=u, v=v)
    floating("q", q)
    if q.dim() < 2:
        raise ValueError(f"q has shape {list(q.shape)}; expected at least two dimensions [..., H, d_h]")
    weight_shape(k)
    if q.shape[-2] < 1 or q.shape[-2] % k.shape[0] or k.shape[3] != q.shape[-1]:
        expected = f"an H_kv that divides H = {q.shape[-2]} and d_h = {q.shape[-1]} from q {list(q.shape)}"
        raise ValueError(f"k has shape {list(k.shape)}; expected [H_kv, E, d_e, d_h] with {expected}")
    networks(k, u, v, q, "q", contiguous)


def router(q: Tensor, w: Tensor, eps: float, k: Tensor | None = None, *, contiguous: bool = True) -> None:
    """Refuse all but w [H, d_h, E] in float32 or q's dtype, contiguous unless that is False; E from k if given."""
    tensors(w=w)
    not_negative("eps", eps)
    expect_dtype("w", w, q, or_float32=True)
    expect_device("w", w, q)
    if w.dim() != 3:
        raise ValueError(f"w has shape {list(w.shape)}; expected three dimensions [H, d_h, E]")
    subnets = w.shape[2] if k is None else k.shape[1]
    expect_shape("w", w, (q.shape[-2], q.shape[-1], subnets), "[H, d_h, E]")
    if contiguous:
        expect_contiguous("w", w)


def gate(q: Tensor, k: Tensor, r: Tensor | tuple[Tensor, float] | None, *, contiguous: bool = True) -> None:
    """Refuse all but r [..., H, E] with q's leading dimensions, float32 or q's dtype; a router's w and eps; or None."""
    if isinstance(r, tuple):
        router(q, *r, k, contiguous=contiguous)
    elif r is not None:
        expect_like("r", r, q, (*q.shape[:-1], k.shape[1]), "q's leading dimensions and H, then E", or_float32=True)


def projection(name: str, weight: Tensor, bias: Tensor | None, x: Tensor) -> None:
    """Refuse all but ``name``_w [N, K] and ``name``_bias [N] of a linear layer, in x's dtype, on its device."""
    expect_dtype(f"{name}_w", weight, x, of="x")
    expect_device(f"{name}_w", weight, x, of="x")
    if bias is not None:
        expect_like(f"{name}_bias", bias, x, (weight.shape[0],), f"the rows of {name}_w", of="x")
