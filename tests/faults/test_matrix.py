"""The fault matrix: every request of an update spoiled in every way, for every engine and transport that go together.

Whatever happens: the update ends in time; the engine holds the old weights and serves, or the new ones and serves, or is
paused and listed as tainted; never is a half-loaded one served. The error names the engine. The next update makes it whole.
A request that an update does not need to be right, such as one whose answer says nothing, may be spoiled without harm: then
the update is committed and the weights are the new ones. The table of what was tried is printed at the end.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.proxy import Fault, FaultProxy

from pipelines import WeightUpdater
from pipelines.engine.settings import Settings
from stages.errors import UpdateFailed, WeightstreamError
from tests.engine.checkpoints import Folders, write_all
from tests.engine.client import LocalEngine

PAIRS = [
    (backend, transport)
    for backend in ("sglang", "vllm", "lmdeploy")
    for transport in ("ipc", "nccl", "disk")
    if (backend, transport) != ("lmdeploy", "disk")  # refused
]
UNHEARD = ("lost", "unheard 503", "unheard html", "unheard empty")
KINDS = (*UNHEARD, "dropped", "500", "refused", "redirect", "truncated")
SECONDS = 15.0  # for an update that fails; each of its waits is bounded by 3 s
OUTCOMES: Counter[tuple[str, str, str]] = Counter()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_all(tmp_path_factory.mktemp("checkpoints"))


class Place:
    """One engine behind a proxy, and an updater that knows the proxy only."""

    def __init__(self, backend: str, transport: str, folders: Folders, workspace: Path) -> None:
        self.backend, self.transport, self.folders = backend, transport, folders
        self.engine = LocalEngine(Settings(model=str(folders.qwen3_a), backend=backend))
        self.proxy = FaultProxy(self.engine.url)
        own = {"nccl": ["transport.port=0"], "disk": [f"transport.path={workspace}", "transport.fsync=false"]}
        timeouts = ("connect", "control", "put", "group", "agree")
        settings = [f"backend={backend}", f"transport={transport}", *own.get(transport, []), "engines=remote"]
        settings += [f"engines.urls=[{self.proxy.url}]", "bucket.capacity=128KiB"]
        settings += [f"session.timeouts.{name}=3" for name in timeouts]
        self.updater = WeightUpdater.from_config(settings, reference=folders.qwen3_a)
        self.updater.open()
        self.digests = {}
        for folder in (folders.qwen3_b, folders.qwen3_a):
            self.updater.update(folder)
            self.digests[folder] = self.engine.digest()["digest"]
        assert len(set(self.digests.values())) == 2
        self.held = folders.qwen3_a

    def close(self) -> None:
        self.updater.close()
        self.proxy.close()
        self.engine.close()

    def other(self) -> Path:
        return self.folders.qwen3_b if self.held == self.folders.qwen3_a else self.folders.qwen3_a

    def requests(self) -> list[tuple[str, int]]:
        """The requests of an update that everything is set up anew for: `(path, how many of it came before)`.

        Of those that come several times, such as one per bucket, the first and the last.
        """
        self.updater._run.transport.leave(self.updater._known[0])
        self.proxy.paths.clear()
        self.updater.update(self.other())
        self.held = self.other()
        seen: Counter[str] = Counter()
        found = []
        for path in self.proxy.paths:
            found.append((path, seen[path]))
            seen[path] += 1
        return [(path, nth) for path, nth in found if nth in (0, seen[path] - 1)]

    def serving(self) -> bool:
        state = self.engine.state()
        return not state.get("paused") and not state.get("sleeping")

    def strike(self, path: str, nth: int, kind: str) -> str:
        """One cell. Returns what became of the update."""
        old, new = self.digests[self.held], self.digests[self.other()]
        self.updater._run.transport.leave(self.updater._known[0])
        self.proxy.fault = Fault(path, kind, nth)
        began = time.monotonic()
        error: WeightstreamError | None = None
        try:
            self.updater.update(self.other())
        except WeightstreamError as caught:
            error = caught
        where = f"{self.backend} {self.transport} {path} #{nth} {kind}: {error}"
        assert time.monotonic() - began < SECONDS, where
        struck, self.proxy.fault = self.proxy.fault.struck, None
        self._check(error, old, new, where)
        self._heal(where)
        if not struck:  # it is asked for at times only, such as after a restart
            assert error is None, where
            return "not asked"
        return "committed" if error is None else self.updater.report.updates[-2].outcome

    def _check(self, error: WeightstreamError | None, old: str, new: str, where: str) -> None:
        state, holds = self.engine.state(), self.engine.digest()["digest"]
        report = self.updater.report.updates[-1]
        if error is None:
            assert report.outcome == "committed" and holds == new and self.serving(), where
            return
        assert self.proxy.url in str(error), where
        if isinstance(error, UpdateFailed):
            assert report.outcome in ("aborted", "tainted"), where
        if self.serving():
            assert state["half_loaded"] is None, where
            assert holds in (old, new), where
        else:
            assert self.proxy.url in self.updater.tainted, where
        if report.outcome in ("aborted", "refused"):
            assert holds == old and self.serving(), where

    def _heal(self, where: str) -> None:
        """By weights that it does not hold now."""
        holds = self.engine.digest()["digest"]
        self.held = next(folder for folder, digest in self.digests.items() if digest != holds)
        self.updater.update(self.held)
        assert self.engine.digest()["digest"] == self.digests[self.held], where
        assert self.serving() and not self.updater.tainted, where


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: "-".join(pair))
def place(
    request: pytest.FixtureRequest, folders: Folders, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    made = Place(*request.param, folders, tmp_path_factory.mktemp("published"))
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_of_an_update_spoiled(place: Place, kind: str) -> None:
    segments, threads = _segments(), place.engine.state()["threads"]
    for path, nth in place.requests():
        outcome = place.strike(path, nth, kind)
        OUTCOMES[f"{place.backend} {place.transport}", kind, outcome] += 1
    assert len(_segments()) <= max(len(segments), 2)  # the ring
    assert place.engine.state()["threads"] <= threads + 8


def _segments() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}


def test_what_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """Runs last."""
    table: dict[str, Any] = {}
    for (pair, kind, outcome), count in OUTCOMES.items():
        table.setdefault(f"{pair}, {kind}", {})[outcome] = count
    with capsys.disabled():
        print("\n\nfault matrix: cells by outcome")
        for row, outcomes in table.items():
            print(f"  {row:32} " + ", ".join(f"{n} {o}" for o, n in sorted(outcomes.items())))
        print(f"  {sum(OUTCOMES.values())} cells")
    if len({pair for pair, _, _ in OUTCOMES}) == len(PAIRS) and len({kind for _, kind, _ in OUTCOMES}) == len(KINDS):
        assert sum(OUTCOMES.values()) >= 700, "as README.md says"
