"""A ring of fixed slots: leasing from it is all the back-pressure and double buffering there is."""

from __future__ import annotations

import threading
import time
from collections import deque

from stages.errors import WaitTimeout, WeightstreamError
from stages.flow import Slot


class RingAborted(WeightstreamError):
    """The update was given up while somebody waited for a slot."""


class Ring:
    """Hands out slots in first-released order; `acquire` waits while none is free."""

    def __init__(self, slots: list[Slot]) -> None:
        self.slots = slots
        self._free = deque(slots)
        self._changed = threading.Condition()
        self._aborted = False

    def acquire(self, timeout: float) -> Slot:
        """A free slot. Raises WaitTimeout after `timeout` seconds, RingAborted when the update is given up."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._free:
                if self._aborted:
                    raise RingAborted("the update was given up")
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise WaitTimeout(
                        f"no free bucket within {timeout} s: whoever consumes them is stuck; see session.timeouts.put"
                    )
            if self._aborted:
                raise RingAborted("the update was given up")
            return self._free.popleft()

    def release(self, slot: Slot, lease: int) -> None:
        """Give back a slot whose `lease` was this when it was acquired. One that has ended already is no matter."""
        with self._changed:
            if slot.lease == lease:
                slot.lease += 1
                self._free.append(slot)
                self._changed.notify()

    def abort(self) -> None:
        """Wake whoever waits for a slot."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def reset(self) -> None:
        """All slots free again, for the next update; leases from before end."""
        with self._changed:
            self._aborted = False
            for slot in self.slots:
                slot.lease += 1
            self._free = deque(self.slots)
