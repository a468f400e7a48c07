"""What commands share: a parser whose errors are exceptions, flags made from a dataclass, values and devices."""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import types
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

from .errors import OptionError, refuse

_TRUTH = {"yes": True, "on": True, "true": True, "1": True, "no": False, "off": False, "false": False, "0": False}


class Parser(argparse.ArgumentParser):
    """argparse's, but an error is an OptionError, so that all errors are printed alike."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> typing.NoReturn:
        raise OptionError(f"{message}; {self.prog} --help says what there is")

    def parse_args(self, args=None, namespace=None):
        given = super().parse_args(args, namespace)
        for name, value in vars(given).items():
            if name != "prompt":
                refuse_empty(name, value)
        return given


def refuse_empty(name: str, value: object) -> None:
    """Raise OptionError for a text that is empty, as of a variable that is not set: as a path, it would be "."."""
    empty = value == "" or (isinstance(value, list) and "" in value)
    refuse(empty, f"{name} is {value!r}; leave it out or give a text that is not empty")


def one_path(path: str | os.PathLike) -> str:
    """Return the one spelling of a path: absolute, and without ``~``, ``..`` and symbolic links."""
    return os.path.realpath(os.path.expanduser(path))


def assignment(text: str) -> tuple[str, str]:
    """Return (name, value) of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def parsed(text: str, kind: Any) -> object:
    """Return the first reading of ``text`` that ``kind`` has: JSON, Python, yes and no; else the text itself."""
    for read in (json.loads, ast.literal_eval, lambda text: _TRUTH[text.lower()]):
        with suppress(ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
            if fits(value := read(text), kind):
                return value
    return text


def fits(value: object, kind: Any) -> bool:
    """Return whether ``value`` is of a field's type. An integer is a float, too; a truth value is no number, a text is
    none of them, and NaN is nothing."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in args)
    if origin is typing.Literal:
        return isinstance(value, str) and value in args
    if origin is list or kind is list:
        return isinstance(value, list | tuple) and all(fits(each, args[0] if args else Any) for each in value)
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or kind)


def check_value(named: str, value: object, kind: Any, supported: tuple[str, Callable] | None = None) -> None:
    """Raise OptionError for a value that is not of the type, not what is ``supported``, or that JSON cannot hold."""
    if value is None and fits(None, kind):  # as of a preset
        return
    literal = typing.get_origin(kind) is typing.Literal
    shown = ", ".join(typing.get_args(kind)) if literal else getattr(kind, "__name__", str(kind))
    text, holds = supported or (shown, lambda _: True)
    try:
        inside = fits(value, kind) and holds(value) and bool(json.dumps(value))
    except (TypeError, OverflowError):  # what is in a dictionary may be of any type; infinity is no integer
        inside, text = False, "values that JSON has"
    refuse(not inside, f"{named} {value!r}; supported: {text}")


def chosen_device(name: str):
    """Return the torch.device of ``name``. Raises ValueError if this machine does not have it."""
    import torch

    gpus = torch.cuda.device_count()
    try:
        device = torch.device(("cuda" if gpus else "cpu") if name == "auto" else name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; supported: auto, cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(f"device is {name!r}; this PyTorch sees {gpus or 'no'} CUDA GPUs")
    return device


def add_options(parser: argparse.ArgumentParser, owner: type, kinds: dict[str, Any]) -> None:
    """Add a flag for every field with ``help`` in its metadata, which may hold ``group``, ``flag`` and ``metavar``."""
    for entry in (entry for entry in fields(owner) if "help" in entry.metadata):
        kind = kinds[entry.name]
        if isinstance(kind, types.UnionType):
            kind = typing.get_args(kind)[0]  # of X | None
        args = typing.get_args(kind)
        if "group" in entry.metadata:
            group = parser.add_argument_group(entry.metadata["group"])
        by_kind = {
            bool: {"action": argparse.BooleanOptionalAction},
            typing.Literal: {"choices": args},
            list: {"nargs": "+", "type": args and args[0]},
            dict: {"action": "append", "type": assignment, "metavar": "NAME=VALUE"},
        }
        settings = dict(by_kind.get(typing.get_origin(kind) or kind, {"type": kind}))
        if "metavar" in entry.metadata:
            settings["metavar"] = entry.metadata["metavar"]
        shown = f" ({entry.default})" if isinstance(entry.default, int | float | str) and kind is not bool else ""
        flag = entry.metadata.get("flag", "--" + entry.name.replace("_", "-"))
        settings |= {"dest": entry.name, "default": argparse.SUPPRESS, "help": entry.metadata["help"] + shown}
        group.add_argument(flag, **settings)
