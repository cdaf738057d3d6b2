"""nccl on CPU: which groups are formed with whom, when anew, and what a refusal does. Engines are threads here."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.chains import SPLIT, make_run
from support.fakes import FakeEngine, Toy, engines_of, updater_for

from pipelines.updater import WeightUpdater
from stages.bucket import make_plan
from stages.errors import ConfigError, EngineError, TransportError, UpdateFailed
from stages.flow import GroupSpec, Shipment, TensorSpec
from stages.run import Run, Timeouts
from stages.transport.group import BroadcastGroup
from stages.transport.messages import GroupInit
from stages.transport.nccl import Nccl, rank_offsets


class Peer(FakeEngine):
    """An engine whose ranks really join, in threads of this process."""

    def __init__(self, url: str, tp: int = 1) -> None:
        super().__init__(url, tp)
        self.ranks: dict[str, list[BroadcastGroup]] = {}

    def join_group(self, init: GroupInit) -> None:
        super().join_group(init)
        made: dict[int, BroadcastGroup] = {}

        def join(rank: int) -> None:
            with contextlib.suppress(TransportError):
                made[rank] = BroadcastGroup.join(init, init.rank_offset + rank)

        threads = [threading.Thread(target=join, args=(r,), daemon=True) for r in range(self.tp)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20.0)
        if len(made) < self.tp:
            raise self.refuse("join", "could not join")
        self.ranks[init.group_name] = [made[r] for r in range(self.tp)]

    def leave_group(self, init: GroupInit) -> None:
        super().leave_group(init)
        for group in self.ranks.pop(init.group_name, []):
            group.destroy()

    def put(self, shipment: Shipment, run: Run) -> None:
        self._do("put")
        name = shipment.message.group_names[self.url]
        received = torch.zeros(shipment.bucket.layout.nbytes, dtype=torch.uint8)
        self.ranks[name][0].broadcast(received)
        for e in shipment.bucket.layout.entries:
            target = self._loading.setdefault(e.spec.name, bytearray(e.spec.nbytes))
            target[e.start : e.start + e.nbytes] = bytes(received[e.offset : e.offset + e.nbytes].numpy())


class Trainer:
    """The transport alone, over peers."""

    def __init__(self, *engines: FakeEngine, groups: str = "one", **timeouts: float) -> None:
        self.nccl = Nccl(port=0, groups=groups)
        self.run = make_run(
            SPLIT, transport=self.nccl, timeouts=Timeouts(**({"group": 20.0, "connect": 2.0} | timeouts))
        )
        self.run.engines = list(engines)
        self.plan(100)
        self.nccl.open(self.run)

    def plan(self, nbytes: int) -> None:
        self.run.plan = make_plan((GroupSpec((TensorSpec("w", torch.uint8, (nbytes,)),)),), 1 << 20, SPLIT)

    def prepare(self) -> list[str]:
        """The names of the live groups."""
        self.nccl.prepare(self.run)
        return [live.group.name for live in self.nccl._live]


@pytest.fixture
def peers() -> list[Peer]:
    return [Peer("http://a:1"), Peer("http://b:1")]


# -- who gets which ranks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, offsets",
    [([1], [1]), ([1, 2], [1, 2]), ([2, 1, 4], [1, 3, 4]), ([8, 8], [1, 9]), ([1] * 5, [1, 2, 3, 4, 5]), ([], [])],
)
def test_offsets_come_from_the_engines_that_are_there(sizes: list[int], offsets: list[int]) -> None:
    """A fixed number of GPUs per engine pairs ranks wrongly (radixark/miles#3189)."""
    assert rank_offsets(sizes) == offsets
    covered = [o + i for o, s in zip(offsets, sizes, strict=True) for i in range(s)]
    assert covered == list(range(1, 1 + sum(sizes)))


@pytest.mark.parametrize("sizes", [[0], [1, 0], [-1, 2]])
def test_an_engine_without_ranks_is_refused(sizes: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"engines\.tp"):
        rank_offsets(sizes)


def test_one_group_over_engines_of_unequal_size() -> None:
    engines = [Peer("http://a:1", 1), Peer("http://b:1", 2)]
    trainer = Trainer(*engines)
    trainer.prepare()
    (a,), (b,) = engines[0].groups, engines[1].groups
    assert (a.rank_offset, b.rank_offset) == (1, 2)
    assert a.world_size == b.world_size == 4
    assert a.group_name == b.group_name
    trainer.nccl.close()


def test_a_group_per_engine_when_asked_for(peers: list[Peer]) -> None:
    """Two engines that join two groups in opposite order block each other (THUDM/slime#2331): here, one order for all."""
    trainer = Trainer(*peers, groups="per_engine")
    names = trainer.prepare()
    assert len(set(names)) == 2
    for peer, name in zip(peers, names, strict=True):
        assert [(g.rank_offset, g.world_size, g.group_name) for g in peer.groups] == [(1, 2, name)]
    trainer.nccl.close()


# -- generations ----------------------------------------------------------------------------------------------------


def test_a_group_is_formed_once_and_kept(peers: list[Peer]) -> None:
    trainer = Trainer(*peers)
    assert trainer.prepare() == trainer.prepare() == trainer.prepare()
    assert [p.log for p in peers] == [["join"], ["join"]]
    trainer.nccl.close()


def change_order(trainer: Trainer) -> None:
    trainer.run.engines.reverse()


def change_engines(trainer: Trainer) -> None:
    trainer.run.engines = [*trainer.run.engines, Peer("http://c:1")]


def fewer_engines(trainer: Trainer) -> None:
    trainer.nccl.leave(trainer.run.engines.pop())


def larger_buckets(trainer: Trainer) -> None:
    trainer.plan(100_000)


def restarted(trainer: Trainer) -> None:
    trainer.nccl.leave(trainer.run.engines[0])


@pytest.mark.parametrize("change", [change_order, change_engines, fewer_engines, larger_buckets, restarted])
def test_whatever_changes_starts_a_new_generation_under_a_new_name(peers: list[Peer], change: Any) -> None:
    trainer = Trainer(*peers)
    before = trainer.prepare()
    change(trainer)
    after = trainer.prepare()
    assert before != after
    assert len(after) == 1
    for engine in trainer.run.engines:
        assert engine.groups[-1].group_name == after[0]
        assert engine.groups[-1].bucket_bytes >= trainer.run.current_plan.largest_bucket
    assert {engine.url: len(engine.left) for engine in peers} == {"http://a:1": 1, "http://b:1": 1}
    trainer.nccl.close()


def test_smaller_buckets_fit_the_group_that_is_there(peers: list[Peer]) -> None:
    trainer = Trainer(*peers)
    trainer.plan(100_000)
    before = trainer.prepare()
    trainer.plan(10)
    assert trainer.prepare() == before
    trainer.nccl.close()


def test_with_a_group_per_engine_the_others_keep_theirs(peers: list[Peer]) -> None:
    trainer = Trainer(*peers, groups="per_engine")
    a, b = trainer.prepare()
    trainer.nccl.leave(peers[0])
    assert trainer.prepare()[0] == b
    assert peers[1].log == ["join"]
    assert a not in trainer.prepare()
    trainer.nccl.close()


def test_closing_tells_the_engines_and_frees_the_port(peers: list[Peer]) -> None:
    trainer = Trainer(*peers)
    trainer.prepare()
    port = trainer.nccl._store.port  # type: ignore[union-attr]
    trainer.nccl.close()
    trainer.nccl.close()
    assert [len(p.left) for p in peers] == [1, 1]
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_an_engine_that_cannot_leave_does_not_keep_us_from_closing(peers: list[Peer]) -> None:
    """A group that leaks because its destruction failed once (InternLM/lmdeploy#4638)."""
    trainer = Trainer(*peers)
    trainer.prepare()
    peers[0].script("leave", peers[0].refuse("leave group", "cannot"))
    trainer.nccl.close()
    assert peers[1].left


# -- refusals -------------------------------------------------------------------------------------------------------


def test_an_engine_that_refuses_to_join_is_heard_at_once(peers: list[Peer]) -> None:
    trainer = Trainer(*peers, group=15.0)
    peers[1].script("join", peers[1].refuse("join", "group already initialized", status=400))
    started = time.monotonic()
    with pytest.raises(Exception, match="http://b:1: join: group already initialized"):
        trainer.prepare()
    assert time.monotonic() - started < 10.0, "it waited for the group's timeout"
    assert trainer.nccl._live == []


def test_the_next_attempt_after_a_refusal_is_a_new_generation_and_waits_for_nothing(peers: list[Peer]) -> None:
    trainer = Trainer(*peers, group=30.0)
    peers[1].script("join", peers[1].refuse("join", "group already initialized"))
    with pytest.raises(EngineError, match="already initialized"):
        trainer.prepare()
    started = time.monotonic()
    trainer.prepare()
    assert time.monotonic() - started < 20.0, "it waited for the group that was given up"
    assert peers[0].groups[0].group_name != peers[0].groups[-1].group_name
    trainer.nccl.close()


def test_an_engine_that_never_joins_is_bounded() -> None:
    silent = FakeEngine("http://a:1")
    silent.script("join", lambda: time.sleep(30.0))
    trainer = Trainer(silent, group=0.5, connect=0.2)
    with pytest.raises(TransportError, match="could not join|did not form"):
        trainer.prepare()


@pytest.mark.parametrize("settings", [{"groups": "many"}, {"port": 70000}, {"port": -1}])
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"transport\."):
        Nccl(**settings)


# -- whole updates --------------------------------------------------------------------------------------------------


@pytest.fixture(params=["one", "per_engine"])
def updater(request: pytest.FixtureRequest, peers: list[Peer]) -> Iterator[WeightUpdater]:
    made = updater_for(
        [p.url for p in peers],
        transport={"_target_": "stages.transport.nccl.Nccl", "port": 0, "groups": request.param},
        timeouts=Timeouts(connect=2.0, control=20.0, put=20.0, group=20.0, agree=20.0),
        wire="split",
        capacity=256,
    )
    with made:
        made._known[:] = peers
        yield made


def test_every_engine_receives_every_byte_update_after_update(updater: WeightUpdater) -> None:
    model = Toy()
    for value in range(4):
        report = updater.update(model.fill(float(value)))
        assert report.buckets > 1
        assert all(e.weights == model.bytes() for e in engines_of(updater))
    assert [e.log.count("join") for e in engines_of(updater)] == [1, 1]


def test_a_refusal_in_the_middle_is_heard_and_the_next_update_meets_in_a_new_group(updater: WeightUpdater) -> None:
    """Validation errors answer before the engine joins the broadcast: whoever broadcasts first hangs."""
    model = Toy()
    updater.update(model.fill(1.0))
    a, b = engines_of(updater)
    b.script("put", None, b.refuse("put", "unknown name", status=400))
    with pytest.raises(UpdateFailed, match="unknown name"):
        updater.update(model.fill(2.0))
    assert set(updater.tainted) == {a.url, b.url}
    assert not a.serving
    updater.update(model.fill(3.0))
    assert updater.tainted == {}
    for engine in (a, b):
        assert engine.serving
        assert engine.weights == model.bytes()
        assert engine.groups[0].group_name != engine.groups[-1].group_name
