"""An engine that dies or hangs, at every step of an update, over every transport.

A real process with the real receiver in it. Always: the trainer gets an error in bounded time that names the engine, nothing
is left behind, and once the engine is back the next update makes it whole.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import TIMEOUTS, updater_over
from support.fakes import Toy
from support.httpd import Answer, Asked, Server
from support.processes import Pool
from support.vllm_like import VllmLike

from pipelines.updater import WeightUpdater
from stages.errors import EngineUnreachable, UpdateFailed
from stages.flow import TensorSpec
from stages.transport.shm import SHM_DIR

VLLM = {"_target_": "stages.backends.vllm.Vllm"}
MINE: dict[str, Any] = {}  # in the engine's process

ROUTES = {
    "at init": "/init_weight_transfer_engine",
    "at pause": "/pause",
    "at start": "/start_weight_update",
    "at finish": "/finish_weight_update",
    "at load": "/collective_rpc",
    "at resume": "/resume",
}
STEPS = {
    "ipc": [
        "at init",
        "at pause",
        "at start",
        "first bucket",
        "while loading",
        "last answer",
        "at finish",
        "at version",
        "at resume",
    ],
    "nccl": ["at init", "at start", "first bucket", "while loading", "last answer", "at finish"],
    "disk": ["at pause", "at load", "at version", "at resume"],
}
CASES = [(transport, step) for transport, steps in STEPS.items() for step in steps]


# -- in the engine's process ------------------------------------------------------------------------------------------


def serve(port: int = 0) -> int:
    server = Server(port=port)
    MINE["engine"] = VllmLike(server)
    return server.port


def misbehave(step: str, how: str) -> None:
    """From now on, at `step`: die, or never answer."""
    engine: VllmLike = MINE["engine"]

    def act() -> None:
        if how == "dies":
            os._exit(1)
        threading.Event().wait()

    if step == "at version":  # asked before the update too, and answered then
        engine.server.answers["/weight_info"] = lambda asked: (
            act() if engine.paused else engine.routes["/weight_info"](asked)
        )
    elif step in ROUTES:
        engine.server.answers[ROUTES[step]] = lambda asked: act() or Answer(500)
    elif step == "first bucket":
        engine.server.answers["/update_weights"] = lambda asked: act() or Answer(500)
    elif step == "while loading":
        load = engine.sink

        def sink(spec: TensorSpec, start: int, memory: torch.Tensor) -> None:
            if len(engine.loading) == 2:
                act()
            load(spec, start, memory)

        engine.sink = sink  # type: ignore[method-assign]
    else:

        def update(asked: Asked) -> Answer:
            answer = engine.update(asked)
            if len(engine.loading) == 5:  # all are loaded
                act()
            return answer

        engine.server.answers["/update_weights"] = update


def held() -> dict[str, bytes]:
    engine: VllmLike = MINE["engine"]
    return {} if engine.paused else engine.weights


# -- in the trainer's -------------------------------------------------------------------------------------------------


class Fleet:
    """One engine process at a fixed port, to be replaced when it is gone."""

    def __init__(self) -> None:
        self.pool = Pool(1)
        self.port: int = self.pool.call(serve)

    def restart(self) -> None:
        self.pool.close()
        self.pool = Pool(1)
        self.pool.call(serve, self.port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.pool.close()


def updater_for(fleet: Fleet, transport: str, tmp_path: Path, **timeouts: float) -> WeightUpdater:
    settings: dict[str, Any] = {"path": tmp_path / "versions"} if transport == "disk" else {}
    made = updater_over(fleet, VLLM, transport, capacity=200, **settings)  # type: ignore[arg-type]
    limits = replace(TIMEOUTS, **timeouts)
    made.settings["session"]["timeouts"] |= {n: getattr(limits, n) for n in TIMEOUTS.__dataclass_fields__}  # type: ignore[index]
    return WeightUpdater(made.settings)


def ours() -> set[str]:
    return {n for n in os.listdir(SHM_DIR) if n.startswith(f"torch_{os.getpid()}_")}


def settled(before: set[threading.Thread]) -> set[str]:
    """Threads of ours that are left, after those that are on their way out."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        left = {t.name for t in set(threading.enumerate()) - before if t.name.startswith("weightstream-")}
        if not left:
            break
        time.sleep(0.05)
    return left


def fail_once(fleet: Fleet, transport: str, step: str, how: str, tmp_path: Path, **timeouts: float) -> Exception:
    """An update that works, one in which the engine dies or hangs, a restart, one that works; nothing is left."""
    before, threads = ours(), set(threading.enumerate())
    with updater_for(fleet, transport, tmp_path, **timeouts) as updater:
        model = Toy()
        if step != "at init":
            updater.update(model.fill(1.0))
        fleet.pool.call(misbehave, step, how)
        with pytest.raises((UpdateFailed, EngineUnreachable)) as caught:
            updater.update(model.fill(2.0))
        report = updater.report.updates[-1]
        assert report.outcome in ("refused", "aborted", "tainted")
        assert updater.report.version == (None if step == "at init" else "1")
        assert fleet.url in str(caught.value)
        fleet.restart()
        assert updater.update(model.fill(3.0)).outcome == "committed"
        assert fleet.pool.call(held) == model.bytes()
        assert updater.tainted == {}
    assert ours() == before
    assert settled(threads) == set()
    if transport == "disk":
        assert not [p for p in (tmp_path / "versions").iterdir() if p.name.startswith(".")]
    return caught.value


@pytest.mark.parametrize("transport, step", CASES, ids=lambda value: value)
def test_an_engine_that_dies(fleet: Fleet, tmp_path: Path, transport: str, step: str) -> None:
    """A receiver that raises between request and ack blocks the trainer for ever (verl-project/verl#7366)."""
    fail_once(fleet, transport, step, "dies", tmp_path, group=3.0)  # a rendezvous that is given up ends by its timeout


@pytest.mark.parametrize("transport, step", [("ipc", "while loading"), ("nccl", "first bucket"), ("disk", "at load")])
def test_an_engine_that_hangs(fleet: Fleet, tmp_path: Path, transport: str, step: str) -> None:
    error = fail_once(fleet, transport, step, "hangs", tmp_path, put=2.0, group=2.0, control=10.0)
    assert "no answer within" in str(error) or "broadcast failed" in str(error)
