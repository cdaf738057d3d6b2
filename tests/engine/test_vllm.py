"""The embedded engine as vLLM 0.32.0 with weightstream's plug-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import requests
import torch

from tests.engine.checkpoints import Folders, tensors_of
from tests.engine.client import LONG_PROMPT, PROMPT, LocalEngine, wait_until
from tests.engine.conftest import Start
from tests.engine.sending import VllmBuckets

Ship = Callable[..., VllmBuckets]
NORM = {"model.norm.weight": torch.full((64,), 2.0)}
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def engine(start: Start) -> LocalEngine:
    return start("vllm")


@pytest.fixture
def ship() -> Iterator[Ship]:
    """`ship(engine, tensors)` initialises the transfer, starts and sends all buckets but does not finish."""
    made: list[VllmBuckets] = []

    def sender(engine: LocalEngine, tensors: dict[str, torch.Tensor], bucket_bytes: int = 1 << 20) -> VllmBuckets:
        buckets = VllmBuckets(tensors, bucket_bytes)
        made.append(buckets)
        ok(engine.post("/init_weight_transfer_engine", {"init_info": buckets.init_info()}))
        ok(engine.post("/start_weight_update"))
        for seq in range(len(buckets.segments)):
            ok(engine.post("/update_weights", {"update_info": buckets.update_info(seq)}))
        return buckets

    yield sender
    for buckets in made:
        buckets.close()


def ok(response: requests.Response) -> requests.Response:
    assert response.status_code == 200, response.text
    return response


def failed(response: requests.Response, words: str) -> bool:
    error = response.json()["error"]
    return response.status_code == error["code"] == 500 and words in error["message"]


# --- the right sequence


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 50_000])
@pytest.mark.parametrize("model", ["qwen3", "moe", "fp8"])
def test_the_documented_sequence_makes_the_engine_the_new_model(
    start: Start, ship: Ship, folders: Folders, model: str, bucket_bytes: int
) -> None:
    engine = start("vllm", getattr(folders, f"{model}_a"))
    ok(engine.post("/pause?mode=keep"))
    assert engine.get("/is_paused").json() == {"is_paused": True}
    ship(engine, tensors_of(getattr(folders, f"{model}_b")), bucket_bytes)
    answer = ok(engine.post("/finish_weight_update", {"weight_version": "7"})).json()
    assert answer == {"message": "Weight update finished"}
    assert engine.get("/weight_info").json() == {"weight_version": "7"}
    ok(engine.post("/resume"))
    other = start("vllm", getattr(folders, f"{model}_b"))
    assert engine.digest()["digest"] == other.digest()["digest"]
    assert engine.probe()["output_ids"] == other.probe()["output_ids"]
    assert engine.state()["half_loaded"] is None


def test_a_folder_is_loaded_by_a_collective_call(engine: LocalEngine, folders: Folders, start: Start) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folders.qwen3_b)}}
    assert ok(engine.post("/collective_rpc", body)).json() == {"results": [None]}
    assert engine.digest()["digest"] == start("vllm", folders.qwen3_b).digest()["digest"]
    body["kwargs"]["weights_path"] = "/nowhere"
    assert failed(engine.post("/collective_rpc", body), "config.json")


# --- the session


def test_the_order_of_calls_is_enforced(engine: LocalEngine, ship: Ship) -> None:
    assert failed(engine.post("/update_weights", {"update_info": {}}), "start_weight_update must be called before")
    assert failed(engine.post("/finish_weight_update", {}), "without a matching start_weight_update")
    assert failed(engine.post("/start_weight_update"), "no init_info yet")
    ship(engine, NORM)
    assert failed(engine.post("/start_weight_update"), "already active. Call finish_weight_update first")
    assert failed(engine.post("/shutdown_weight_transfer_engine"), "during a weight update")
    ok(engine.post("/finish_weight_update"))
    ok(engine.post("/shutdown_weight_transfer_engine"))


def test_an_error_in_an_update_ends_the_session(engine: LocalEngine, ship: Ship) -> None:
    ok(engine.post("/pause"))
    ship(engine, NORM)
    assert failed(engine.post("/update_weights", {"update_info": {"surprise": 1}}), "unknown keys ['surprise']")
    assert engine.state()["session"] is False
    assert failed(engine.post("/finish_weight_update", {}), "without a matching start_weight_update")
    assert "an update failed" in engine.state()["half_loaded"]


def test_finishing_with_buckets_missing_fails_and_the_session_stays_open(engine: LocalEngine, ship: Ship) -> None:
    buckets = ship(engine, NORM)
    ok(engine.post("/finish_weight_update"))
    ok(engine.post("/start_weight_update"))
    assert failed(engine.post("/finish_weight_update"), "0 of 1 buckets")
    assert engine.state()["session"] is True
    assert failed(engine.post("/weight_checker", {"action": "checksum"}), "Cannot copy out of meta tensor")
    ok(engine.post("/update_weights", {"update_info": buckets.update_info(0, update=2)}))
    ok(engine.post("/finish_weight_update"))


# --- what ends the engine


@pytest.mark.parametrize("after_update", [False, True])
def test_a_forward_pass_between_start_and_finish_ends_the_engine(
    engine: LocalEngine, ship: Ship, after_update: bool
) -> None:
    buckets = ship(engine, NORM)
    if not after_update:
        ok(engine.post("/finish_weight_update"))
        ok(engine.post("/start_weight_update"))
    assert buckets.segments
    answer = engine.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    assert failed(answer, "meta device")
    assert "process ends" in answer.json()["real_engine"]
    assert engine.get("/health").status_code == 503
    assert "meta device" in engine.state()["dead"]


def test_an_unknown_name_is_repaired_by_a_complete_update(engine: LocalEngine, ship: Ship, folders: Folders) -> None:
    ok(engine.post("/pause?mode=keep"))
    with pytest.raises(AssertionError, match=r"no module or parameter named 'model.nothing'"):
        ship(engine, {"model.nothing": torch.zeros(4)})
    assert engine.get("/health").status_code == 200
    ship(engine, tensors_of(folders.qwen3_b))
    ok(engine.post("/finish_weight_update", {"weight_version": "b"}))
    ok(engine.post("/resume"))
    assert len(engine.probe()["output_ids"]) == 8
    assert engine.state()["half_loaded"] is None


def test_after_a_failed_update_a_forward_pass_ends_the_engine(engine: LocalEngine, ship: Ship) -> None:
    with pytest.raises(AssertionError):
        ship(engine, {"model.nothing": torch.zeros(4)})
    assert failed(engine.post("/v1/completions", {"prompt": PROMPT}), "meta device")


def test_a_wrong_shape_cannot_be_repaired(engine: LocalEngine, ship: Ship, folders: Folders) -> None:
    ok(engine.post("/pause?mode=keep"))
    for tensors in ({"model.norm.weight": torch.zeros(63)}, tensors_of(folders.qwen3_b)):
        with pytest.raises(AssertionError, match=r"Attempted to load weight \[63\] into parameter \[64\]"):
            ship(engine, tensors)
    waiting = engine.later("/v1/completions", {"prompt": PROMPT})
    answer = ok(engine.post("/resume")).json()
    assert "on the meta device" in answer["real_engine"]
    assert failed(waiting.result(20), "meta device")


# --- what succeeds silently


def test_a_torn_fused_layer_is_garbage(engine: LocalEngine, ship: Ship, folders: Folders) -> None:
    ok(engine.post("/pause"))
    ship(engine, {Q: tensors_of(folders.qwen3_b)[Q]})
    answer = ok(engine.post("/finish_weight_update", {})).json()
    assert "k_proj.weight did not come with the rest of its fused layer" in answer["real_engine"]
    ok(engine.post("/resume"))
    assert engine.probe()["logprobs"] == [None] * 8
    body = {"prompt": PROMPT, "logprobs": 1, "temperature": 0}
    assert engine.post("/v1/completions", body).status_code == 400


def test_missing_layers_keep_their_weights(engine: LocalEngine, ship: Ship) -> None:
    before = engine.digest()["tensors"]
    ok(engine.post("/pause"))
    ship(engine, NORM)
    answer = ok(engine.post("/finish_weight_update", {})).json()
    assert "24 of 25 tensors were not sent" in answer["real_engine"]
    assert {n for n, d in engine.digest()["tensors"].items() if d != before[n]} == {"model.norm.weight"}


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 100])
def test_another_dtype_is_cast(engine: LocalEngine, ship: Ship, bucket_bytes: int) -> None:
    value = torch.rand(64).bfloat16()
    ok(engine.post("/pause"))
    ship(engine, {"model.norm.weight": value}, bucket_bytes)
    ok(engine.post("/finish_weight_update", {}))
    assert torch.equal(engine.engine.model.weights.tensors["model.norm.weight"], value.float())


def test_the_version_is_a_label_that_finish_may_leave_out(engine: LocalEngine, ship: Ship) -> None:
    assert engine.get("/weight_info").json() == {"weight_version": "default"}
    ok(engine.post("/update_weight_version", {"new_version": "z"}))
    ship(engine, NORM)
    ok(engine.post("/finish_weight_update"))
    assert engine.get("/weight_info").json() == {"weight_version": "z"}


# --- pause, caches, versions


def test_aborting_returns_partial_output(engine: LocalEngine) -> None:
    running = engine.later("/v1/completions", {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True})
    wait_until(lambda: engine.state()["running"] == 1)
    ok(engine.post("/pause"))
    choice = running.result(20).json()["choices"][0]
    assert choice["finish_reason"] == "abort"


def test_waiting_drains_and_queues_new_requests(engine: LocalEngine) -> None:
    running = engine.probe_later(300)
    ok(engine.post("/pause?mode=wait"))
    assert running.result(5).json()["finish_reason"] == "length"
    late = engine.later("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
    wait_until(lambda: engine.state()["waiting"] == 1)
    ok(engine.post("/resume"))
    assert late.result(20).status_code == 200


def test_0_33_rejects_new_requests_while_paused(start: Start) -> None:
    engine = start("vllm", engine_version="0.33.0")
    ok(engine.post("/pause?mode=wait"))
    answer = engine.post("/v1/completions", {"prompt": PROMPT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_paused")
    ok(engine.post("/pause?mode=keep"))
    late = engine.later("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
    wait_until(lambda: engine.state()["waiting"] == 1)
    ok(engine.post("/resume"))
    assert late.result(20).status_code == 200


def test_kept_requests_carry_a_version_per_token_over_an_update(start: Start, ship: Ship, folders: Folders) -> None:
    engine = start("vllm", scale_out=True)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 400, "temperature": 0, "ignore_eos": True}}
    ok(engine.post("/update_weight_version", {"new_version": "a"}))
    running = engine.later("/inference/v1/generate", body)
    wait_until(lambda: engine.state()["running"] == 1)
    ok(engine.post("/pause?mode=keep&clear_cache=false"))
    ship(engine, tensors_of(folders.qwen3_b))
    ok(engine.post("/finish_weight_update", {"weight_version": "b"}))
    ok(engine.post("/resume"))
    spans = running.result(30).json()["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["a", "b"]
    assert (spans[0]["start"], spans[0]["end"], spans[1]["end"]) == (0, spans[1]["start"], 400)


def test_prefixes_survive_an_update_until_they_are_reset(engine: LocalEngine, ship: Ship, folders: Folders) -> None:
    engine.probe(LONG_PROMPT)
    ok(engine.post("/pause?clear_cache=false"))
    ship(engine, tensors_of(folders.qwen3_b))
    ok(engine.post("/finish_weight_update", {}))
    ok(engine.post("/resume"))
    stale = engine.probe(LONG_PROMPT)
    assert ok(engine.post("/reset_prefix_cache")).json() == {"success": True}
    fresh = engine.probe(LONG_PROMPT)
    assert (stale["cached_tokens"], fresh["cached_tokens"]) == (32, 0)
    assert stale["logprobs"] != fresh["logprobs"]


def test_prefixes_cannot_be_reset_while_blocks_are_held(engine: LocalEngine) -> None:
    running = engine.probe_later(500)
    ok(engine.post("/pause?mode=keep&clear_cache=false"))
    assert ok(engine.post("/reset_prefix_cache")).json() == {"success": False}
    assert ok(engine.post("/reset_prefix_cache?reset_running_requests=true")).json() == {"success": True}
    ok(engine.post("/resume"))
    assert running.result(30).status_code == 200


def test_a_pause_clears_the_caches_in_every_mode(engine: LocalEngine) -> None:
    engine.probe(LONG_PROMPT)
    ok(engine.post("/pause?mode=keep"))
    assert engine.state()["prefix_blocks"] == 0
    ok(engine.post("/resume"))


def test_sleep_pauses_until_every_tag_is_awake(engine: LocalEngine) -> None:
    assert ok(engine.post("/sleep?level=2")).json() == {"status": "sleeping", "level": 2}
    assert engine.get("/is_sleeping").json() == {"is_sleeping": True}
    assert ok(engine.post("/wake_up?tags=weights")).json()["status"] == "sleeping"
    assert ok(engine.post("/wake_up?tags=kv_cache")).json() == {"status": "awake", "tags": ["kv_cache"]}
    assert engine.get("/is_paused").json() == {"is_paused": False}
    assert engine.post("/sleep?level=3").status_code == 400


def test_the_weight_checker_compares_and_resets(engine: LocalEngine) -> None:
    baseline = ok(engine.post("/weight_checker", {"action": "checksum"})).json()["checksums"]
    assert all(name.startswith("dp0:pp0:pcp0:tp0:") for name in baseline)
    compare = {"action": "compare", "baseline": baseline}
    assert ok(engine.post("/weight_checker", compare)).json() == {"match": True, "mismatches": []}
    assert ok(engine.post("/weight_checker", {"action": "reset"})).json() == {"status": "reset"}
    assert ok(engine.post("/weight_checker", compare)).json()["match"] is False
    assert engine.post("/weight_checker", {"action": "compare"}).status_code == 400
    assert engine.post("/weight_checker", {"action": "guess"}).status_code == 400


def test_completions_take_and_give_token_ids(engine: LocalEngine) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    answer = ok(engine.post("/v1/completions", body | {"return_token_ids": True})).json()
    choice, probe = answer["choices"][0], engine.probe()
    assert choice["token_ids"] == probe["output_ids"]
    torch.testing.assert_close(choice["logprobs"]["token_logprobs"], probe["logprobs"])
    assert answer["usage"]["total_tokens"] == len(PROMPT) + 8
    assert engine.get("/v1/models").json()["data"][0]["root"] == engine.engine.settings.model
    assert engine.post("/v1/completions", {"prompt": "text"}).status_code == 400
    assert engine.post("/v1/completions", {"prompt": [9999]}).status_code == 400


def test_tokens_in_tokens_out_must_be_enabled(engine: LocalEngine) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1}}
    answer = engine.post("/inference/v1/generate", body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "PermissionDeniedError")


def test_requests_can_be_aborted_by_id(start: Start) -> None:
    engine = start("vllm", scale_out=True)
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 900, "ignore_eos": True}, "request_id": "mine"}
    running = engine.later("/inference/v1/generate", body)
    wait_until(lambda: engine.state()["running"] == 1)
    assert ok(engine.post("/abort_requests", {"request_ids": ["mine"]})).json() == {"status": "aborted", "aborted": 1}
    assert running.result(20).json()["choices"][0]["finish_reason"] == "abort"
    assert engine.post("/abort_requests", data=b"{").status_code == 400


def test_the_world_is_the_number_of_ranks(engine: LocalEngine) -> None:
    assert engine.get("/get_world_size?include_dp=true").json() == {"world_size": 1}
