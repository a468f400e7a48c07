"""The seconds that the bare command may take."""

from __future__ import annotations

import math
import time


class Clock:
    """The seconds that a run may take, since ``start``, and what it has left out."""

    def __init__(self, limit: float = math.inf, start: float | None = None):
        self.limit, self.start = limit, time.monotonic() if start is None else start
        self.left_out: list[str] = []

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until ``share`` of the limit."""
        return self.limit * share - (time.monotonic() - self.start)
