"""The ring: leasing from it is all the back-pressure there is."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from stages.errors import WaitTimeout
from stages.flow import Slot
from stages.ring import Ring, RingAborted


def ring_of(count: int) -> Ring:
    return Ring([Slot(i, torch.zeros(1, dtype=torch.uint8)) for i in range(count)])


def test_slots_come_back_in_the_order_of_their_release() -> None:
    ring = ring_of(3)
    a, b, c = (ring.acquire(1.0) for _ in range(3))
    for slot in (b, c, a):
        ring.release(slot, slot.lease)
    assert [ring.acquire(1.0) for _ in range(3)] == [b, c, a]


def test_an_empty_ring_names_its_timeout() -> None:
    ring = ring_of(1)
    ring.acquire(1.0)
    with pytest.raises(WaitTimeout, match=r"0\.05 s.*session\.timeouts\.put"):
        ring.acquire(0.05)


def test_a_waiter_gets_the_slot_that_is_released() -> None:
    ring = ring_of(1)
    slot = ring.acquire(1.0)
    lease = slot.lease
    threading.Timer(0.05, lambda: ring.release(slot, lease)).start()
    assert ring.acquire(5.0) is slot


def test_a_lease_ends_once() -> None:
    ring = ring_of(1)
    slot = ring.acquire(1.0)
    lease = slot.lease
    ring.release(slot, lease)
    ring.release(slot, lease)
    ring.acquire(1.0)
    with pytest.raises(WaitTimeout):
        ring.acquire(0.01)


def test_abort_wakes_every_waiter_and_refuses_the_next() -> None:
    ring = ring_of(1)
    ring.acquire(1.0)
    outcomes: list[type] = []

    def wait() -> None:
        try:
            ring.acquire(30.0)
        except RingAborted as error:
            outcomes.append(type(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    ring.abort()
    for thread in threads:
        thread.join(5.0)
    assert outcomes == [RingAborted] * 3
    with pytest.raises(RingAborted):
        ring.acquire(1.0)


def test_an_aborted_ring_hands_out_no_free_slot_either() -> None:
    ring = ring_of(2)
    ring.abort()
    with pytest.raises(RingAborted):
        ring.acquire(1.0)


def test_reset_frees_all_and_ends_old_leases() -> None:
    ring = ring_of(2)
    old = ring.acquire(1.0)
    lease = old.lease
    ring.abort()
    ring.reset()
    taken = [ring.acquire(1.0), ring.acquire(1.0)]
    ring.release(old, lease)
    assert len({id(s) for s in taken}) == 2
    with pytest.raises(WaitTimeout):
        ring.acquire(0.01)
