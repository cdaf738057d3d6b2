"""Engines as processes: start and end, ranks, shared memory and process groups between unrelated processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import torch

from stages.digest import tensor_digest
from stages.transport.group import BroadcastGroup, GroupStore
from stages.transport.messages import GroupInit
from tests.engine.checkpoints import Folders, tensors_of
from tests.engine.client import wait_until
from tests.engine.process import ProcessEngine, hello, spawn
from tests.engine.sending import VllmBuckets, announced, by_handle, by_value, flat_bytes, flat_elements, reduced

KEYS = {"WEIGHTSTREAM_ENGINE_API_KEY": "", "WEIGHTSTREAM_ENGINE_ADMIN_KEY": ""}
TP = 2


@pytest.fixture(scope="module")
def engines(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ProcessEngine]]:
    """One engine of two ranks per backend, shared by the tests of this file."""
    logs = tmp_path_factory.mktemp("logs")
    started = {
        backend: ProcessEngine(
            folders.qwen3_a, backend, logs / backend, "--tp", str(TP), "--group-timeout", "20", **KEYS
        )
        for backend in ("lmdeploy", "sglang", "vllm")
    }
    try:
        yield {backend: engine.ready() for backend, engine in started.items()}
    finally:
        for engine in started.values():
            engine.close()


class Trainer:
    """Rank 0 of a group with one engine."""

    def __init__(self, name: str) -> None:
        self._store = GroupStore("127.0.0.1", 0, 20.0)
        self.init = GroupInit("127.0.0.1", self._store.port, 1, 1 + TP, name, "gloo", 20.0)
        self.group: BroadcastGroup | None = None

    def body(self) -> dict[str, object]:
        fields = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        return {field: getattr(self.init, field) for field in fields}

    def join_with(self, engine: ProcessEngine, path: str, body: dict[str, object]) -> requests.Response:
        answer = engine.later(path, body)
        self.group = BroadcastGroup.lead(self._store, self.init, torch.device("cpu"))
        return answer.result(20)

    def send(
        self, engine: ProcessEngine, path: str, body: dict[str, object], *parts: torch.Tensor
    ) -> requests.Response:
        assert self.group is not None
        answer = engine.later(path, body)
        for part in parts:
            self.group.broadcast(part)
        return answer.result(20)


def same_on_all_ranks(engine: ProcessEngine, tensors: dict[str, torch.Tensor]) -> None:
    found = engine.digest()
    assert {rank["digest"] for rank in found["ranks"]} == {found["digest"]}
    assert [rank["rank"] for rank in found["ranks"]] == list(range(TP))
    assert {name: found["tensors"][name] for name in tensors} == {n: tensor_digest(t) for n, t in tensors.items()}


# --- two ranks


def test_every_rank_has_its_own_process_and_the_same_weights(engines: dict[str, ProcessEngine]) -> None:
    for backend, engine in engines.items():
        state = engine.state()
        assert (state["backend"], state["tp"], state["pid"]) == (backend, TP, engine.process.pid)
        assert len(state["rank_pids"]) == TP - 1
        found = engine.digest()
        assert {rank["digest"] for rank in found["ranks"]} == {found["digest"]}
    assert len({engine.digest()["digest"] for engine in engines.values()}) == 1
    assert engines["vllm"].get("/get_world_size").json() == {"world_size": TP}


def test_sglang_decodes_each_rank_s_own_shared_memory(engines: dict[str, ProcessEngine], folders: Folders) -> None:
    engine, new = engines["sglang"], tensors_of(folders.qwen3_b)
    assert engine.post("/begin_weight_update", {}).status_code == 200
    bucket = flat_bytes(new)
    body = {"serialized_named_tensors": [by_handle(bucket) for _ in range(TP)], "load_format": "flattened_bucket"}
    assert engine.post("/update_weights_from_tensor", body).json()["success"] is True
    engine.post("/end_weight_update", {})
    same_on_all_ranks(engine, new)


def test_sglang_ranks_that_got_different_payloads_differ(engines: dict[str, ProcessEngine], folders: Folders) -> None:
    engine = engines["sglang"]
    engine.post("/begin_weight_update", {})
    payloads = [by_value([("model.norm.weight", torch.full((64,), float(rank)))]) for rank in range(TP)]
    engine.post("/update_weights_from_tensor", {"serialized_named_tensors": payloads})
    engine.post("/end_weight_update", {})
    digests = [rank["digest"] for rank in engine.digest()["ranks"]]
    assert len(set(digests)) == TP
    body = {"model_path": str(folders.qwen3_a)}
    assert engine.post("/update_weights_from_disk", body).status_code == 200
    same_on_all_ranks(engine, tensors_of(folders.qwen3_a))


@pytest.mark.parametrize("load_format", ["flattened_bucket", None])
def test_sglang_takes_broadcasts(engines: dict[str, ProcessEngine], folders: Folders, load_format: str | None) -> None:
    engine, new = engines["sglang"], tensors_of(folders.qwen3_b)
    trainer = Trainer(f"sglang-{load_format}")
    joined = trainer.join_with(engine, "/init_weights_update_group", trainer.body())
    assert joined.json() == {"success": True, "message": "Succeeded to initialize custom process group."}
    engine.post("/begin_weight_update", {})
    body = announced(new) | {"group_name": trainer.init.group_name, "load_format": load_format, "flush_cache": False}
    parts = [flat_bytes(new)["flattened_tensor"]] if load_format else list(new.values())
    answer = trainer.send(engine, "/update_weights_from_distributed", body, *parts)
    assert answer.json() == {"success": True, "message": "Succeeded to update parameter online."}
    engine.post("/end_weight_update", {})
    same_on_all_ranks(engine, new)
    body["group_name"] = "other"
    engine.post("/begin_weight_update", {})
    refused = engine.post("/update_weights_from_distributed", body)
    assert refused.status_code == 400
    assert "Please call `init_weights_update_group` first" in refused.json()["message"]
    engine.post("/end_weight_update", {})
    again = engine.post("/init_weights_update_group", trainer.body())
    assert again.status_code == 400
    destroyed = engine.post("/destroy_weights_update_group", {"group_name": trainer.init.group_name})
    assert destroyed.json()["message"] == "Succeeded to destroy custom process group."
    assert engine.state()["groups"] == []


def test_sglang_refuses_an_unaligned_broadcast_before_it_joins_it(engines: dict[str, ProcessEngine]) -> None:
    engine = engines["sglang"]
    trainer = Trainer("unaligned")
    trainer.join_with(engine, "/init_weights_update_group", trainer.body())
    engine.post("/begin_weight_update", {})
    tensors = {"odd": torch.zeros(3, dtype=torch.uint8), "model.norm.weight": torch.zeros(64)}
    body = announced(tensors) | {"group_name": "unaligned", "load_format": "flattened_bucket"}
    answer = engine.post("/update_weights_from_distributed", body)
    assert answer.status_code == 400
    assert "Failed to receive weights" in answer.json()["message"]
    loaded = trainer.send(
        engine,
        "/update_weights_from_distributed",
        announced({"model.norm.weight": torch.zeros(63)}) | {"group_name": "unaligned"},
        torch.zeros(63),
    )
    assert loaded.status_code == 400
    assert "partially updated. Please discard the whole weights." in loaded.json()["message"]
    engine.post("/end_weight_update", {})
    engine.post("/destroy_weights_update_group", {"group_name": "unaligned"})


def test_lmdeploy_takes_handles_and_broadcasts(engines: dict[str, ProcessEngine], folders: Folders) -> None:
    engine, new = engines["lmdeploy"], tensors_of(folders.qwen3_b)
    flat, metadata = flat_elements(new)
    content = {"metadata": metadata, "flattened_tensor": reduced(flat), "require_clone": False}
    body = {
        "serialized_named_tensors": [by_handle(content) for _ in range(TP)],
        "load_format": "flattened_bucket",
        "finished": True,
    }
    assert engine.post("/update_weights", body).text == "null"
    same_on_all_ranks(engine, new)

    trainer = Trainer("lmdeploy")
    joined = trainer.join_with(engine, "/init_weights_update_group", trainer.body())
    assert joined.json()["message"] == "Succeeded to initialize weights update group."
    assert "already initialized" in engine.post("/init_weights_update_group", trainer.body()).json()["message"]
    old = tensors_of(folders.qwen3_a)
    flat, _ = flat_elements(old)
    body = announced(old) | {"group_name": "lmdeploy", "load_format": "flattened_bucket", "finished": True}
    answer = trainer.send(engine, "/update_weights_from_distributed", body, flat)
    assert answer.json() == {"success": True, "message": "Succeeded to update parameter online."}
    same_on_all_ranks(engine, old)

    mixed = {"model.norm.weight": torch.zeros(64), "x": torch.zeros(2, dtype=torch.float16)}
    body = announced(mixed) | {"group_name": "lmdeploy", "load_format": "flattened_bucket"}
    refused = engine.post("/update_weights_from_distributed", body)
    assert refused.status_code == 400
    assert "All tensors should have same dtype" in refused.json()["message"]
    body = announced({"x": torch.zeros(2)}) | {"group_name": "lmdeploy"}
    unknown = trainer.send(engine, "/update_weights_from_distributed", body, torch.zeros(2))
    words = "Failed to update parameter online: 'x'. The model weights are partially updated; please discard them and reload."
    each = f"update_weights_from_distributed: rank0: {words} | rank1: {words}"
    assert unknown.json() == {"success": False, "message": each}
    empty = {"names": [], "dtypes": [], "shapes": [], "group_name": "lmdeploy", "finished": True}
    assert engine.post("/update_weights_from_distributed", empty).status_code == 200
    assert engine.post("/destroy_weights_update_group", {"group_name": "lmdeploy"}).status_code == 200
    gone = engine.post("/update_weights_from_distributed", empty)
    assert "rank0: group 'lmdeploy' not initialized. Call init_weights_update_group first." in gone.json()["message"]


def test_vllm_takes_segments_and_broadcasts(engines: dict[str, ProcessEngine], folders: Folders) -> None:
    engine = engines["vllm"]
    old, new = tensors_of(folders.qwen3_a), tensors_of(folders.qwen3_b)
    buckets = VllmBuckets(new, 64 << 10)
    engine.post("/pause")
    assert engine.post("/init_weight_transfer_engine", {"init_info": buckets.init_info()}).status_code == 200
    engine.post("/start_weight_update")
    for seq in range(len(buckets.segments)):
        assert engine.post("/update_weights", {"update_info": buckets.update_info(seq)}).status_code == 200
    assert engine.post("/finish_weight_update", {"weight_version": "b"}).status_code == 200
    buckets.close()
    same_on_all_ranks(engine, new)

    trainer, buckets = Trainer("vllm"), VllmBuckets(old, 64 << 10)
    info = trainer.body() | {"transport": "nccl", "timeout": 20.0, "slot_bytes": buckets.slot_bytes}
    joined = trainer.join_with(engine, "/init_weight_transfer_engine", {"init_info": info})
    assert joined.status_code == 200
    engine.post("/start_weight_update")
    for seq, segment in enumerate(buckets.segments):
        update = buckets.update_info(seq) | {"slot": None}
        part = segment.memory[: buckets.plan.buckets[seq].nbytes].clone()
        assert trainer.send(engine, "/update_weights", {"update_info": update}, part).status_code == 200
    assert engine.post("/finish_weight_update", {"weight_version": "a"}).status_code == 200
    buckets.close()
    same_on_all_ranks(engine, old)
    assert engine.post("/shutdown_weight_transfer_engine").status_code == 200
    engine.post("/resume")


# --- start and end


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("way", ["SIGTERM", "stdin", "SIGKILL"])
def test_nothing_is_left_however_it_ends(folders: Folders, tmp_path: Path, way: str) -> None:
    flags = ["--tp", "2", "--group-timeout", "600", "--exit-with-parent"]
    engine = ProcessEngine(folders.qwen3_a, "sglang", tmp_path / "log", *flags, **KEYS).ready()
    pids = [engine.process.pid, *engine.state()["rank_pids"]]
    engine.probe_later(900)
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # a rendezvous that never completes
        stuck = Trainer("stuck").body() | {"master_port": nobody.getsockname()[1]}
        engine.later("/init_weights_update_group", stuck)
        time.sleep(0.3)
        began = time.monotonic()
        if way == "stdin":
            assert engine.process.stdin is not None
            engine.process.stdin.close()
        else:
            engine.process.send_signal(getattr(signal, way))
        code = engine.process.wait(5)
        wait_until(lambda: not any(alive(pid) for pid in pids), 5)
    assert time.monotonic() - began < 3
    assert code == (-signal.SIGKILL if way == "SIGKILL" else 0)
    engine.close()


def test_a_restarted_engine_has_another_incarnation(engines: dict[str, ProcessEngine]) -> None:
    assert len({engine.incarnation for engine in engines.values()}) == 3
    for engine in engines.values():
        assert engine.state()["incarnation"] == engine.incarnation


def test_it_listens_on_the_port_it_was_told(folders: Folders, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = spawn(folders.qwen3_a, "vllm", tmp_path / "log", "--port", str(taken.getsockname()[1]), **KEYS)
        assert process.wait(60) == 1
        process.communicate()
    assert "cannot listen on 127.0.0.1" in (tmp_path / "log").read_text()


def test_keys_stay_in_the_server_and_on_fatal_exit_really_ends_it(folders: Folders, tmp_path: Path) -> None:
    keys = {"WEIGHTSTREAM_ENGINE_API_KEY": "secret-one", "WEIGHTSTREAM_ENGINE_ADMIN_KEY": "secret-two"}
    flags = ["--tp", "2", "--on-fatal", "exit"]
    engine = ProcessEngine(folders.qwen3_a, "sglang", tmp_path / "log", *flags, **keys).ready()
    try:
        assert engine.get("/weightstream/state").status_code == 401
        ranks = engine.get("/weightstream/state", key="secret-one").json()["rank_pids"]
        assert b"secret" not in Path(f"/proc/{ranks[0]}/environ").read_bytes()
        assert engine.post("/begin_weight_update", {}, key="secret-two").status_code == 200
        with pytest.raises(requests.ConnectionError):
            engine.post("/update_weights_from_tensor", {"serialized_named_tensors": []}, key="secret-two")
        assert engine.process.wait(5) == 1
        wait_until(lambda: not alive(ranks[0]), 5)
        assert "secret" not in (tmp_path / "log").read_text()
    finally:
        engine.close()


def test_a_wrong_start_says_what_is_wrong(folders: Folders, tmp_path: Path) -> None:
    flags = [("--model", "/nowhere"), ("--host", "0.0.0.0"), ("--engine-version", "9")]
    words = ["no config.json", "WEIGHTSTREAM_ENGINE_API_KEY", "not emulated"]
    processes = [spawn(folders.qwen3_a, "sglang", tmp_path / str(i), *flag, **KEYS) for i, flag in enumerate(flags)]
    for i, process in enumerate(processes):
        assert process.wait(60) == 1
        process.communicate()
        said = (tmp_path / str(i)).read_text()
        assert words[i] in said
        assert "Traceback" not in said


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, pipelines.engine, pipelines.engine.__main__; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_it_prints_one_json_line_and_ends_on_ctrl_c(folders: Folders, tmp_path: Path) -> None:
    process = spawn(folders.qwen3_a, "lmdeploy", tmp_path / "log", **KEYS)
    try:
        said = hello(process)
        assert set(said) == {"url", "pid", "incarnation"}
        assert said["pid"] == process.pid
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=5)
    finally:
        process.kill()
    assert output == b""
    assert process.returncode == 0


def test_threads_do_not_pile_up(engines: dict[str, ProcessEngine]) -> None:
    engine = engines["vllm"]
    engine.probe()
    before = engine.state()["threads"]
    jobs = [threading.Thread(target=engine.probe) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert engine.state()["threads"] <= before + 6


def test_a_killed_rank_ends_the_whole_engine(engines: dict[str, ProcessEngine]) -> None:
    """Stands last: it uses up one of the shared engines."""
    engine = engines["lmdeploy"]
    os.kill(engine.state()["rank_pids"][0], signal.SIGKILL)
    wait_until(lambda: engine.state()["dead"] is not None)
    assert engine.get("/is_sleeping").status_code == 503
