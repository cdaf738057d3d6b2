"""Ctrl-C and SIGTERM: one exception, then peace and quiet for the cleaning up."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType


class Interrupts:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt, once: while that is being handled, further ones only count.

    So an impatient second Ctrl-C does not cut short the release of what must not be left behind. The third one does.
    """

    def __init__(self) -> None:
        self.code = 128 + signal.SIGINT
        self._ignored = 0

    def install(self) -> None:
        """Only the main thread can, and does."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._handle)
            signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not _unwinding():
            self.code = 128 + number
            raise KeyboardInterrupt
        self._ignored += 1
        if self._ignored == 1:
            os.write(2, b"cleaning up; once more to stop at once\n")
        elif self._ignored > 1:
            os._exit(self.code)


def _unwinding() -> bool:
    """Is a KeyboardInterrupt on its way up, or the cause of what is?"""
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__context__
    return False
