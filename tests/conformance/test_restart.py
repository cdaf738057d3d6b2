"""Engines die and come back on the same address: between two updates, and in the middle of one."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from stages.errors import UpdateFailed

from .checkpoints import CheckpointCache
from .proofs import assert_serves, learn
from .served import FP32, PLUGIN, Served, serve
from .servers import EngineServer
from .updates import segments, updater

ENGINES = (Served("sglang", FP32), Served("vllm", FP32, extra=PLUGIN), Served("lmdeploy", tp=2))
IMPATIENT = ("session.timeouts.put=20", "session.timeouts.group=20", "session.timeouts.control=20")
NOTICED_WITHIN = 60.0  # seconds; a dead peer is mostly seen at once, a hung collective after its timeout


@serve(*ENGINES)
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_killed_between_two_updates_and_in_the_middle_of_the_next(
    server: EngineServer, served: Served, transport: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    ours = segments()
    first, second = (checkpoints(replace(served.recipe, seed=seed)) for seed in (1, 2))
    learned = {folder: learn(server, folder) for folder in (first, second)}
    with updater(server, transport, tmp_path, "bucket.capacity=64KiB", *IMPATIENT) as weights:
        assert weights.update(first)
        server.restart()  # with the weights it was started from, and without our group, segments or plan
        assert weights.update(second)
        assert_serves(server, second, learned[second])

        killer = KillDuringUpdate(server)
        weights.on_progress = killer
        began = time.monotonic()
        with pytest.raises(UpdateFailed) as failed:
            weights.update(first)
        assert time.monotonic() - began < NOTICED_WITHIN
        assert 0 < killer.seen < 1
        report = failed.value.report
        assert [engine.outcome for engine in report.engines] == ["tainted"]  # type: ignore[attr-defined]
        assert server.url in weights.tainted
        assert not server.alive()

        weights.on_progress = None
        server.restart()
        assert weights.update(first)
        assert not weights.tainted
        assert_serves(server, first, learned[first])
    assert segments() <= ours


@serve(Served("sglang", FP32), Served("lmdeploy", tp=2))
def test_an_engine_that_is_down_is_named_and_the_next_update_finds_it_again(
    server: EngineServer, served: Served, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    folder = checkpoints(replace(served.recipe, seed=1))
    learned = learn(server, folder)
    with updater(server, "ipc", tmp_path, "session.timeouts.connect=2") as weights:
        server.kill()
        with pytest.raises(Exception, match=server.url):
            weights.update(folder)
        server.restart()
        assert weights.update(folder)
    assert_serves(server, folder, learned)


class KillDuringUpdate:
    """A progress callback that kills the engine once, after the first buckets. `seen`: the share that had arrived."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.seen = 0.0
        self.lock = threading.Lock()

    def __call__(self, done: int, total: int) -> None:
        with self.lock:
            if not self.seen and done > total / 4:
                self.seen = done / total
                self.server.kill()
