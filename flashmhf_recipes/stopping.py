"""What ends a training run early: SIGTERM and SIGINT, which finish and save the step."""

from __future__ import annotations

import os
import signal
import threading
import time

import torch

# torchrun passes on a signal that its workers have received already, as from Ctrl-C in a terminal.
REPEAT_SECONDS = 2.0 if "TORCHELASTIC_RUN_ID" in os.environ else 0.0


class Stopped(KeyboardInterrupt):  # noqa: N818, no error: the run did what it was asked to
    """``signum`` ended the run after ``step``, which is saved, or 0. No ``except Exception`` swallows it on the way."""

    def __init__(self, signum: int, step: int):
        self.signum, self.step = signum, step
        done = f"after step {step}, which is saved" if step else "before the first step"
        super().__init__(f"stopped by {signal.Signals(signum).name} {done}")


class StopSignals:
    """Take SIGTERM and SIGINT in the main thread. Outside :attr:`stepping`, a signal raises :class:`Stopped`."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.stepping = False
        self._since = 0.0
        self._before: dict[int, object] = {}
        self._group = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            # A shell makes its background jobs ignore SIGINT; that stays.
            both = signal.SIGTERM, signal.SIGINT
            taken = [number for number in both if signal.getsignal(number) is not signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._handle) for number in taken}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, frame) -> None:
        if self.received is not None:
            if time.monotonic() - self._since >= REPEAT_SECONDS:
                os._exit(128 + signum)
            return
        self.received, self._since = signum, time.monotonic()
        if not self.stepping:
            raise Stopped(signum, 0)
        name = signal.Signals(signum).name
        os.write(2, f"\nflashmhf: {name}: saving after this step; a second signal ends at once\n".encode())

    def begin_steps(self) -> None:
        """From here on a step is finished first. Every process of a distributed run calls this."""
        if torch.distributed.is_initialized() and self._group is None:
            # Gloo: the processes agree on the host; NCCL would make every step wait for the GPU.
            self._group = torch.distributed.new_group(backend="gloo")
        self.stepping = True

    def agreed(self) -> bool:
        """Return whether some process has received a signal. All of them call this at the same steps."""
        received = torch.tensor(self.received or 0)
        if self._group is not None:
            torch.distributed.all_reduce(received, torch.distributed.ReduceOp.MAX, self._group)
        if received and self.received is None:
            self.received = int(received)
        return bool(received)
