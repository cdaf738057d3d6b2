"""task=doctor and task=matrix: what is wrong here is said with what to do; what goes together says the code itself."""

import os
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines import tasks
from pipelines.cli.advice import advice
from pipelines.config import load
from pipelines.tasks import doctor, matrix, room
from stages.backends.http import Http
from stages.backends.kinds import kind_of
from stages.errors import EngineError
from tests.support.httpd import Answer, Server


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    try:
        yield made
    finally:
        made.close()


def found(*overrides: str) -> dict[str, doctor.Finding]:
    return {f.what: f for f in doctor.examine(load(["task=doctor", *overrides]))}


def test_a_line_for_everything_and_no_key_in_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", "s3cr3t-key")
    monkeypatch.setenv("https_proxy", "http://user:pa55@proxy:1")
    code = tasks.run(load(["task=doctor", "bucket.capacity=1MiB"]))
    text = capsys.readouterr().out
    assert code == 0, text
    for word in ("python", "torch", "/dev/shm", "open files", "GPU", "set", "https_proxy"):
        assert word in text
    assert "s3cr3t" not in text
    assert "pa55" not in text


def test_a_key_that_no_header_can_carry_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", "two words")
    finding = found()["keys"]
    assert finding.state == "fail"
    assert "WEIGHTSTREAM_API_KEY" in finding.found
    assert "two words" not in finding.found


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = ["transport=nccl", f"transport.port={port}"]
        finding = found(*settings)["port"]
        assert (finding.state, finding.mend) == ("fail", "set transport.port to a free one, or 0")
        assert tasks.run(load(["task=doctor", *settings])) == 1
        assert "-> set transport.port" in capsys.readouterr().out
    assert found("transport=nccl", "transport.port=0")["port"].found == "127.0.0.1: the system chooses a port"


def test_an_address_that_engines_elsewhere_cannot_reach() -> None:
    settings = load(["transport=nccl", "transport.port=0", "engines=remote", "engines.urls=[http://192.0.2.1:80]"])
    (finding,) = [f for f in doctor._port(settings) if f.what == "address"]
    assert finding.state == "fail"
    assert "set transport.address" in finding.mend


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(room, "SHARED", str(tmp_path / "none"))
    settings = load([])
    (finding,) = doctor._shared_memory(settings)
    assert finding.state == "fail"
    assert "--ipc=host" in finding.mend
    assert next(doctor._shared_memory(load(["transport=nccl"]))).state == "warn"
    monkeypatch.setattr(room, "SHARED", "/dev/shm")
    assert next(doctor._shared_memory(load(["bucket.capacity=1000000GB"]))).state == "fail"


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (70, 4096))
    finding = found()["open files"]
    assert (finding.state, finding.mend) == ("fail", "ulimit -n 4096")


@pytest.mark.parametrize(("value", "state"), [("nowhere0", "fail"), ("lo", None), ("", None)])
def test_an_interface_that_is_not_there(value: str, state: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", value)
    finding = found().get("GLOO_SOCKET_IFNAME")
    assert (finding and finding.state) == state


def test_a_missing_library_and_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_requirements", lambda: ["torch>=99", "no-such-thing>=2", "unwanted; extra == 'dev'"])
    findings = found()
    assert (findings["torch"].state, findings["torch"].mend) == ("fail", "pip install 'torch>=99'")
    assert findings["no-such-thing"].found == "not installed"
    assert "unwanted" not in findings


SGLANG = {
    "/model_info": Answer(body={"model_path": "/m", "weight_version": "default"}),
    "/server_info": Answer(body={"tp_size": 1, "version": "0.5.23"}),
    "/v1/models": Answer(body={"data": [{"id": "m", "owned_by": "sglang"}]}),
}


def test_an_engine_that_is_ready_one_that_is_old_and_one_that_is_down(server: Server) -> None:
    server.answers |= SGLANG
    remote = ["backend=sglang", "engines=remote", f"engines.urls=[{server.url}]"]
    finding = found(*remote)[server.url]
    assert (finding.state, finding.found) == ("ok", "sglang 0.5.23, tp=1, serves /m")
    server.answers["/server_info"] = Answer(body={"tp_size": 1, "version": "0.5.4.post1"})
    assert found(*remote)[server.url].state == "warn"
    server.answers["/server_info"] = Answer(body={"tp_size": 2})
    assert "engines.tp says 1" in found(*remote)[server.url].found
    server.close()
    finding = found(*remote)[server.url]
    assert finding.state == "fail"
    assert "start the engine" in finding.mend


def test_an_engine_of_another_kind(server: Server) -> None:
    server.answers |= SGLANG | {"/health": Answer()}
    finding = found("backend=vllm", "engines=remote", f"engines.urls=[{server.url}]")[server.url]
    assert (finding.state, finding.mend) == ("fail", "set backend=sglang")
    error = EngineError(server.url, "probe", "GET /get_world_size answered 404", status=404)
    assert advice(error) == "it answers as sglang does: set backend=sglang"


@pytest.mark.parametrize(
    ("answers", "kind"),
    [
        ({"/v1/models": {"data": [{"owned_by": "vllm"}]}}, "vllm"),
        ({"/v1/models": {"data": [{"owned_by": "lmdeploy"}]}, "/model_info": {}}, "lmdeploy"),
        ({"/version": {}, "/is_sleeping": {}}, "vllm"),
        ({"/is_sleeping": {}}, "lmdeploy"),
        ({"/model_info": {}, "/v1/models": {"data": "what"}}, "sglang"),
        ({}, None),
    ],
)
def test_kinds_are_known_by_their_routes(server: Server, answers: dict, kind: str | None) -> None:
    server.answers |= {path: Answer(body=body) for path, body in answers.items()}
    api = Http(server.url, None, 5.0)
    assert kind_of(api) == kind
    api.close()


def test_the_matrix_is_what_runs_would_be_refused_for(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load(["task=matrix"])
    assert tasks.run(settings) == 0
    text = " ".join(re.sub("[│┃]", " ", capsys.readouterr().out).split())
    assert "LMDeploy has no route that loads a checkpoint folder" in text
    assert "gloo cannot broadcast float8_e4m3fn" in text
    assert "lmdeploy ipc all" in text
    per_tensor = dict(matrix.formats(load(["backend=sglang", "backend.load_format=per_tensor"]), "sglang", "nccl"))
    assert per_tensor["none"] is None
    assert "backend.load_format=flattened_bucket" in (per_tensor["fp8_block"] or "")
    assert not os.path.exists("unused")
