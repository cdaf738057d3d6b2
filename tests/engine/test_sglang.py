"""The embedded engine as SGLang 0.5.23."""

from __future__ import annotations

import time
from typing import Any

import pytest
import requests
import torch

from pipelines.engine.protocols import sglang_generate
from stages.digest import tensor_digest
from tests.engine.checkpoints import Folders, tensors_of
from tests.engine.client import LONG_PROMPT, PROMPT, LocalEngine, wait_until
from tests.engine.conftest import Start
from tests.engine.sending import announced, by_handle, by_value, flat_bytes
from tests.engine.test_unpickle import Reduces

TENSOR = "/update_weights_from_tensor"
NORM = {"model.norm.weight": torch.full((64,), 2.0)}


@pytest.fixture
def engine(start: Start) -> LocalEngine:
    return start("sglang")


def send(engine: LocalEngine, payloads: list[str], **more: Any) -> requests.Response:
    body = {"serialized_named_tensors": payloads, "load_format": "flattened_bucket", "flush_cache": False}
    return engine.post(TENSOR, body | more)


def flattened(tensors: dict[str, torch.Tensor]) -> str:
    return by_value(flat_bytes(tensors))


def begin(engine: LocalEngine) -> None:
    assert engine.post("/begin_weight_update", {}).status_code == 200


def refused(response: requests.Response, words: str) -> bool:
    body = response.json()
    return response.status_code == 400 and body["success"] is False and words in body["message"]


# --- the right sequence


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_the_documented_sequence_makes_the_engine_the_new_model(
    engine: LocalEngine, folders: Folders, start: Start, mode: str
) -> None:
    new = tensors_of(folders.qwen3_b)
    names = sorted(new)
    engine.post("/pause_generation", {"mode": mode})
    begin(engine)
    assert send(engine, [flattened({n: new[n] for n in names[:7]})]).json() == {"success": True, "message": "Success"}
    last = {n: new[n] for n in names[7:]}
    answer = send(engine, [flattened(last)], flush_cache=True, weight_version="7")
    assert answer.json()["message"] == "Success Weight version updated to 7."
    assert "real_engine" not in engine.post("/end_weight_update", {}).json()
    assert engine.get("/model_info").json()["weight_version"] == "7"
    assert engine.get("/server_info").json()["weight_version"] == "default"
    engine.post("/continue_generation", {})
    other = start("sglang", folders.qwen3_b)
    assert engine.digest()["digest"] == other.digest()["digest"]
    assert engine.digest()["version"] == "7"
    assert engine.probe() == other.probe() | {"versions": [{"version": "7", "start": 0, "end": 8}]}
    assert engine.state()["half_loaded"] is None


@pytest.mark.parametrize("model", ["moe", "fp8"])
def test_other_kinds_of_models_take_updates(start: Start, folders: Folders, model: str) -> None:
    engine = start("sglang", getattr(folders, f"{model}_a"))
    begin(engine)
    assert send(engine, [flattened(dict(_widest_first(tensors_of(getattr(folders, f"{model}_b")))))]).status_code == 200
    engine.post("/end_weight_update", {})
    other = start("sglang", getattr(folders, f"{model}_b"))
    assert engine.digest()["digest"] == other.digest()["digest"]
    assert engine.probe() == other.probe()


def _widest_first(tensors: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)


def test_tensors_come_as_a_list_or_as_shared_memory_too(engine: LocalEngine, folders: Folders) -> None:
    new = tensors_of(folders.qwen3_b)
    begin(engine)
    half = len(new) // 2
    assert send(engine, [by_value(list(new.items())[:half])], load_format=None).status_code == 200
    rest = dict(list(new.items())[half:])
    bucket = flat_bytes(rest)
    assert send(engine, [by_handle(bucket)]).status_code == 200
    engine.post("/end_weight_update", {})
    assert engine.digest()["tensors"] == _digests(new)


def test_a_folder_is_loaded_without_a_session(engine: LocalEngine, folders: Folders) -> None:
    body = {"model_path": str(folders.qwen3_b), "weight_version": "b"}
    answer = engine.post("/update_weights_from_disk", body).json()
    words = "Succeeded to update model weights. Weight version updated to b."
    assert answer == {"success": True, "message": words, "num_paused_requests": 0}
    info = engine.get("/model_info").json()
    assert (info["model_path"], info["served_model_name"]) == (str(folders.qwen3_b),) * 2
    assert engine.digest()["tensors"] == _digests(tensors_of(folders.qwen3_b))


def test_a_folder_that_is_not_there_changes_nothing(engine: LocalEngine) -> None:
    before = engine.digest()
    answer = engine.post("/update_weights_from_disk", {"model_path": "/nowhere"})
    assert refused(answer, "Failed to get weights iterator")
    assert engine.digest() == before


# --- the session


def test_sessions_open_once_and_close_once(engine: LocalEngine) -> None:
    assert refused(engine.post("/end_weight_update", {}), "no weight-update session is open")
    begin(engine)
    assert engine.state()["session"] is True
    assert refused(engine.post("/begin_weight_update", {}), "already open; call end_weight_update() first")
    assert engine.post("/end_weight_update", {}).json()["success"] is True


def test_updates_outside_a_session_are_refused(engine: LocalEngine) -> None:
    words = "must run between begin_weight_update() and end_weight_update()"
    assert refused(send(engine, [flattened(NORM)]), words)
    body = announced(NORM) | {"group_name": "g"}
    assert refused(engine.post("/update_weights_from_distributed", body), words)
    assert engine.state()["updates"] == 0


def test_0_5_20_has_no_session_routes_and_needs_none(start: Start) -> None:
    old = start("sglang", engine_version="0.5.20")
    assert old.post("/begin_weight_update", {}).status_code == 404
    assert send(old, [flattened(NORM)]).status_code == 200
    assert old.get("/get_weight_version").status_code == 200


# --- what ends the server


@pytest.mark.parametrize(
    ("payloads", "load_format", "words"),
    [
        ([flattened({"model.norm.weight": torch.zeros(63)})], "flattened_bucket", "shape"),
        ([by_value([("model.nothing", torch.zeros(1))])], "direct", "model.nothing"),
        ([by_value([])], "bucket", "Unknown load_format=bucket"),
        ([by_value([("x", Reduces(print, "x"))])], None, "Blocked unsafe global (builtins.print)"),
        ([], "flattened_bucket", "IndexError"),
        (
            [flattened({"odd": torch.zeros(3, dtype=torch.uint8), "model.norm.weight": torch.zeros(64)})],
            "flattened_bucket",
            "storage_offset",
        ),
    ],
    ids=["shape", "direct", "format", "pickle", "short list", "unaligned"],
)
def test_mistakes_in_a_tensor_payload_end_the_server(
    engine: LocalEngine, payloads: list[str], load_format: str, words: str
) -> None:
    begin(engine)
    answer = send(engine, payloads, load_format=load_format)
    assert answer.status_code == 500
    assert words in answer.json()["message"]
    assert "process tree ends" in answer.json()["real_engine"]
    assert engine.get("/ready").status_code == 503
    assert engine.post("/generate", {"input_ids": PROMPT}).status_code == 503
    assert words in engine.state()["dead"]
    assert engine.get("/weightstream/digest").status_code == 200


def test_releasing_memory_that_was_not_released_ends_the_server(engine: LocalEngine) -> None:
    assert engine.post("/release_memory_occupation", {}).text == "null"
    assert engine.post("/resume_memory_occupation", {}).text == "null"
    assert "KeyError" in engine.post("/resume_memory_occupation", {}).json()["message"]


def test_a_token_without_an_embedding_ends_the_server(engine: LocalEngine) -> None:
    assert engine.post("/generate", {"input_ids": []}).status_code == 400
    assert engine.post("/generate", {}).json() == {
        "error": {"message": "Either text, input_ids or input_embeds should be provided."}
    }
    assert "real_engine" in engine.post("/generate", {"input_ids": [9999]}).json()
    assert engine.get("/ready").status_code == 503


# --- what succeeds silently


def test_unknown_names_are_ignored_and_missing_ones_keep_their_values(engine: LocalEngine) -> None:
    before = engine.digest()["tensors"]
    begin(engine)
    answer = send(engine, [flattened({"model.nothing": torch.zeros(3), **NORM})]).json()
    assert answer["success"] is True
    assert "unknown name model.nothing was ignored" in answer["real_engine"]
    ended = engine.post("/end_weight_update", {}).json()
    assert "24 of 25 tensors were not sent" in ended["real_engine"]
    changed = {n for n, d in engine.digest()["tensors"].items() if before[n] != d}
    assert changed == {"model.norm.weight"}


def test_another_dtype_is_cast(engine: LocalEngine) -> None:
    begin(engine)
    answer = send(engine, [flattened({"model.norm.weight": torch.full((64,), 3.0).bfloat16()})]).json()
    assert answer["success"] is True
    assert "cast from bfloat16 to float32" in answer["real_engine"]


def test_plain_floats_into_fp8_leave_stale_scales(start: Start, folders: Folders) -> None:
    engine = start("sglang", folders.fp8_a)
    begin(engine)
    answer = send(engine, [flattened(tensors_of(folders.qwen3_b))]).json()
    assert answer["success"] is True
    assert "cast from float32 to float8_e4m3fn" in answer["real_engine"]
    engine.post("/end_weight_update", {})
    assert engine.probe()["output_ids"] != start("sglang", folders.qwen3_b).probe()["output_ids"]


def test_extra_fields_are_ignored(engine: LocalEngine) -> None:
    assert engine.post("/begin_weight_update", {"selecter": "draft"}).status_code == 200
    assert send(engine, [flattened(NORM)], flush_chache=True).status_code == 200


# --- pauses, versions, caches


def test_abort_returns_partial_output(engine: LocalEngine) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 900, "temperature": 0, "ignore_eos": True}}
    running = engine.later("/generate", body)
    wait_until(lambda: engine.state()["running"] == 1)
    engine.post("/pause_generation", {})
    answer = running.result(20).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "Aborted"}
    assert len(answer["output_ids"]) < 900


def test_retracted_requests_finish_under_the_new_version(engine: LocalEngine, folders: Folders) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}}
    running = engine.later("/generate", body)
    wait_until(lambda: engine.state()["running"] == 1)
    engine.post("/pause_generation", {"mode": "retract"})
    assert engine.state()["waiting"] == 1
    update = {"model_path": str(folders.qwen3_b), "weight_version": "b"}
    assert engine.post("/update_weights_from_disk", update).status_code == 200
    engine.post("/continue_generation", {})
    meta = running.result(30).json()["meta_info"]
    assert meta["num_retractions"] == 1
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "b"]
    assert meta["weight_version"] == "b"


def test_in_place_keeps_kv_so_that_a_flush_fails_after_the_weights_changed(
    engine: LocalEngine, folders: Folders
) -> None:
    running = engine.probe_later(600)
    engine.post("/pause_generation", {"mode": "in_place"})
    update = {"model_path": str(folders.qwen3_b), "weight_version": "b"}
    answer = engine.post("/update_weights_from_disk", update)
    assert refused(answer, "Weights were updated, but the cache was not flushed")
    assert "the weights have changed" in answer.json()["real_engine"]
    assert engine.digest()["tensors"] == _digests(tensors_of(folders.qwen3_b))
    assert engine.get("/model_info").json()["weight_version"] == "default"
    assert engine.post("/flush_cache").status_code == 400
    engine.post("/continue_generation", {})
    spans = running.result(30).json()["versions"]
    assert [span["version"] for span in spans] == ["default", "b"]


def test_a_flush_with_a_timeout_waits_for_what_was_retracted_too(engine: LocalEngine) -> None:
    running = engine.probe_later(200)
    engine.post("/pause_generation", {"mode": "retract"})
    assert engine.post("/flush_cache?timeout=0.1").status_code == 400
    assert engine.post("/flush_cache").status_code == 200
    engine.post("/continue_generation", {})
    assert running.result(30).status_code == 200


def test_an_unpaused_update_waits_for_running_requests(engine: LocalEngine) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
    running = engine.later("/generate", body)
    wait_until(lambda: engine.state()["running"] == 1)
    assert engine.post("/begin_weight_update", {}).status_code == 200
    assert engine.state()["running"] == 0
    assert running.result(5).status_code == 200


def test_requests_sent_while_paused_wait(engine: LocalEngine) -> None:
    engine.post("/pause_generation", {"mode": "abort"})
    assert engine.get("/ready").status_code == 503
    native = engine.later("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    probe = engine.later("/weightstream/generate", {"input_ids": PROMPT, "max_new_tokens": 2})
    time.sleep(0.1)
    assert not native.done()
    assert not probe.done()
    engine.post("/continue_generation", {})
    assert native.result(20).status_code == probe.result(20).status_code == 200
    assert engine.get("/ready").status_code == 200


def test_health_generates_a_token_and_fails_while_paused(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_generate, "HEALTH_TIMEOUT", 0.1)
    assert engine.get("/health").status_code == 200
    engine.post("/pause_generation", {"mode": "in_place"})
    assert engine.get("/health").status_code == 503
    engine.post("/continue_generation", {})
    assert engine.get("/health").status_code == 200


def test_cached_prefixes_survive_an_update_without_a_flush(engine: LocalEngine, folders: Folders) -> None:
    engine.probe(LONG_PROMPT)
    update = {"model_path": str(folders.qwen3_b), "flush_cache": False}
    engine.post("/update_weights_from_disk", update)
    stale = engine.probe(LONG_PROMPT)
    assert stale["cached_tokens"] == 32
    assert engine.get("/flush_cache").text.startswith("Cache flushed.")
    fresh = engine.probe(LONG_PROMPT)
    assert fresh["cached_tokens"] == 0
    assert fresh["logprobs"] != stale["logprobs"]


def test_a_flush_with_a_timeout_waits_for_idle(engine: LocalEngine) -> None:
    running = engine.probe_later(200)
    assert engine.post("/flush_cache").status_code == 400
    assert engine.post("/flush_cache?timeout=20").status_code == 200
    assert running.result(1).status_code == 200


def test_setting_the_version_aborts_requests_unless_told_not_to(engine: LocalEngine) -> None:
    running = engine.probe_later(600)
    engine.post("/update_weight_version", {"new_version": "x", "abort_all_requests": False})
    assert not running.done()
    answer = engine.post("/update_weight_version", {"new_version": "y"}).json()
    assert answer == {"success": True, "message": "Weight version updated to y", "new_version": "y"}
    assert running.result(10).json()["finish_reason"] == "abort"
    assert engine.get("/model_info").json()["weight_version"] == "y"


def test_generate_reports_logprobs_and_versions(engine: LocalEngine) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = engine.post("/generate", body).json()
    probe = engine.probe(tokens=3)
    assert answer["output_ids"] == probe["output_ids"]
    meta = answer["meta_info"]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in probe["output_ids"]]
    torch.testing.assert_close([entry[0] for entry in meta["output_token_logprobs"]], probe["logprobs"])
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert meta["finish_reason"] == {"type": "length", "length": 3}


def test_checksums_tell_models_apart(engine: LocalEngine, start: Start, folders: Folders) -> None:
    mine = engine.post("/weights_checker", {"action": "checksum"}).json()
    assert mine["ranks"][0]["parallelism_info"][0]["tp_size"] == 1
    assert all(len(value) == 16 for value in mine["ranks"][0]["checksums"].values())
    theirs = start("sglang", folders.qwen3_b).get("/weights_checker").json()
    assert mine["per_engine_checksum"] != theirs["per_engine_checksum"]
    assert refused(engine.post("/weights_checker", {"action": "guess"}), "guess")


def _digests(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: tensor_digest(tensor) for name, tensor in tensors.items()}
