"""The embedded engine as LMDeploy 0.18.0."""

from __future__ import annotations

from typing import Any

import pytest
import requests
import torch

from stages.digest import tensor_digest
from tests.engine.checkpoints import Folders, tensors_of
from tests.engine.client import LONG_PROMPT, PROMPT, LocalEngine, wait_until
from tests.engine.conftest import Start
from tests.engine.sending import by_handle, by_value, flat_elements, reduced
from tests.engine.test_unpickle import Reduces

NOTE = "x-weightstream-real-engine"
NORM = {"model.norm.weight": torch.full((64,), 2.0)}
NOTHING = by_value({"metadata": []})


@pytest.fixture
def engine(start: Start) -> LocalEngine:
    return start("lmdeploy")


class Bucket:
    """A flattened bucket whose memory lives as long as this object."""

    def __init__(self, tensors: dict[str, torch.Tensor], **more: Any) -> None:
        self.flat, self.metadata = flat_elements(tensors)
        self._more = more

    def payload(self, *, handle: bool = True) -> str:
        content: dict[str, Any] = {"metadata": self.metadata, **self._more}
        if handle:
            content["flattened_tensor"] = reduced(self.flat)
        return by_handle(content)


def send(
    engine: LocalEngine, payload: Any, load_format: str | None = "flattened_bucket", *, finished: bool = False
) -> requests.Response:
    body = {"serialized_named_tensors": payload, "load_format": load_format, "finished": finished}
    return engine.post("/update_weights", body)


def taken(response: requests.Response) -> bool:
    return response.status_code == 200 and response.text == "null"


def asleep(engine: LocalEngine) -> bool:
    return engine.get("/is_sleeping").json()["is_sleeping"]


# --- the right sequence


def test_the_documented_sequence_makes_the_engine_the_new_model(
    engine: LocalEngine, folders: Folders, start: Start
) -> None:
    new = list(tensors_of(folders.qwen3_b).items())
    engine.post("/sleep?level=2")
    assert asleep(engine)
    engine.post("/wakeup?tags=weights")
    assert asleep(engine)
    first, second = Bucket(dict(new[:9])), Bucket(dict(new[9:]))
    assert taken(send(engine, first.payload()))
    assert engine.state()["half_loaded"] is not None
    assert taken(send(engine, second.payload()))
    finished = send(engine, NOTHING, finished=True)
    assert taken(finished)
    assert NOTE not in finished.headers
    engine.post("/wakeup?tags=kv_cache")
    assert not asleep(engine)
    other = start("lmdeploy", folders.qwen3_b)
    assert engine.digest()["digest"] == other.digest()["digest"]
    assert engine.probe() == other.probe()
    assert engine.state()["half_loaded"] is None


def test_tensors_come_one_by_one_too(engine: LocalEngine, folders: Folders) -> None:
    new = tensors_of(folders.qwen3_b)
    items = [(name, reduced(tensor)) for name, tensor in new.items()]
    answer = send(engine, by_handle(items), None, finished=True)
    assert taken(answer)
    assert NOTE not in answer.headers
    assert engine.digest()["tensors"] == {name: tensor_digest(tensor) for name, tensor in new.items()}


def test_every_expert_is_addressed_by_its_own_name(start: Start, folders: Folders) -> None:
    engine = start("lmdeploy", folders.moe_a)
    assert taken(send(engine, Bucket(tensors_of(folders.moe_b)).payload(), finished=True))
    assert engine.digest()["digest"] == start("lmdeploy", folders.moe_b).digest()["digest"]


def test_plain_floats_for_fp8_layers_are_quantized_on_load(start: Start, folders: Folders) -> None:
    engine = start("lmdeploy", folders.fp8_a)
    answer = send(engine, Bucket(tensors_of(folders.qwen3_b)).payload(), finished=True)
    assert taken(answer)
    assert NOTE not in answer.headers
    assert engine.digest()["digest"] == start("lmdeploy", folders.fp8_b).digest()["digest"]


# --- the cached bucket


def test_a_bucket_without_a_handle_reads_the_last_one_again(engine: LocalEngine) -> None:
    bucket = Bucket(NORM, require_clone=False)
    assert taken(send(engine, bucket.payload()))
    bucket.flat.fill_(5.0)
    answer = send(engine, bucket.payload(handle=False))
    assert taken(answer)
    assert "read the cached tensor of an earlier one" in answer.headers[NOTE]
    assert bool((engine.engine.model.weights.tensors["model.norm.weight"] == 5).all())


def test_a_clone_does_not_see_what_the_sender_writes_later(engine: LocalEngine) -> None:
    bucket = Bucket(NORM)
    send(engine, bucket.payload())
    bucket.flat.fill_(5.0)
    send(engine, bucket.payload(handle=False))
    assert bool((engine.engine.model.weights.tensors["model.norm.weight"] == 2).all())


@pytest.mark.parametrize("drops", ["finished", "sleep"])
def test_the_cached_bucket_is_dropped(engine: LocalEngine, drops: str) -> None:
    bucket = Bucket(NORM)
    send(engine, bucket.payload(), finished=drops == "finished")
    if drops == "sleep":
        engine.post("/sleep")
    answer = send(engine, bucket.payload(handle=False))
    assert answer.status_code == 500
    assert "no cached ipc tensor is available" in answer.headers[NOTE]


def test_after_an_aborted_update_a_stale_bucket_is_read_even_in_another_dtype(engine: LocalEngine) -> None:
    bucket = Bucket(NORM)
    send(engine, bucket.payload())
    _, bucket.metadata = flat_elements({"model.norm.weight": torch.zeros(64, dtype=torch.bfloat16)})
    answer = send(engine, bucket.payload(handle=False))
    assert taken(answer)
    assert "cached tensor of another dtype" in answer.headers[NOTE]


# --- what fails, and what it leaves behind


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [({"model.nothing": torch.zeros(4)}, "model.nothing"), ({"model.norm.weight": torch.zeros(63)}, "shape")],
)
def test_a_bad_tensor_fails_without_words_and_leaves_the_earlier_ones_loaded(
    engine: LocalEngine, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    bias = "model.layers.0.input_layernorm.weight"
    bucket = Bucket({bias: torch.full((64,), 9.0)} | tensors)
    answer = send(engine, bucket.payload())
    assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    assert reason in answer.headers[NOTE]
    assert bool((engine.engine.model.weights.tensors[bias] == 9).all())
    assert "an update failed" in engine.state()["half_loaded"]
    assert engine.get("/health").status_code == 200
    finished = send(engine, NOTHING, finished=True)
    assert taken(finished)
    assert engine.state()["half_loaded"] is not None


def test_a_short_payload_list_fails_and_a_long_one_goes_unnoticed(engine: LocalEngine) -> None:
    payload = Bucket(NORM)
    assert send(engine, []).status_code == 500
    answer = send(engine, [payload.payload(), "never read"])
    assert taken(answer)
    assert "2 payloads for 1 ranks" in answer.headers[NOTE]


def test_a_dict_passes_the_schema_and_fails(engine: LocalEngine) -> None:
    assert send(engine, {"a": "b"}).status_code == 500


def test_a_flat_payload_without_its_format_fails(engine: LocalEngine) -> None:
    assert send(engine, Bucket(NORM).payload(), None).status_code == 500


def test_what_lmdeploy_would_execute_is_refused(engine: LocalEngine) -> None:
    answer = send(engine, by_value([("x", Reduces(print, "x"))]), None)
    assert answer.status_code == 500
    assert "executes the payload" in answer.headers[NOTE]


# --- what succeeds silently


def test_an_unknown_format_counts_as_none(engine: LocalEngine) -> None:
    answer = send(engine, by_handle([("model.norm.weight", reduced(torch.ones(64)))]), "flatened_bucket")
    assert taken(answer)
    assert "counts as null" in answer.headers[NOTE]


def test_missing_tensors_are_never_noticed(engine: LocalEngine) -> None:
    answer = send(engine, Bucket(NORM).payload(), finished=True)
    assert taken(answer)
    assert "24 of 25 tensors were not sent" in answer.headers[NOTE]


def test_another_float_dtype_is_cast(engine: LocalEngine) -> None:
    answer = send(engine, Bucket({"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}).payload())
    assert taken(answer)
    assert "cast from bfloat16" in answer.headers[NOTE]


def test_a_tied_head_is_skipped(start: Start, folders: Folders) -> None:
    engine = start("lmdeploy", folders.tied)
    before = engine.digest()["digest"]
    assert taken(send(engine, Bucket({"lm_head.weight": torch.zeros(512, 64)}).payload()))
    assert engine.digest()["digest"] == before


# --- sleep


def test_sleeping_closes_generation_and_aborts_what_runs(engine: LocalEngine) -> None:
    running = engine.later("/v1/completions", _completion(engine, 900))
    wait_until(lambda: engine.state()["running"] == 1)
    engine.post("/sleep")
    assert running.result(20).json()["choices"][0]["finish_reason"] == "abort"
    probe = engine.post("/weightstream/generate", {"input_ids": PROMPT})
    for answer in (probe, engine.post("/v1/completions", _completion(engine, 1))):
        assert answer.status_code == 503
        assert answer.json()["message"].startswith("Engine is sleeping; call POST /wakeup before inference")
    engine.post("/wakeup")
    assert engine.post("/v1/completions", _completion(engine, 1)).status_code == 200


def test_level_1_keeps_the_weights_and_level_2_does_not(engine: LocalEngine) -> None:
    before = engine.probe()
    engine.post("/sleep?level=1")
    engine.post("/wakeup")
    assert engine.probe() == before
    engine.post("/sleep?level=2")
    answer = engine.post("/wakeup")
    assert "it serves although a level-2 sleep dropped the weights" in answer.headers[NOTE]
    assert engine.probe()["logprobs"] == [None] * 8


def test_what_is_sent_before_the_weights_are_awake_is_lost(engine: LocalEngine) -> None:
    engine.post("/sleep?level=2")
    answer = send(engine, Bucket(NORM).payload())
    assert taken(answer)
    assert "what was sent is lost" in answer.headers[NOTE]


def test_waking_a_tag_that_is_not_asleep_does_nothing(engine: LocalEngine) -> None:
    engine.post("/sleep")
    answer = engine.post("/wakeup?tags=weigths")
    assert answer.status_code == 200
    assert "nothing was done" in answer.headers[NOTE]
    assert engine.state()["sleeping"] == ["kv_cache", "weights"]


@pytest.mark.parametrize("level", ["0", "3", "deep"])
def test_other_levels_are_refused(engine: LocalEngine, level: str) -> None:
    assert engine.post(f"/sleep?level={level}").status_code == 400


def test_cached_prefixes_survive_sleep_and_update(start: Start, folders: Folders) -> None:
    engine = start("lmdeploy", prefix_cache="on")
    engine.probe(LONG_PROMPT)
    engine.post("/sleep")
    engine.post("/wakeup?tags=weights")
    send(engine, Bucket(tensors_of(folders.qwen3_b)).payload(), finished=True)
    engine.post("/wakeup?tags=kv_cache")
    assert engine.probe(LONG_PROMPT)["cached_tokens"] == 32
    assert start("lmdeploy").state()["prefix_blocks"] is None


# --- requests


def test_post_routes_want_json_even_without_a_body(engine: LocalEngine) -> None:
    answer = engine.post("/sleep", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400
    assert answer.json()["message"] == "Unsupported Media Type: Only 'application/json' is allowed"


def test_a_missing_field_is_named(engine: LocalEngine) -> None:
    answer = engine.post("/update_weights", {"finished": True})
    assert answer.status_code == 400
    assert answer.json() == {
        "message": "serialized_named_tensors: Field required",
        "type": "invalid_request_error",
        "code": 400,
        "param": None,
        "object": "error",
    }


@pytest.mark.parametrize("path", ["/pause", "/flush_cache", "/reset_prefix_cache", "/update_weights_from_disk"])
def test_routes_of_other_engines_do_not_exist(engine: LocalEngine, path: str) -> None:
    assert engine.post(path).status_code == 404


def test_generate_takes_and_gives_token_ids(engine: LocalEngine) -> None:
    body = {"input_ids": PROMPT, "max_tokens": 8, "temperature": 0, "return_logprob": True, "ignore_eos": True}
    answer = engine.post("/generate", body).json()
    probe = engine.probe()
    assert answer["output_ids"] == probe["output_ids"]
    torch.testing.assert_close([pair[0] for pair in answer["meta_info"]["output_token_logprobs"]], probe["logprobs"])


def test_the_checkpoint_engine_plane_says_that_it_is_not_ready(engine: LocalEngine) -> None:
    assert engine.get("/update_weights_from_ipc").json()["ready"] is False
    assert engine.post("/update_weights_from_ipc", {"zmq_handles": {}}).status_code == 501


def test_the_model_must_be_named_right(engine: LocalEngine) -> None:
    assert engine.post("/v1/completions", {"prompt": PROMPT}).status_code == 400
    assert engine.post("/v1/completions", {"prompt": PROMPT, "model": "other"}).status_code == 404


def _completion(engine: LocalEngine, tokens: int) -> dict[str, Any]:
    model = engine.get("/v1/models").json()["data"][0]["id"]
    return {"model": model, "prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
