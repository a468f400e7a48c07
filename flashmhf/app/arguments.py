"""Argument types that the sub-commands share."""

from __future__ import annotations

import argparse


def positive_integer(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
