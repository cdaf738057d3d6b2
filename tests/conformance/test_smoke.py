"""Every engine starts, serves, and takes an update by its own simplest route: the ground that the other tests stand
on."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from .checkpoints import CheckpointCache, Recipe
from .probes import assert_lmdeploy_holds, call, expected_speech, fingerprint, speak, stock_update
from .served import CONTROL, FP32, READ, Served, serve
from .servers import EngineServer


@serve(Served("vllm", FP32), Served("sglang", FP32), Served("sglang", FP32, tp=2))
def test_engine_speaks_like_transformers_before_and_after_a_stock_update(
    server: EngineServer, checkpoints: CheckpointCache
) -> None:
    for seed in (1, 0):
        folder = checkpoints(replace(FP32, seed=seed))
        stock_update(server, folder)
        assert speak(server).close_to(expected_speech(folder), 1e-3)


@serve(Served("lmdeploy"), Served("lmdeploy", tp=2), Served("lmdeploy", Recipe("qwen3_moe"), tp=2))
def test_lmdeploy_holds_the_checkpoint_before_and_after_a_stock_update(
    server: EngineServer, checkpoints: CheckpointCache
) -> None:
    arch = "qwen3_moe" if "moe" in server.model_dir.name else "qwen3"
    for seed in (1, 0):
        folder = checkpoints(Recipe(arch, seed=seed))
        stock_update(server, folder)
        assert_lmdeploy_holds(server, folder)


@serve(Served("sglang", FP32), Served("lmdeploy"))
def test_server_restarts_on_its_port_and_leaves_nothing(server: EngineServer) -> None:
    before, url, pids = fingerprint(server), server.url, server.pids()
    server.kill()
    assert not server.alive()
    assert not server.ready()
    assert not [pid for pid in pids if _running(pid)]
    server.restart()
    assert server.url == url
    assert fingerprint(server) == before


@serve(Served("sglang", FP32, api_key=READ, admin_key=CONTROL))
def test_sglang_wants_one_key_for_control_and_another_for_reading(server: EngineServer) -> None:
    assert call(server, "POST", "/flush_cache?timeout=60", control=True).status_code == 200
    assert call(server, "POST", "/flush_cache", control=False).status_code == 401
    assert call(server, "GET", "/model_info", control=False).status_code == 200
    assert call(server, "GET", "/model_info", control=True).status_code == 401


@serve(Served("lmdeploy", api_key=READ))
def test_lmdeploy_wants_its_key(server: EngineServer) -> None:
    assert call(server, "GET", "/is_sleeping").status_code == 200
    server.api_key, key = None, server.api_key
    try:
        assert call(server, "GET", "/is_sleeping").status_code == 401
    finally:
        server.api_key = key


def _running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of vllm, sglang, lmdeploy"):
        EngineServer("tgi", os.getcwd())
