"""Checks of constructor arguments: TypeError for types, ValueError for values.

Each names the argument, what it got and what is supported.
"""

from __future__ import annotations

import operator
from numbers import Real

import torch

from .. import backends, checks


def positive(name: str, size: object) -> int:
    """Return `size` as an int.

    Raises TypeError if it is not an integer (a bool is not one), ValueError if it is below 1.
    """
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
    """Return `size` as an int, or `total` if it is None.

    Raises as :func:`positive` does, and ValueError if it does not divide `total`.
    """
    value = total if size is None else positive(name, size)
    if total % value:
        raise ValueError(f"{name} is {value}; it must divide {of} = {total}")
    return value


def epsilon(name: str, value: object) -> float:
    """Return `value` as a float.

    Raises TypeError if it is not a real number, ValueError if it is negative or not finite.
    """
    if isinstance(value, bool):
        raise TypeError(f"{name} must be a float, got bool")
    checks.instance(name, value, Real, "a float")
    checks.epsilon(name, value)
    return float(value)


def flag(name: str, value: object) -> bool:
    """Return `value`. Raises TypeError if it is not a bool."""
    checks.instance(name, value, bool)
    return value


def check_dtype(dtype: object) -> None:
    """Raise TypeError if ``dtype`` is neither None nor one that weights can have."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, got {type(dtype).__name__}")
    if dtype is not None and dtype not in checks.FLOAT_DTYPES:
        raise TypeError(
            f"dtype is {checks.name_of(dtype)}; supported: {', '.join(map(checks.name_of, checks.FLOAT_DTYPES))}"
        )


def backend_and_deterministic(
    backend: object, deterministic: object, *, more: tuple[str, ...] = ()
) -> tuple[str, bool | None]:
    """Return both settings of an operator, checked.

    ``more``: back ends that a module has beside those of the operator.
    """
    backends.check_name(backend, names=(*backends.NAMES, *more))
    checks.instance("deterministic", deterministic, bool | None, "a bool or None")
    return backend, deterministic
