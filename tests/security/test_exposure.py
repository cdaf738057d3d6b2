"""Who gets in: loopback unless told, a key for whoever else comes, and no way around the gate."""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import socket
from typing import Any

import pytest

from pipelines.engine import web
from pipelines.engine.__main__ import parse_arguments, settings_of
from pipelines.engine.app import Gate
from pipelines.engine.settings import Settings, is_loopback
from stages.errors import ConfigError
from stages.transport.group import GroupStore
from tests.engine.checkpoints import Folders
from tests.engine.conftest import Start

BACKENDS = ["lmdeploy", "sglang", "vllm"]
HEALTH = {"/health", "/health_generate", "/ready"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_off_loopback_every_route_but_health_wants_a_key(start: Start, backend: str) -> None:
    """vLLM's own key guards no control route: where others reach the engine, ours guards all."""
    engine = start(backend, api_key="api", admin_key="admin", exposed=True)
    routes = _routes(engine)
    assert len(routes) > 15
    for method, path in routes:
        for key in (None, "wrong", "", "api2"):
            code = _status(engine, method, path, key)
            assert (code == 401) == (path not in HEALTH), (method, path, key, code)
    assert engine.get("/weightstream/state", key="api").json()["updates"] == 0


def _routes(engine: Any) -> list[tuple[str, str]]:
    app = engine._server.config.app
    return [(method, r.path) for r in app.routes for method in sorted(r.methods - {"HEAD"})]


def _status(engine: Any, method: str, path: str, key: str | None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return int(engine._session.request(method, engine.url + path, headers=headers, timeout=10).status_code)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "example.com", "127.0.0.1.nip.io", "::ffff:10.0.0.1"]
)
def test_the_command_line_refuses_to_be_reached_without_a_key(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    arguments = ["--model", str(folders.qwen3_a), "--backend", "vllm", "--host", host]
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match="WEIGHTSTREAM_ENGINE_API_KEY"):
        settings_of(parse_arguments(arguments))
    monkeypatch.setenv("WEIGHTSTREAM_ENGINE_API_KEY", "key")
    assert settings_of(parse_arguments(arguments)).exposed


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_is_the_default_and_needs_none(folders: Folders, host: str) -> None:
    arguments = ["--model", str(folders.qwen3_a), "--backend", "vllm"]
    assert parse_arguments(arguments).host == "127.0.0.1"
    assert not settings_of(parse_arguments([*arguments, "--host", host])).exposed


def test_the_rendezvous_of_groups_listens_on_the_address_it_was_told_only() -> None:
    store = GroupStore("127.0.0.1", 0, 1.0)
    with open("/proc/net/tcp") as table:
        rows = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert [row for row in rows if row.endswith(f":{store.port:04X}")] == [f"0100007F:{store.port:04X}"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("host", ["x/health?", "x/health#", "x/health", "x?/ready", "x/weightstream/state?"])
def test_the_host_header_does_not_open_the_gate(start: Start, backend: str, host: str) -> None:
    """request.url is put together from it in older releases of starlette."""
    engine = start(backend, api_key="key", exposed=True)
    head = f"GET /weightstream/digest HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert _raw(engine.url, head.encode()).split(b" ")[1] in (b"400", b"401")


def test_the_gate_looks_at_the_path_that_is_routed(start: Start) -> None:
    engine = start("lmdeploy", api_key="key")
    gate = Gate(lambda *_: None, _protocol(engine), [])  # type: ignore[arg-type, return-value]
    for host, path in itertools.product([b"x/health?", b"x"], ["/update_weights", "//health", "/health/../sleep"]):
        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"host", host)], "query_string": b""}
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        if path.startswith("/health"):
            continue  # an open prefix of the real engine, which has no route behind it
        asyncio.run(gate(scope, None, send))  # type: ignore[arg-type]
        assert sent[0]["status"] == 401


def _protocol(engine: Any) -> Any:
    app = engine._server.config.app
    return next(m.kwargs["protocol"] for m in app.user_middleware if m.cls is Gate)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "path", ["/health/../weightstream/digest", "/%2e%2e/weightstream/digest", "//weightstream/digest"]
)
def test_no_spelling_of_a_path_gets_past_the_key(start: Start, backend: str, path: str) -> None:
    engine = start(backend, api_key="key", exposed=True)
    answer = _raw(engine.url, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.split(b" ")[1] in (b"401", b"404")
    assert b"tensors" not in answer


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_web_page_is_not_let_in_to_a_keyless_engine(start: Start, backend: str) -> None:
    """A browser on the same machine reaches loopback for any page that it shows."""
    engine = start(backend)
    for origin in ("http://evil.example", "null", "http://127.0.0.1:8000"):
        answer = engine.post("/weightstream/generate", {"input_ids": [1]}, headers={"Origin": origin})
        assert answer.status_code == 403
        assert "web page" in answer.text
    engine = start(backend, api_key="key")
    answer = engine.post("/weightstream/generate", {"input_ids": [1]}, headers={"Origin": "http://x"}, key="key")
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        *("key", "Bearer", "Bearer ", "Bearer key2", "Bearer ke", "Bearer  key", "Basic key", "Bearer KEY"),
        *("bearer\tkey", "Bearer k\u00e9y"),
    ],
)
def test_only_the_whole_key_counts(start: Start, header: str) -> None:
    engine = start("lmdeploy", api_key="key")
    head = f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: {header}\r\nConnection: close\r\n\r\n"
    assert _raw(engine.url, head.encode("latin1")).split(b" ")[1] in (b"401", b"400")


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As digests of one length, by a function that looks at all of it whatever differs."""
    seen: list[tuple[bytes, bytes]] = []
    real = secrets.compare_digest
    monkeypatch.setattr(web.secrets, "compare_digest", lambda a, b: seen.append((a, b)) or real(a, b))
    for sent in ("", "k", "key", "k" * 10_000, "schl\u00fcssel", "\udcff"):
        assert web.has_key({"authorization": f"Bearer {sent}"}, "key") == (sent == "key")  # type: ignore[arg-type]
    assert web.has_key({}, "key") is False  # type: ignore[arg-type]
    assert len(seen) == 7
    assert {len(side) for pair in seen for side in pair} == {32}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_key_is_asked_for_before_the_body_is_read(start: Start, backend: str) -> None:
    engine = start(backend, api_key="key", exposed=True, max_body_bytes=1000)
    head = "POST /weightstream/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n"
    assert _raw(engine.url, head.encode()).split(b" ")[1] == b"401"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", ["1001", "999999999999", "1" * 19])
def test_an_announced_length_over_the_limit_is_a_413_at_once(start: Start, backend: str, length: str) -> None:
    engine = start(backend, max_body_bytes=1000)
    head = f"POST /weightstream/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    answer = _raw(engine.url, head.encode())
    assert answer.split(b" ")[1] == b"413"
    assert b"exceeds 1000 bytes" in answer


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "\u00b2", "1" * 5000, "0x10"])
def test_a_length_that_is_none_is_a_400(start: Start, length: str) -> None:
    engine = start("sglang")
    head = f"POST /weightstream/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n"
    assert _raw(engine.url, head.encode("latin1")).split(b" ")[1] in (b"400", b"413")


def _raw(url: str, request: bytes) -> bytes:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(request)
        connection.settimeout(10)
        answer = b""
        while b"\r\n\r\n" not in answer or b"Connection: close" in request:
            part = connection.recv(65536)
            if not part:
                break
            answer += part
    return answer


def test_settings_do_not_show_their_keys(folders: Folders) -> None:
    settings = Settings(str(folders.qwen3_a), "vllm", api_key="hunter2", admin_key="hunter3")
    assert "hunter" not in repr(settings)
    assert "hunter" not in str(json.dumps(str(settings)))
