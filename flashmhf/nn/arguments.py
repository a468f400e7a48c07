"""Checks of constructor arguments: TypeError for types, ValueError for values.

Each names the argument, what it got and what is supported.
"""

from __future__ import annotations

import numbers
import operator

import torch

from .. import backends, checks


def positive(name: str, size: object) -> int:
    """``size`` as an int of at least 1. TypeError for what is no integer (NumPy's are integers, a bool is not), ValueError below 1."""
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
    """``size`` as an int of at least 1 that divides ``total``; ``total`` where it is None."""
    value = total if size is None else positive(name, size)
    if total % value:
        raise ValueError(f"{name} is {value}; it must divide {of} = {total}")
    return value


def activation(value: object) -> str:
    checks.activation(value)
    return value


def epsilon(name: str, value: object) -> float:
    """``value`` as a finite float of at least 0; TypeError for what is no real number, ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a float, got {type(value).__name__}")
    checks.epsilon(name, value)
    return float(value)


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return value


def check_dtype(dtype: object) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, got {type(dtype).__name__}")
    if dtype is not None and dtype not in checks.FLOAT_DTYPES:
        raise TypeError(f"dtype is {checks.name_of(dtype)}; supported: {', '.join(map(checks.name_of, checks.FLOAT_DTYPES))}")


def backend_and_deterministic(backend: object, deterministic: object, *, more: tuple[str, ...] = ()) -> tuple[str, bool | None]:
    """Both settings of an operator, checked; ``more`` are names that a module takes beside those of the operator."""
    backends.check_name(backend, names=(*backends.NAMES, *more))
    if deterministic is not None and not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool or None, got {type(deterministic).__name__}")
    return backend, deterministic
