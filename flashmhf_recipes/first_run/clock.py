"""The time of the bare command, which ends within three minutes on any machine, and names what it leaves out for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """The seconds that a run may take, since ``start`` (by time.monotonic), and what it has left out."""

    limit: float
    start: float
    left_out: list[str] = field(default_factory=list)

    def left(self, share: float = 1.0) -> float:
        """Return the seconds until ``share`` of the limit."""
        return self.limit * share - (time.monotonic() - self.start)
