"""What commands share: a parser whose errors are exceptions, flags made from a dataclass, devices by name."""

from __future__ import annotations

import argparse
import json
import typing
from dataclasses import fields

from .errors import OptionError


class Parser(argparse.ArgumentParser):
    """argparse's, but an error is an OptionError, so that all errors are printed alike."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> typing.NoReturn:
        raise OptionError(f"{message}; {self.prog} --help lists the options")


def positive_integer(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 on")
    return int(text)


def assignment(text: str) -> tuple[str, object]:
    """Return (name, value) of NAME=VALUE; the value is JSON, or the text itself."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


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


def add_options(parser: argparse.ArgumentParser, owner: type, types: dict[str, typing.Any]) -> None:
    """Add a flag for every field with ``help`` in its metadata, which may hold ``group``, ``flag`` and ``metavar``."""
    for entry in (entry for entry in fields(owner) if "help" in entry.metadata):
        kind = types[entry.name]
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
