"""The HTTP client against a real server: what is an answer, what is an error, and what never leaves this host."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from support.httpd import Answer, Server
from support.httpd import server as server

from stages.backends.base import Keys
from stages.backends.http import Http, expect_dict
from stages.errors import ConfigError, EngineError, EngineUnreachable

SECRET = "sk-very-secret-0123456789"


@pytest.fixture
def http(server: Server) -> Iterator[Http]:
    made = Http(server.url, SECRET, 2.0)
    yield made
    made.close()


def post(http: Http, path: str = "/x", **kwargs: Any) -> Any:
    return http.post(path, "put", kwargs.pop("timeout", 10.0), **kwargs)


# -- time and size ------------------------------------------------------------------------------------------------


@pytest.fixture
def dripping() -> Iterator[Callable[[bytes, bytes], Http]]:
    """`dripping(first, then)`: a server that answers `first` at once, then `then`, again and again, every 50 ms."""
    listener = socket.create_server(("127.0.0.1", 0))
    clients: list[Http] = []
    script: list[bytes] = []
    ended = threading.Event()

    def serve() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(script[0])
                while not ended.wait(0.05):
                    connection.sendall(script[1])

    thread = threading.Thread(target=serve, daemon=True)

    def start(first: bytes, then: bytes) -> Http:
        script[:] = [first, then]
        thread.start()
        clients.append(Http(f"http://127.0.0.1:{listener.getsockname()[1]}", None, 2.0))
        return clients[0]

    yield start
    ended.set()
    listener.close()
    for client in clients:
        client.close()
    thread.join()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (HEAD + b"content-length: 1000\r\n\r\n", b"1"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n1\r\n"),
        (HEAD + b"\r\n", b"1"),
        (HEAD, b"x: y\r\n"),
        (b"HTTP/1.1 200 ", b"O"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["body", "chunks", "no length", "headers", "status line", "continue"],
)
def test_an_answer_that_comes_byte_by_byte_has_no_more_time_than_another(
    dripping: Callable[[bytes, bytes], Http], first: bytes, then: bytes
) -> None:
    http = dripping(first, then)
    started = time.monotonic()
    with pytest.raises(EngineUnreachable, match=r"POST /x: no answer within 0\.3 s"):
        post(http, timeout=0.3)
    assert time.monotonic() - started < 3.0  # forty and more drops would each be in time


def test_an_endless_answer_is_not_read_to_its_end(http: Http, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stages.backends.http._LARGEST_ANSWER", 1 << 20)
    server.answers["/x"] = Answer(200, b"x" * (1 << 20))
    assert len(post(http)) == 1 << 20
    server.answers["/x"] = Answer(200, b"x" * ((1 << 20) + 1))
    with pytest.raises(EngineUnreachable, match="larger than 1 MiB"):
        post(http)
    server.answers["/x"] = Answer(200, {"fine": True})
    assert post(http) == {"fine": True}


# -- answers ------------------------------------------------------------------------------------------------------


def test_json_text_and_nothing(http: Http, server: Server) -> None:
    server.answers = {
        "/json": Answer(200, {"a": [1, None]}),
        "/text": Answer(200, "Cache flushed."),
        "/empty": Answer(200),
        "/null": Answer(200, b"null", kind="application/json"),
        "/created": Answer(201, {"ok": True}),
        "/none": Answer(204),
    }
    assert post(http, "/json") == {"a": [1, None]}
    assert post(http, "/text") == "Cache flushed."
    assert post(http, "/empty") is None
    assert post(http, "/null") is None
    assert post(http, "/created") == {"ok": True}
    assert post(http, "/none") is None


@pytest.mark.parametrize("body", [None, "<html>Welcome</html>", [False, "x"], "null", 3, "text"], ids=repr)
def test_what_is_no_object_where_one_is_due_is_an_error(http: Http, server: Server, body: Any) -> None:
    """An HTML page, an empty body or a list with status 200 is no success."""
    server.answers["/x"] = Answer(200, body)
    with pytest.raises(EngineError, match="/x answered no JSON object"):
        expect_dict(http, post(http), "put", "/x")


def test_broken_json_is_an_error_with_its_words(http: Http, server: Server) -> None:
    server.answers["/x"] = Answer(200, b'{"success": tru', kind="application/json")
    with pytest.raises(EngineError, match=r"broken JSON.*success") as caught:
        post(http)
    assert caught.value.status == 200
    server.answers["/x"] = Answer(200, b"\xff\xfe", kind="application/json; charset=utf-8")
    with pytest.raises(EngineError, match="broken JSON"):
        post(http)


ERRORS = {
    "json message": (500, {"error": {"message": "worker died", "code": 500}}, "worker died"),
    "flat message": (400, {"success": False, "message": "unknown name"}, "unknown name"),
    "detail": (404, {"detail": "Not Found"}, "Not Found"),
    "error text": (401, {"error": "Unauthorized"}, "Unauthorized"),
    "text": (500, "Internal Server Error", "Internal Server Error"),
    "html": (503, "<html>proxy</html>", "proxy"),
    "nothing": (500, None, "empty body"),
    "list": (400, ["a", "b"], "'a', 'b'"),
}


@pytest.mark.parametrize("status, body, words", ERRORS.values(), ids=list(ERRORS))
def test_an_error_carries_status_endpoint_and_the_engines_words(
    http: Http, server: Server, status: int, body: Any, words: str
) -> None:
    server.answers["/x"] = Answer(status, body)
    with pytest.raises(EngineError) as caught:
        post(http)
    error = caught.value
    assert not isinstance(error, EngineUnreachable)
    assert (error.engine, error.phase, error.status) == (server.url, "put", status)
    assert words in str(error)
    assert f"POST /x answered {status}" in str(error)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
@pytest.mark.parametrize("location", [None, "/elsewhere"])
def test_redirects_are_errors_and_are_not_followed(
    http: Http, server: Server, status: int, location: str | None
) -> None:
    """A 302 turns a POST into a GET, a 307 sends the body elsewhere."""
    server.answers["/x"] = Answer(status, headers={"location": location} if location else {})
    server.answers["/elsewhere"] = Answer(200, {"success": True})
    for call in (http.post, http.get):
        with pytest.raises(EngineError, match=f"answered {status}"):
            call("/x", "put", 10.0)
    assert server.paths() == ["POST /x", "GET /x"]


def test_a_long_answer_is_cut(http: Http, server: Server) -> None:
    server.answers["/x"] = Answer(500, "x" * 100_000)
    with pytest.raises(EngineError) as caught:
        post(http)
    assert len(caught.value.body) == 2000
    assert len(str(caught.value)) < 1000


# -- no answer ------------------------------------------------------------------------------------------------------


def test_no_answer_in_time_is_unreachable(http: Http, server: Server) -> None:
    done = threading.Event()
    server.answers["/x"] = lambda asked: Answer(200) if done.wait(10.0) else Answer(500)
    with pytest.raises(EngineUnreachable, match=r"POST /x: no answer within 0\.2 s"):
        post(http, timeout=0.2)
    done.set()


def test_nobody_listening_is_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(
        EngineUnreachable, match=f"{url}: put: POST /x: connection failed or dropped: ConnectionRefused"
    ):
        post(Http(url, None, 2.0))


def test_a_connection_that_is_dropped_is_unreachable_and_a_post_is_not_repeated(http: Http, server: Server) -> None:
    server.answers["/x"] = [Answer(drop=True), Answer(200, {})]
    with pytest.raises(EngineUnreachable, match="dropped"):
        post(http)
    assert server.paths() == ["POST /x"]


def test_a_get_over_a_stale_connection_is_tried_once_more(http: Http, server: Server) -> None:
    """Keep-alive connections of some engines live 5 s only."""
    server.answers["/x"] = [Answer(drop=True), Answer(200, {"a": 1})]
    assert http.get("/x", "probe", 10.0) == {"a": 1}
    server.answers["/x"] = Answer(drop=True)
    with pytest.raises(EngineUnreachable):
        http.get("/x", "probe", 10.0)
    assert server.paths() == ["GET /x"] * 4


def test_half_an_answer_is_unreachable(http: Http, server: Server) -> None:
    server.answers["/x"] = Answer(200, b"abc", headers={"content-length": "100"})
    with pytest.raises(EngineUnreachable):
        post(http, timeout=1.0)


def test_an_answer_that_ends_early_is_unreachable(http: Http, server: Server) -> None:
    server.answers["/x"] = Answer(200, headers={"transfer-encoding": "chunked"}, closes=True)
    with pytest.raises(EngineUnreachable):
        post(http, timeout=1.0)


def test_a_server_that_speaks_something_else_is_unreachable() -> None:
    with socket.socket() as raw:
        raw.bind(("127.0.0.1", 0))
        raw.listen()

        def speak() -> None:
            for _ in range(2):
                connection, _ = raw.accept()
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
                connection.close()

        threading.Thread(target=speak, daemon=True).start()
        with pytest.raises(EngineUnreachable):
            Http(f"http://127.0.0.1:{raw.getsockname()[1]}", None, 2.0).get("/x", "probe", 2.0)


# -- proxies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environment",
    [
        {"http_proxy": "http://127.0.0.1:9"},
        {"HTTP_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "socks5://127.0.0.1:9"},
        {"http_proxy": "http://127.0.0.1:9", "no_proxy": "10.0.0.0/8"},
        {"http_proxy": "http://127.0.0.1:9", "no_proxy": "localhost,127.0.0.0/8"},
        {"all_proxy": "http://127.0.0.1:9", "NO_PROXY": ""},
    ],
    ids=str,
)
def test_engine_calls_never_use_a_proxy(
    server: Server, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that trust http_proxy get 503 from it for local engines; CIDR in no_proxy differs (THUDM/slime#1714)."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    server.answers["/x"] = Answer(200, {"ok": 1})
    for host in ("127.0.0.1", "localhost"):
        assert post(Http(f"http://{host}:{server.port}", None, 2.0)) == {"ok": 1}


def test_a_netrc_adds_no_password(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / ".netrc").write_text("default login me password netrc-password\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    server.answers["/x"] = Answer(200)
    post(Http(server.url, None, 2.0))
    assert "authorization" not in server.asked[0].headers


def test_ipv6_works_and_its_brackets_stay() -> None:
    try:
        six = Server("::1")
    except OSError:
        pytest.skip("no IPv6 loopback")
    six.answers["/x"] = Answer(200, {"ok": 1})
    assert post(Http(six.url, None, 2.0)) == {"ok": 1}
    assert six.asked[0].headers["host"] == f"[::1]:{six.port}"
    six.close()


def test_a_path_in_the_url_is_kept(server: Server) -> None:
    server.answers["/engine/3/x"] = Answer(200, {"ok": 1})
    assert post(Http(f"{server.url}/engine/3/", None, 2.0)) == {"ok": 1}


# -- requests -------------------------------------------------------------------------------------------------------


def test_one_bearer_token_and_a_json_body(http: Http, server: Server) -> None:
    server.answers["/x"] = Answer(200)
    post(http, body={"a": [1, True, None]}, query={"level": 2, "tags": "weights"})
    asked = server.asked[0]
    assert asked.headers["authorization"] == f"Bearer {SECRET}"
    assert asked.headers["content-type"] == "application/json"
    assert asked.body == {"a": [1, True, None]}
    assert asked.query == {"level": ["2"], "tags": ["weights"]}


def test_a_post_without_a_body_still_says_json(http: Http, server: Server) -> None:
    """LMDeploy answers 400 "Unsupported Media Type" otherwise, though there is no body."""
    server.answers["/sleep"] = Answer(200)
    post(http, "/sleep")
    assert server.asked[0].headers["content-type"] == "application/json"
    assert server.asked[0].body is None


def test_without_a_key_no_token_is_sent(server: Server) -> None:
    server.answers["/x"] = Answer(200)
    for key in (None, ""):
        post(Http(server.url, key, 2.0))
    assert all("authorization" not in a.headers for a in server.asked)


def test_calls_at_the_same_time_do_not_wait_for_each_other(http: Http, server: Server) -> None:
    meeting = threading.Barrier(4, timeout=10.0)

    def meet(asked: Any) -> Answer:
        meeting.wait()
        return Answer(200, {"ok": 1})

    server.answers["/x"] = meet
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(post(http))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{"ok": 1}] * 4


def test_connections_are_reused(http: Http, server: Server) -> None:
    server.answers["/x"] = Answer(200)
    for _ in range(20):
        post(http)
    assert len({a.port for a in server.asked}) == 1


def test_a_connection_is_not_used_again_after_an_error(http: Http, server: Server) -> None:
    """uvicorn ends it a moment after an answer of 500: the next POST would be reset."""
    server.answers["/x"] = [Answer(500, "no"), Answer(200, {})]
    with pytest.raises(EngineError, match="answered 500"):
        http.post("/x", "put", 5.0)
    http.post("/x", "put", 5.0)
    http.post("/x", "put", 5.0)
    first, second, third = (asked.port for asked in server.asked)
    assert first != second
    assert second == third


def test_a_post_does_not_go_out_over_a_connection_that_the_engine_has_closed(http: Http, server: Server) -> None:
    """uvicorn closes idle ones after 5 s; a POST cannot be repeated, so it has to be noticed before."""
    server.answers["/x"] = Answer(200, {"ok": 1}, closes=True)
    for _ in range(3):
        assert post(http) == {"ok": 1}
        assert server.closed.acquire(timeout=10.0)
    assert len({a.port for a in server.asked}) == 3


# -- secrets --------------------------------------------------------------------------------------------------------


def test_an_answer_that_repeats_the_key_does_not_put_it_into_the_error(http: Http, server: Server) -> None:
    server.answers["/x"] = lambda asked: Answer(401, {"error": f"bad header {asked.headers['authorization']}"})
    with pytest.raises(EngineError) as caught:
        post(http)
    assert SECRET not in str(caught.value)
    assert SECRET not in caught.value.body
    assert "bad header" in str(caught.value)


@pytest.mark.parametrize(
    "key", ["with\nnewline", "with\r", "tab\there", " leading", "trailing ", "ünï", "\u2026", "\0"]
)
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", "good")
    for name in ("WEIGHTSTREAM_API_KEY", "WEIGHTSTREAM_ADMIN_KEY"):
        if "\0" in key:
            continue  # the environment cannot hold it either
        monkeypatch.setenv(name, key)
        with pytest.raises(ConfigError, match=name) as caught:
            Keys.from_environment()
        assert key not in str(caught.value)
        monkeypatch.setenv(name, "good")


def test_keys_come_from_the_environment_and_do_not_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTSTREAM_ADMIN_KEY", raising=False)
    monkeypatch.delenv("WEIGHTSTREAM_API_KEY", raising=False)
    assert Keys.from_environment() == Keys(None, None)
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", SECRET)
    assert Keys.from_environment() == Keys(SECRET, SECRET)
    monkeypatch.setenv("WEIGHTSTREAM_ADMIN_KEY", "admin-secret")
    keys = Keys.from_environment()
    assert keys == Keys(SECRET, "admin-secret")
    assert SECRET not in repr(keys)
    assert "admin-secret" not in f"{keys}"
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", "")
    assert Keys.from_environment() == Keys(None, "admin-secret")
