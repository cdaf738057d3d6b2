"""session.release_between_updates: after each update nothing of ours is mapped, listening or waiting, here or in an engine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from pipelines import WeightUpdater
from pipelines.launch import EngineLauncher
from pipelines.trainers.toy import ToyTrainer
from stages.digest import weights_digest
from stages.gather.module import tensors_by_name


@pytest.fixture(scope="module")
def launched(small_checkpoint: Path) -> Iterator[dict[str, tuple[str, int]]]:
    """`{backend: (url, pid)}`"""
    launcher = EngineLauncher()
    try:
        urls = {name: launcher.start(small_checkpoint, name)[0] for name in ("vllm", "sglang", "lmdeploy")}
        yield {name: (url, process.pid) for (name, url), process in zip(urls.items(), launcher.processes, strict=True)}
    finally:
        launcher.close()


def segments() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]


def mapped(pid: int) -> list[str]:
    """Segments of this process that the engine still has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if f"/torch_{os.getpid()}_" in line]


def digest(url: str) -> str:
    return str(requests.get(f"{url}/weightstream/digest", timeout=30).json()["digest"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@pytest.mark.parametrize("backend", ["vllm", "sglang", "lmdeploy"])
def test_nothing_is_kept_between_updates(
    launched: dict[str, tuple[str, int]], small_checkpoint: Path, backend: str, transport: str
) -> None:
    url, pid = launched[backend]
    port = free_port()
    more = [f"transport.port={port}"] if transport == "nccl" else []
    how = [f"backend={backend}", f"transport={transport}", *more, "engines=remote", f"engines.urls=[{url}]"]
    trainer = ToyTrainer(layers=1, hidden_size=64)
    before = segments()
    with WeightUpdater.from_config(
        [*how, "session.release_between_updates=true"], reference=small_checkpoint
    ) as updater:
        for _ in range(3):
            trainer.step()
            updater.update(trainer.source)
            assert digest(url) == held(trainer)
            assert segments() == before
            assert mapped(pid) == []
            if transport == "nccl":
                with socket.socket() as free:
                    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    free.bind(("127.0.0.1", port))
                    free.listen()
    assert [u.outcome for u in updater.report.updates] == ["committed"] * 3


def held(trainer: ToyTrainer) -> str:
    """The digest of the trainer's weights, computed apart from the chain. The head is tied."""
    return weights_digest((n, t) for n, t in tensors_by_name(trainer.source).items() if n != "lm_head.weight")


def test_a_closed_updater_leaves_no_mapping_in_the_engine(
    launched: dict[str, tuple[str, int]], small_checkpoint: Path
) -> None:
    url, pid = launched["vllm"]
    how = ["backend=vllm", "transport=ipc", "engines=remote", f"engines.urls=[{url}]"]
    with WeightUpdater.from_config(how, reference=small_checkpoint) as updater:
        updater.update(small_checkpoint)
        assert mapped(pid)
    assert mapped(pid) == []
