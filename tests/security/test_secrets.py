"""Keys of engines reach no log, saved config, report, command line, traceback or repr."""

from __future__ import annotations

import json
import logging
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from support.adapters import updater_over
from support.fakes import Toy
from support.httpd import Answer, Asked, Server
from support.vllm_like import VllmLike

from pipelines import config, redact
from pipelines.updater import WeightUpdater
from pipelines.urls import normalize
from stages.backends.base import Keys
from stages.backends.http import Http
from stages.errors import ConfigError, EngineError, WeightstreamError
from tests.config.command import Command

API, ADMIN = 'api-"k\\ey-4711', "admin-key-0815"  # with what JSON escapes
FORMS = [API, json.dumps(API)[1:-1], ADMIN]
VLLM = {"_target_": "stages.backends.vllm.Vllm"}
SGLANG = {"_target_": "stages.backends.sglang.Sglang"}
LMDEPLOY = {"_target_": "stages.backends.lmdeploy.Lmdeploy"}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", API)
    monkeypatch.setenv("WEIGHTSTREAM_ADMIN_KEY", ADMIN)


def clean(text: str) -> bool:
    return not any(form in text for form in FORMS)


def echo(asked: Asked) -> Answer:
    """An engine that repeats every header in its refusal, as debug pages of web frameworks do."""
    return Answer(500, {"message": f"no: {asked.headers} {API} {ADMIN}", "headers": asked.headers})


def test_neither_keys_nor_clients_show_them() -> None:
    keys = Keys.from_environment()
    assert (keys.api, keys.admin) == (API, ADMIN)
    assert clean(repr(keys) + str(keys) + repr(Http("http://x", API, 1.0)))
    updater = WeightUpdater.from_config(["backend=vllm", "engines=remote", "engines.urls=[http://a:1]"])
    updater.add_engines(["http://a:1"])
    try:
        assert clean(repr(updater) + repr(updater._known) + str(updater.settings) + str(updater.report))
    finally:
        updater.remove_engines(["http://a:1"])


ANSWERS = {
    "an error": echo,
    "an error as text": Answer(500, f"{API} {ADMIN}", kind="text/plain"),
    "an error as HTML": Answer(401, f"<pre>{json.dumps(API)} {ADMIN}</pre>", kind="text/html"),
    "broken JSON": Answer(200, f'{{"x": {json.dumps(API)} {ADMIN}'.encode(), kind="application/json"),
    "no object": Answer(200, [API, ADMIN]),
    "no success": Answer(200, {"success": False, "message": f"{API} {ADMIN}"}),
    "a redirect": Answer(302, None, headers={"Location": f"http://x/{ADMIN}"}),
    "an empty answer": Answer(500),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize(
    "backend, path",
    [(VLLM, "every"), (VLLM, "late"), (SGLANG, "every"), (LMDEPLOY, "every")],
    ids=lambda v: str(v)[-12:],
)
def test_an_engine_that_repeats_them_is_quoted_without(
    backend: dict[str, Any], answer: Any, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors, their causes, their tracebacks, the report and the log at its most talkative."""
    caplog.set_level(logging.DEBUG)
    server = Server()
    try:
        VllmLike(server)
        routes = [
            *server.answers,
            "/model_info",
            "/server_info",
            "/health",
            "/is_sleeping",
            "/sleep",
            "/pause_generation",
        ]
        for route in routes if path == "every" else ["/finish_weight_update", "/weight_info", "/resume", "/ready"]:
            server.answers[route] = answer
        with updater_over(server, backend) as updater, pytest.raises(WeightstreamError) as caught:  # type: ignore[call-overload]
            updater.update(Toy())
        assert any(not clean(str(a.headers).replace("\\\\", "\\")) for a in server.asked)  # they did travel
    finally:
        server.close()
    assert clean("".join(traceback.format_exception(caught.value)))
    assert clean(json.dumps(updater.report.to_json()) + str(updater.report))
    assert clean(caplog.text)
    error: BaseException | None = caught.value
    while error is not None:
        assert clean(repr(error) + (str(vars(error)) if isinstance(error, WeightstreamError) else ""))
        error = error.__cause__ or error.__context__


def test_a_body_that_an_adapter_quotes_is_cleaned_too() -> None:
    engine = updater_over_one().fail("resume", f"/ready said {API}", status=500, body=f"{ADMIN} and {API}")
    assert clean(str(engine) + engine.body)


def updater_over_one() -> Any:
    updater = WeightUpdater.from_config(["backend=sglang", "engines=remote", "engines.urls=[http://a:1]"])
    updater.add_engines(["http://a:1"])
    return updater._known[0]


@pytest.mark.parametrize("key", ["has space", "line\nbreak", "t\u00e4st", "\x7f", "nul\x00"])
def test_a_key_that_no_header_carries_is_refused_without_naming_it(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """requests would put it into its error."""
    if "\0" in key:
        return  # no environment holds one
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", key)
    with pytest.raises(ConfigError) as caught:
        Keys.from_environment()
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        f"trainer.path={ADMIN}",
        f"+api_key={ADMIN}",
        f"engines.urls=[http://a:1/{ADMIN}]",
        "engines.urls=[http://user:hunter22@a:1]",
        "engines.urls=[http://a:1],[https://user:hunter22@b:1]",
        "engines.urls=[user:hunter22@a:1]",
        "engines.urls=[http:/user:hunter22@a:1]",
        "hydra.job.env_set.WEIGHTSTREAM_API_KEY=hunter22",
        "+hydra.job.env_set.WEIGHTSTREAM_ADMIN_KEY=hunter22",
    ],
)
@pytest.mark.parametrize("sweep", [False, True])
def test_an_override_that_holds_one_is_refused_before_anything_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, sweep: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        config.precheck(["engines=remote", "engines.urls=[http://a:1]", override], sweep=sweep or "],[" in override)
    assert ADMIN not in str(caught.value)
    assert "hunter22" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "url", ["http://user:hunter22@h:1", "http:/user:hunter22@h", "x://user:hunter22@h", "u:hunter22@h"]
)
def test_a_password_in_a_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        normalize(url)
    assert "hunter22" not in str(caught.value)


def test_a_short_key_does_not_refuse_every_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", "a")
    redact.refuse_secrets(["trainer.path=a", "backend=vllm"])


def test_a_whole_run_leaves_them_nowhere(tmp_path: Path) -> None:
    """Two real runs, one that works and one that fails, and a look at every file and process of theirs."""
    environment = {"WEIGHTSTREAM_API_KEY": API, "WEIGHTSTREAM_ADMIN_KEY": ADMIN}
    small = ["trainer.hidden_size=64", "trainer.layers=1", "trainer.vocab_size=64", "updates=1"]
    server = Server()
    server.answers["/model_info"] = echo
    try:
        good = Command(tmp_path, "backend=sglang", "transport=ipc", "hydra.verbose=true", *small, **environment)
        arguments: list[str] = []
        while good.process.poll() is None and not any("pipelines.engine" in a for a in arguments):
            time.sleep(0.1)
            arguments = [" ".join(p.cmdline()) for p in good.descendants() if p.is_running()]
        assert good.wait() == 0, good.err
        remote = ["engines=remote", f"engines.urls=[{server.url}]", "hydra.verbose=true", *small]
        bad = Command(tmp_path, "backend=sglang", "transport=ipc", *remote, **environment)
        assert bad.wait() == 1
        assert "answered 500" in bad.err
    finally:
        server.close()
    assert any("pipelines.engine" in a for a in arguments)
    assert clean(" ".join(arguments))
    assert clean(good.out + good.err + bad.out + bad.err)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {"config.yaml", "overrides.yaml", "hydra.yaml", "report.json"} <= {p.name for p in files}
    assert [p for p in files if not clean(p.read_text(errors="replace"))] == []


def test_an_error_of_an_engine_carries_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaning takes nothing else away."""
    server = Server()
    server.answers["/x"] = Answer(500, {"message": f"out of memory {ADMIN} on rank 3"})
    try:
        with pytest.raises(EngineError, match=r"out of memory \*\*\* on rank 3"):
            Http(server.url, API, 5.0, (ADMIN,)).post("/x", "put", 5.0)
    finally:
        server.close()
