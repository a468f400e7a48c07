"""A training step of one layer as PyTorch's profiler sees it: the host's ranges, and the kernels on the GPU."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

import torch
from torch.profiler import record_function

import flashmhf

from ..harness.measure import Context
from .inference import D_FF, SIZES, compiled

RANGES, TOKENS, WARM_UP = ("forward", "backward"), 16_384, 5


@dataclass(frozen=True)
class TimelineCell:
    """``ranges`` and ``kernels`` of a step: [name, first microsecond, microseconds], from the first range on."""

    tokens: int

    def measure(self, context: Context) -> list[dict]:
        like = {"device": context.device, "dtype": context.dtype}
        networks = {"flashmhf": flashmhf.FlashMHF(*SIZES, **like), "swiglu": flashmhf.SwiGLU(SIZES[0], D_FF, **like)}
        rows = []
        for name, network in networks.items():
            module = compiled(network)
            x = torch.randn(self.tokens, SIZES[0], **like, requires_grad=True)
            for step in range(WARM_UP + 1):
                profile = torch.profiler.profile()
                with profile if step == WARM_UP else record_function("warm-up"):
                    with record_function("forward"):
                        out = module(x)
                    with record_function("backward"):
                        torch.autograd.grad(out, [x, *module.parameters()], x.detach())
                    if x.is_cuda:
                        torch.cuda.synchronize()
            found: dict[bool, list] = {True: [], False: []}  # on the GPU, on the host
            for event in sorted(profile.events(), key=lambda event: event.time_range.start):
                on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
                if on_gpu != (event.name in RANGES):
                    title = re.sub(r"^void |[<(].*", "", event.name)
                    found[on_gpu].append([title, event.time_range.start, event.time_range.elapsed_us()])
            begin = found[False][0][1]
            ranges, kernels = ([[title, start - begin, us] for title, start, us in found[on]] for on in (False, True))
            rows.append({"T": self.tokens, "subject": name, "status": "ok", "ranges": ranges, "kernels": kernels})
        return rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="T", help=f"of the batch ({TOKENS})")


def cells(options: argparse.Namespace, context: Context) -> list[TimelineCell]:
    return [TimelineCell(options.tokens)]
