"""Updates while requests keep coming: none fails, none is answered from half-loaded weights."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from . import probes
from .checkpoints import CheckpointCache
from .proofs import assert_serves
from .served import FP32, PLUGIN, Served, serve
from .servers import EngineServer
from .updates import updater

UPDATES = 6
CLIENTS = 3


@serve(Served("sglang", FP32), Served("vllm", FP32, extra=PLUGIN))
@pytest.mark.parametrize("transport", ["ipc", "nccl", "disk"])
def test_every_answer_comes_from_whole_weights(
    server: EngineServer, transport: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """One token per request, so that each answer belongs to one version: it must be what transformers says of
    either."""
    folders = [checkpoints(replace(FP32, seed=seed)) for seed in (0, 1)]
    allowed = [probes.expected_speech(folder, probes.PROMPT, 1) for folder in folders]
    probes.stock_update(server, folders[0])
    with Clients(server) as clients, updater(server, transport, tmp_path, "bucket.capacity=256KiB") as weights:
        for number in range(UPDATES):
            clients.wait_for_more()
            assert weights.update(folders[(number + 1) % 2])
        clients.wait_for_more()
    assert not clients.errors
    for spoken in clients.answers:
        assert any(spoken.close_to(one, 1e-3) for one in allowed), spoken
    assert {spoken.tokens for spoken in clients.answers} == {one.tokens for one in allowed}
    assert_serves(server, folders[UPDATES % 2], None)


class Clients:
    """Threads that ask for one greedy token again and again."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.answers: list[probes.Spoken] = []
        self.errors: list[Exception] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for_more(self) -> None:
        target = len(self.answers) + 2 * CLIENTS
        while len(self.answers) < target and not self.errors:
            self._stop.wait(0.01)

    def _ask(self) -> None:
        try:
            while not self._stop.is_set():
                self.answers.append(probes.speak(self.server, probes.PROMPT, 1))
        except Exception as error:
            self.errors.append(error)
