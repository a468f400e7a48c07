"""Standard output and standard error that no run ends for."""

from __future__ import annotations

import errno
import os
import signal
from typing import TextIO


class Stream:
    """A text stream that writes what its encoding lacks as escapes, and drops what can no longer be written.

    A reader that has closed its pipe and a full disk are noted in :attr:`error`; the command goes on, and its status tells in the end.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self.error is None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            except OSError as error:
                self._drop(error)
        return len(text)

    def flush(self) -> None:
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Point the descriptor to /dev/null: what is still buffered would fail again, with a traceback when Python ends."""
        self.error = error
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def status(self, status: int) -> int:
        """Return the exit status of a command that ended with ``status``: after a closed pipe that of a process which SIGPIPE ended."""
        if self.error is None or status:
            return status
        return 128 + signal.SIGPIPE if self.error.errno == errno.EPIPE else 2
