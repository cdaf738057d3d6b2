"""A request that runs while its engine is updated ends as the mode of pausing says, and the engine has the new weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from . import probes
from .checkpoints import CheckpointCache
from .proofs import assert_serves, learn
from .served import FP32, PLUGIN, Served
from .servers import MODEL, EngineServer, direct_session
from .updates import updater

TOKENS = 400  # far more than an engine makes until it is paused
SGLANG, VLLM = Served("sglang", FP32), Served("vllm", FP32, extra=PLUGIN)
MODES = [(SGLANG, "retract", False), (SGLANG, "in_place", False), (SGLANG, "abort", True)]
MODES += [(VLLM, "keep", False), (VLLM, "wait", False), (VLLM, "abort", True)]


@pytest.mark.parametrize(
    "server, mode, cut", MODES, indirect=["server"], ids=[f"{served.name}-{mode}" for served, mode, _ in MODES]
)
def test_a_running_request_ends_as_documented(
    server: EngineServer, checkpoints: CheckpointCache, tmp_path: Path, mode: str, cut: bool
) -> None:
    first, last = (checkpoints(replace(FP32, seed=seed)) for seed in (1, 2))
    learned = learn(server, last)
    with updater(server, "ipc", tmp_path, f"backend.pause={mode}", "bucket.capacity=256KiB") as weights:
        assert weights.update(first)  # sets up what an update needs: the next one pauses at once
        running = stream(server)
        next(running)
        assert weights.update(last)
    reason, count = ending(running)
    assert (reason == "abort", 1 + count < TOKENS) == (cut, cut)
    if mode == "in_place":  # old keys and values stay, by intention
        probes.ask(server, "POST", "/flush_cache?timeout=60")
    assert_serves(server, last, learned)


def stream(server: EngineServer) -> Iterator[dict[str, Any]]:
    """Events of a long generation: one per token, or per few."""
    if server.name == "vllm":
        wanted = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        path, body = "/v1/completions", {"model": MODEL, "prompt": list(probes.PROMPT)} | wanted
    else:
        sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        path, body = "/generate", {"input_ids": list(probes.PROMPT), "sampling_params": sampling, "stream": True}
    with (
        direct_session() as session,
        session.post(server.url + path, json=body, stream=True, timeout=probes.TIMEOUT) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line[6:])


def ending(running: Iterator[dict[str, Any]]) -> tuple[str, int]:
    """`(why it ended, tokens after the first event)`."""
    reason, count = "", 0
    for event in running:
        if "choices" in event:
            choice = event["choices"][0]
            reason, count = choice["finish_reason"] or reason, count + len(choice.get("token_ids") or ())
        else:  # SGLang repeats what it said before
            meta = event["meta_info"]
            reason = (meta["finish_reason"] or {}).get("type", reason)
            count = meta["completion_tokens"] - 1
    return reason, count
