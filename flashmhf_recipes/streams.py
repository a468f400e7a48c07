"""Standard output and standard error that no run ends for."""

from __future__ import annotations

import os
from typing import TextIO


class Stream:
    """A text stream that writes what its encoding lacks as escapes, and drops what can no longer be written.

    A reader that has closed its pipe and a full disk are noted in :attr:`error`; the command goes on, and its status tells in the end.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self.error: OSError | None = None

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._attempt(self._stream.write, text.encode(self._encoding, "backslashreplace").decode(self._encoding))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action, *args) -> None:
        if self.error is None:
            try:
                action(*args)
            except OSError as error:
                self.error = error
                # What is still buffered would fail again, with a traceback when Python ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
