"""The token files of the corpus (README.md says how they are made), and the batches of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from runs import Run
from torch import Tensor

PASSES = 4  # over the corpus, at most


class Tokens:
    """Token ids on the device, int32: pieces to train on, train-NN.bin, and validation text by kind, val-KIND.bin."""

    def __init__(self, directory: Path, device: str):
        def read(pattern: str) -> dict[str, Tensor]:
            files = {path.stem.partition("-")[2]: np.fromfile(path, np.uint16) for path in directory.glob(pattern)}
            return {name: torch.from_numpy(files[name].astype(np.int32)).to(device) for name in sorted(files)}

        self.stored = json.loads((directory / "tokens.json").read_text(encoding="utf-8"))
        self.pieces, self.validation = list(read("train-*.bin").values()), read("val-*.bin")
        self.bytes = sum(each.nbytes for each in (*self.pieces, *self.validation.values()))

    def described(self) -> dict[str, object]:
        """What a run's line says of its text: passes are its tokens over ``tokens``."""
        text = hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in self.validation.values()))
        found = {"tokenizer_sha256": self.stored["tokenizer_sha256"], "pieces": len(self.pieces)}
        return found | {"tokens": sum(map(len, self.pieces)), "validation_sha256": text.hexdigest()}

    def batches(self, run: Run, first: int) -> Iterator[Tensor]:
        """Batches [batch, context + 1] from step ``first`` on.

        A pass goes through the pieces in their order, and through the windows of each in one drawn from the seed; each
        window is seen once a pass, and has other borders in the next. Raises ValueError for more than four passes.
        """
        passes = run.steps * run.batch_tokens / sum(map(len, self.pieces))
        if passes > PASSES:
            raise ValueError(f"{run.name}: steps is {run.steps}, {passes:.1f} passes over the text; at most {PASSES}")
        device = self.pieces[0].device
        window = torch.arange(run.context + 1, device=device)
        for drawn in range(PASSES * 2 * len(self.pieces)):
            tokens = self.pieces[drawn % len(self.pieces)]
            generator = torch.Generator().manual_seed((run.seed << 32) + drawn)
            shift = int(torch.randint(run.context, (), generator=generator))
            starts = torch.randperm((len(tokens) - 1 - shift) // run.context, generator=generator) * run.context + shift
            batches = starts[: len(starts) // run.batch * run.batch].to(device).view(-1, run.batch)
            for chosen in batches[first:]:
                yield tokens[chosen[:, None] + window]
            first = max(0, first - len(batches))
