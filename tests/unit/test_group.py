"""Broadcast groups between this process and others: real gloo, real ports, real deaths."""

from __future__ import annotations

import gc
import socket
import threading
import time
from typing import Any

import pytest
import torch
from support.chains import DTYPES, raw, tensor_of
from support.processes import Pool

from stages.errors import TransportError
from stages.transport.group import BroadcastGroup, GroupStore
from stages.transport.messages import GroupInit

JOINED: dict[str, BroadcastGroup] = {}  # in the other process


def init_for(store: GroupStore, name: str = "g1", **changes: Any) -> GroupInit:
    fields: dict[str, Any] = {
        "master_address": "127.0.0.1",
        "master_port": store.port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": name,
        "backend": "gloo",
        "timeout": 20.0,
    }
    return GroupInit(**(fields | changes))


@pytest.fixture
def store() -> Any:
    return GroupStore("127.0.0.1", 0, 20.0)


# -- in the other process -----------------------------------------------------------------------------------------


def join(init: GroupInit, rank: int = 1) -> None:
    JOINED[init.group_name] = BroadcastGroup.join(init, rank)


def receive(name: str, nbytes: int) -> bytes:
    memory = torch.zeros(nbytes, dtype=torch.uint8)
    JOINED[name].broadcast(memory)
    return raw(memory)


def leave(name: str) -> None:
    JOINED.pop(name).destroy()


def form(store: GroupStore, pool: Pool, init: GroupInit) -> BroadcastGroup:
    pool.start(0, join, init)
    group = BroadcastGroup.lead(store, init, torch.device("cpu"))
    outcome = pool.result(0)
    assert outcome.error is None, outcome.trace
    return group


# -- bytes --------------------------------------------------------------------------------------------------------


def test_bytes_arrive_as_they_are(store: GroupStore, child: Pool) -> None:
    group = form(store, child, init_for(store))
    for dtype in DTYPES:
        for count in (1, 33, 100_000):
            sent = tensor_of(dtype, (count,), count).view(torch.uint8)
            child.start(0, receive, "g1", sent.numel())
            group.broadcast(sent)
            assert child.result(0).value == raw(sent)
    child.call(leave, "g1")
    group.destroy()
    group.destroy()  # twice is fine


def test_a_bucket_without_bytes_is_no_special_case(store: GroupStore, child: Pool) -> None:
    group = form(store, child, init_for(store))
    child.start(0, receive, "g1", 0)
    group.broadcast(torch.empty(0, dtype=torch.uint8))
    assert child.result(0).value == b""
    child.call(leave, "g1")
    group.destroy()


def test_a_strided_tensor_is_refused(store: GroupStore) -> None:
    """gloo sends its raw storage without a word: silently wrong values (verl-project/verl#6919)."""
    group = BroadcastGroup.lead(store, init_for(store, world_size=1), torch.device("cpu"))
    with pytest.raises(TransportError, match="contiguous"):
        group.broadcast(torch.arange(6).view(2, 3).t())
    group.destroy()


def test_several_generations_live_side_by_side_on_one_port(store: GroupStore, child: Pool) -> None:
    """A peer that refuses its old group's name leaves the trainer blocked for half an hour; names are never reused."""
    groups = {name: form(store, child, init_for(store, name)) for name in ("g1", "g2")}
    for name, group in groups.items():
        sent = tensor_of(torch.uint8, (64,), len(name))
        child.start(0, receive, name, 64)
        group.broadcast(sent)
        assert child.result(0).value == raw(sent)
    groups["g1"].destroy()
    groups["g3"] = form(store, child, init_for(store, "g3"))
    child.start(0, receive, "g3", 8)
    groups["g3"].broadcast(torch.ones(8, dtype=torch.uint8))
    assert child.result(0).value == bytes([1]) * 8
    for name in ("g1", "g2", "g3"):
        child.call(leave, name)
    for group in groups.values():
        group.destroy()


# -- ports --------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_named_with_the_setting() -> None:
    """Two runs on one fixed port collide (huggingface/trl#3979)."""
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        with pytest.raises(
            TransportError, match=rf"transport\.port: cannot listen on 127\.0\.0\.1 port {port}.*free port"
        ):
            GroupStore("127.0.0.1", port, 5.0)


def test_the_port_is_held_from_the_first_moment_and_given_back(store: GroupStore) -> None:
    """A port that is picked, released and bound later can be taken in between (InternLM/xtuner#1828)."""
    port = store.port
    with pytest.raises(TransportError, match=f"port {port}"):
        GroupStore("127.0.0.1", port, 5.0)
    del store.store
    gc.collect()
    again = GroupStore("127.0.0.1", port, 5.0)
    assert again.port == port


@pytest.mark.parametrize("address", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_hosts_is_named_with_the_setting(address: str) -> None:
    with pytest.raises(TransportError, match=rf"{address}.*transport\.address"):
        GroupStore(address, 0, 5.0)


# -- waiting ------------------------------------------------------------------------------------------------------


def test_a_group_that_nobody_joins_is_given_up(store: GroupStore) -> None:
    with pytest.raises(TransportError, match="group lonely: rank 0 of 2 could not join"):
        BroadcastGroup.lead(store, init_for(store, "lonely", timeout=0.5), torch.device("cpu"))


def test_a_trainer_that_does_not_answer_is_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init = GroupInit("127.0.0.1", port, 1, 2, "g1", "gloo", 0.5)
    with pytest.raises(TransportError, match=f"no trainer answers at 127.0.0.1 port {port}"):
        BroadcastGroup.join(init, 1)


def test_a_backend_that_this_torch_has_not_is_refused(store: GroupStore) -> None:
    with pytest.raises(TransportError, match="'mpi' is not available"):
        BroadcastGroup.lead(store, init_for(store, backend="mpi"), torch.device("cpu"))


def test_a_broadcast_that_nobody_receives_is_given_up(store: GroupStore, child: Pool) -> None:
    group = form(store, child, init_for(store, "slow", timeout=1.0))
    with pytest.raises(TransportError, match="group slow: broadcast failed on rank 0"):
        group.broadcast(torch.zeros(32 << 20, dtype=torch.uint8))
    child.call(leave, "slow")
    group.destroy()


def test_destroying_a_group_frees_whoever_is_inside_a_broadcast(store: GroupStore, child: Pool) -> None:
    group = form(store, child, init_for(store, "stuck"))
    child.start(0, receive, "stuck", 1 << 20)
    time.sleep(0.2)
    group.destroy()
    outcome = child.result(0)
    assert outcome.error == "TransportError", outcome
    child.call(leave, "stuck")


def test_a_peer_that_dies_in_a_broadcast_is_an_error_and_the_next_generation_works(
    store: GroupStore, victim: Pool, child: Pool
) -> None:
    group = form(store, victim, init_for(store, "first", timeout=6.0))
    victim.start(0, receive, "first", 64 << 20)
    threading.Timer(0.3, lambda: victim.kill(0)).start()
    with pytest.raises(TransportError, match="group first: broadcast failed on rank 0"):
        for _ in range(200):  # until it is gone
            group.broadcast(torch.zeros(64 << 20, dtype=torch.uint8))
    group.destroy()
    group = form(store, child, init_for(store, "second"))
    child.start(0, receive, "second", 5)
    group.broadcast(torch.full((5,), 3, dtype=torch.uint8))
    assert child.result(0).value == bytes([3]) * 5
    child.call(leave, "second")
    group.destroy()


# -- several ranks ------------------------------------------------------------------------------------------------


def test_every_rank_of_an_engine_joins_at_its_offset(store: GroupStore, pair: Pool) -> None:
    init = init_for(store, "tp", world_size=3)
    for rank in (0, 1):
        pair.start(rank, join, init, init.rank_offset + rank)
    group = BroadcastGroup.lead(store, init, torch.device("cpu"))
    assert [pair.result(r).error for r in (0, 1)] == [None, None]
    sent = tensor_of(torch.uint8, (1000,), 5)
    for rank in (0, 1):
        pair.start(rank, receive, "tp", 1000)
    group.broadcast(sent)
    assert [pair.result(r).value for r in (0, 1)] == [raw(sent)] * 2
    for rank in (0, 1):
        pair.call(leave, "tp", index=rank)
    group.destroy()
