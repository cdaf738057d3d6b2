"""Keys, malformed requests and what a dead engine still answers, for every backend."""

from __future__ import annotations

import socket

import pytest
import requests

from pipelines.engine.__main__ import bind
from pipelines.engine.generation import Generation
from pipelines.engine.settings import Settings, check_exposure
from stages.errors import ConfigError
from tests.engine.checkpoints import Folders
from tests.engine.client import PROMPT, LocalEngine
from tests.engine.conftest import Start

BACKENDS = ["lmdeploy", "sglang", "vllm"]
UPDATE = {
    "lmdeploy": "/update_weights",
    "sglang": "/update_weights_from_tensor",
    "vllm": "/init_weight_transfer_engine",
}


def status(engine: LocalEngine, method: str, path: str, key: str | None) -> int:
    call = engine.get if method == "GET" else engine.post
    return call(path, key=key).status_code


# --- keys


@pytest.mark.parametrize(
    ("keys", "path", "accepted"),
    [
        ({}, "/flush_cache", {None, "api", "admin"}),
        ({"api_key": "api"}, "/flush_cache", {"api"}),
        ({"api_key": "api"}, "/model_info", {"api"}),
        ({"admin_key": "admin"}, "/flush_cache", {"admin"}),
        ({"admin_key": "admin"}, "/model_info", {None, "api", "admin"}),
        ({"api_key": "api", "admin_key": "admin"}, "/flush_cache", {"admin"}),
        ({"api_key": "api", "admin_key": "admin"}, "/model_info", {"api"}),
        ({"api_key": "api", "admin_key": "admin"}, "/weightstream/digest", {"api"}),
        ({"api_key": "api", "admin_key": "admin"}, "/ready", {None, "api", "admin"}),
        ({"api_key": "api", "admin_key": "admin"}, "/health", {None, "api", "admin"}),
    ],
)
def test_sglang_guards_control_and_generation_with_different_keys(
    start: Start, keys: dict[str, str], path: str, accepted: set[str | None]
) -> None:
    engine = start("sglang", **keys)
    for key in (None, "api", "admin"):
        assert (status(engine, "GET", path, key) == 200) == (key in accepted), key
    if None not in accepted:
        assert engine.get(path).json().get("error", "Unauthorized") == "Unauthorized"


@pytest.mark.parametrize(
    ("method", "path", "guarded"),
    [
        ("GET", "/is_sleeping", True),
        ("POST", "/sleep", True),
        ("GET", "/nothing", True),
        ("GET", "/v1/models", True),
        ("GET", "/weightstream/state", True),
        ("GET", "/health", False),
    ],
)
def test_lmdeploy_wants_its_key_on_every_path_but_health(start: Start, method: str, path: str, guarded: bool) -> None:
    engine = start("lmdeploy", api_key="secret")
    assert (status(engine, method, path, None) == 401) == guarded
    assert (status(engine, method, path, "['secret']") == 401) == guarded
    assert status(engine, method, path, "secret") != 401


def test_lmdeploy_s_401_has_its_error_shape(start: Start) -> None:
    body = start("lmdeploy", api_key="secret").get("/is_sleeping").json()
    assert (body["message"], body["type"], body["code"]) == ("Unauthorized.", "authentication_error", 401)


@pytest.mark.parametrize(
    ("method", "path", "guarded"),
    [
        ("GET", "/v1/models", True),
        ("POST", "/inference/v1/generate", True),
        ("GET", "/weightstream/digest", True),
        ("POST", "/pause", False),
        ("POST", "/start_weight_update", False),
        ("GET", "/weight_info", False),
    ],
)
def test_vllm_s_key_guards_generation_but_no_control_route(start: Start, method: str, path: str, guarded: bool) -> None:
    engine = start("vllm", api_key="secret")
    assert (status(engine, method, path, None) == 401) == guarded
    assert status(engine, method, path, "secret") != 401


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com"])
def test_a_host_that_others_reach_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="WEIGHTSTREAM_ENGINE_API_KEY"):
        check_exposure(host, None)
    check_exposure(host, "key")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    check_exposure(host, None)


def test_connections_do_not_wait_for_delayed_acknowledgements() -> None:
    """asyncio turns Nagle's algorithm off only for sockets that say they are TCP."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


# --- malformed requests


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_a_400(start: Start, backend: str, data: bytes) -> None:
    answer = start(backend).post(UPDATE[backend], data=data)
    assert answer.status_code == 400
    assert "message" in answer.text


@pytest.mark.parametrize("backend", BACKENDS)
def test_json_under_another_media_type_is_a_400(start: Start, backend: str) -> None:
    answer = start(backend).post(UPDATE[backend], data=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_body_over_the_limit_is_a_413(start: Start, backend: str) -> None:
    engine = start(backend, max_body_bytes=1000)
    assert engine.post(UPDATE[backend], data=b" " * 1001).status_code == 413
    assert engine.post(UPDATE[backend], data=iter([b" " * 600, b" " * 600])).status_code == 413


@pytest.mark.parametrize("backend", BACKENDS)
def test_unknown_routes_and_methods_answer_in_the_framework_s_words(start: Start, backend: str) -> None:
    engine = start(backend)
    assert (engine.get("/nothing").status_code, engine.get("/nothing").json()) == (404, {"detail": "Not Found"})
    assert engine.get(UPDATE[backend]).status_code == 405


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input_ids": []},
        {"input_ids": "text"},
        {"input_ids": [512]},
        {"input_ids": [-1]},
        {"input_ids": [1], "max_new_tokens": 0},
        {"input_ids": [1], "max_new_tokens": 2000},
        {"input_ids": [1], "max_new_tokens": "many"},
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_probes_that_make_no_sense_are_refused(start: Start, backend: str, body: dict[str, object]) -> None:
    assert start(backend).post("/weightstream/generate", body).status_code == 400


# --- the common routes


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_describes_itself(start: Start, backend: str) -> None:
    engine = start(backend)
    state = engine.state()
    assert (state["backend"], state["tp"], state["dead"], state["half_loaded"]) == (backend, 1, None, None)
    params = engine.get("/weightstream/params").json()
    assert params["model.norm.weight"] == ["float32", [64]]
    assert params["tied"] == {}
    digest = engine.digest()
    assert digest["ranks"] == [{"rank": 0, "digest": digest["digest"]}]
    assert digest["incarnation"] == state["incarnation"]
    assert digest["version"] is None
    assert set(digest["tensors"]) == set(params) - {"tied"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_whose_client_is_gone_is_aborted(start: Start, backend: str) -> None:
    engine = start(backend)
    submitted: list[Generation] = []
    submit = engine.engine.scheduler.submit
    engine.engine.scheduler.submit = lambda g: (submitted.append(g), submit(g))  # type: ignore[assignment]
    with pytest.raises(requests.ReadTimeout):
        body = {"input_ids": PROMPT, "max_new_tokens": 900}
        requests.post(f"{engine.url}/weightstream/generate", json=body, timeout=0.1)
    assert submitted[0].done.wait(5)
    assert submitted[0].finish == "abort"


def test_tied_names_are_listed(start: Start, folders: Folders) -> None:
    params = start("sglang", folders.tied).get("/weightstream/params").json()
    assert params["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in params


def test_a_dead_engine_can_still_be_examined(start: Start) -> None:
    engine = start("sglang")
    engine.post("/begin_weight_update", {})
    body = {"serialized_named_tensors": [], "load_format": None}
    assert engine.post("/update_weights_from_tensor", body).status_code == 500
    for path in ("/weightstream/state", "/weightstream/digest", "/weightstream/params"):
        assert engine.get(path).status_code == 200
    for path in ("/weightstream/generate", "/generate", "/continue_generation"):
        answer = engine.post(path, {"input_ids": PROMPT})
        assert answer.status_code == 503
        assert "restart it" in answer.json()["message"]


# --- settings


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"backend": "tgi"}, "tgi"),
        ({"tp": 0}, "tp: 0"),
        ({"model": "/nowhere"}, "no config.json"),
        ({"backend": "vllm", "engine_version": "0.1"}, "0.32.0, 0.33.0"),
    ],
)
def test_settings_that_cannot_work_are_refused(folders: Folders, wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Settings(**({"model": str(folders.qwen3_a), "backend": "sglang"} | wrong))  # type: ignore[arg-type]
