"""Common mistakes at the command line: each is answered by what is wrong and what to do, and changes nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config.command import run
from tests.engine.checkpoints import Folders
from tests.engine.client import LocalEngine
from tests.engine.conftest import Start

Mistake = Callable[[LocalEngine, Folders], list[str]]


def urls(url: str) -> str:
    return f"engines.urls=[{url}]"


MISTAKES: dict[str, tuple[Mistake, str, str]] = {
    "wrong port": (
        lambda engine, _: [urls("http://127.0.0.1:9")],
        "127.0.0.1:9: probe: GET /model_info: connection failed",
        "start the engine, or correct host and port in engines.urls",
    ),
    "https": (
        lambda engine, _: [urls(engine.url.replace("http", "https"))],
        "probe: GET /model_info: connection failed",
        "this engine speaks no TLS: write http:// in engines.urls",
    ),
    "a path": (
        lambda engine, _: [urls(engine.url + "/v1")],
        "GET /model_info answered 404",
        "engines.urls to its root, without a path such as /v1",
    ),
    "another engine": (
        lambda engine, _: [urls(engine.url), "backend=lmdeploy"],
        "probe: GET /is_sleeping answered 404",
        "it answers as sglang does: set backend=sglang",
    ),
    "another model": (
        lambda engine, folders: [urls(engine.url), f"trainer.path={folders.llama}"],
        "does not expect what would be sent",
        "nothing was touched",
    ),
    "tp": (
        lambda engine, _: [urls(engine.url), "engines.tp=2"],
        "the engine runs with tp_size=1, engines.tp says 2",
        "engines.tp says 2",
    ),
    "unsupported pair": (
        lambda engine, _: [urls(engine.url), "backend=lmdeploy", "transport=disk"],
        "backend=lmdeploy with transport=disk: LMDeploy has no route that loads a checkpoint folder",
        "backend=lmdeploy works with transport=ipc | nccl",
    ),
    "misspelt": (
        lambda engine, _: [urls(engine.url), "bucket.capacty=1MiB"],
        "there is no setting 'bucket.capacty'",
        "did you mean bucket.capacity?",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_two_lines(start: Start, folders: Folders, tmp_path: Path, mistake: str) -> None:
    make, what, to_do = MISTAKES[mistake]
    engine = start("sglang")
    before = engine.digest()
    defaults = ["backend=sglang", "transport=ipc", "engines=remote", "trainer=checkpoint", "updates=1"]
    command = run(tmp_path, *defaults, f"trainer.path={folders.qwen3_b}", *make(engine, folders))
    assert command.process.returncode in (1, 2)
    said = [line for line in command.err.splitlines() if not line.startswith(("W1", "W0"))]
    assert said[0].startswith("weightstream: ")
    assert what in said[0]
    assert to_do in "\n".join(said)
    assert command.err.count(what) == 1
    assert what not in command.out
    assert engine.digest() == before
    assert not engine.state()["paused"]


def test_a_key_that_is_missing_is_asked_for(start: Start, folders: Folders, tmp_path: Path) -> None:
    engine = start("sglang", api_key="secret-of-the-engine")
    settings = ["backend=sglang", "transport=ipc", "engines=remote", "trainer=checkpoint", urls(engine.url)]
    settings += [f"trainer.path={folders.qwen3_b}", "updates=1"]
    without = run(tmp_path, *settings)
    assert "answered 401" in without.err
    assert "set WEIGHTSTREAM_API_KEY here to the engine's key" in without.err
    given = run(tmp_path, *settings, WEIGHTSTREAM_API_KEY="secret-of-the-engine")
    assert given.process.returncode == 0, given.err


def test_a_port_in_use_is_named(folders: Folders, start: Start, tmp_path: Path) -> None:
    engine = start("sglang")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = ["backend=sglang", "transport=nccl", f"transport.port={port}", "engines=remote", urls(engine.url)]
        command = run(tmp_path, *settings, "trainer=checkpoint", f"trainer.path={folders.qwen3_b}", "updates=1")
    assert command.process.returncode == 1
    assert f"{port}" in command.err
    assert "transport.port" in command.err
    report = [json.loads(p.read_text()) for p in tmp_path.rglob("report.json")]
    assert all(r["outcome"] == "refused" for r in report)
