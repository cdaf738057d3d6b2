"""One corpus of good and bad requests: our embedded engine answers it as the real one does, and lives or dies with
it."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import requests

from pipelines import WeightUpdater

from .corpus import CORPORA, Case, Request
from .provision import PROJECT
from .served import PLUGIN, Served, serve
from .servers import MODEL, EngineServer, direct_session
from .updates import overrides

OURS = "real_engine"  # the key by which the embedded engine says what the real one would have done
DEATH_TAKES = 60.0


class Target(Protocol):
    url: str

    def alive(self) -> bool: ...
    def restart(self) -> None: ...


@dataclass(frozen=True)
class Answer:
    """Status and the keys of the body; without a status the connection was dropped."""

    status: int | None
    keys: frozenset[str]

    def matches(self, ours: Answer, loose: bool) -> bool:
        return self.status == ours.status and (self.keys >= ours.keys if loose else self.keys == ours.keys)

    @property
    def failed(self) -> bool:
        """Whether it is of an engine that ends: a real one may come to say 500 before it goes, or not."""
        return self.status is None or self.status >= 500

    def __str__(self) -> str:
        return f"{self.status or 'dropped'} {{{', '.join(sorted(self.keys))}}}"


@serve(Served("sglang"), Served("vllm", extra=PLUGIN), Served("lmdeploy"))
def test_embedded_engine_answers_like_the_real_one(server: EngineServer, tmp_path: Path) -> None:
    server.restart()  # as it was started: other tests have changed versions and weights
    real = replay(server, CORPORA[server.name](server.model_dir, MODEL), server)
    with EmbeddedEngine(server.name, server.model_dir, tmp_path / "embedded.log") as embedded:
        ours = replay(embedded, CORPORA[server.name](server.model_dir, str(server.model_dir)), server)
    assert not list(differences(CORPORA[server.name](server.model_dir, MODEL), real, ours))


Replayed = dict[str, tuple[list[Answer], bool]]  # case -> what it answered, whether it lives


def replay(target: Target, cases: list[Case], server: EngineServer) -> Replayed:
    seen = {}
    for case in cases:
        answers = [send(target.url, request) for request in case.requests]
        seen[case.name] = answers, survives(target, case)
        if not target.alive():
            target.restart()
        elif not case.clean:
            heal(target, server)
    return seen


def send(url: str, request: Request) -> Answer:
    raw = isinstance(request.body, bytes)
    body = request.body if raw or request.body is None else json.dumps(request.body)
    headers = {"Content-Type": request.content_type} if request.content_type else {}
    with direct_session() as session:
        try:
            response = session.request(
                request.method, url + request.path, data=body, params=request.query, headers=headers, timeout=90
            )
        except requests.ConnectionError:
            return Answer(None, frozenset())
    return Answer(response.status_code, keys_of(response))


def keys_of(response: requests.Response) -> frozenset[str]:
    """Of a JSON object, and of what it calls `error`; else what kind of body it is."""
    if not response.content:
        return frozenset({"(empty)"})
    try:
        content = response.json()
    except ValueError:
        return frozenset({"(text)"})
    if not isinstance(content, dict):
        return frozenset({f"({type(content).__name__})"})
    keys = set(content) - {OURS}
    if isinstance(content.get("error"), dict):
        keys |= {f"error.{key}" for key in content["error"]} - {f"error.{OURS}"}
    return frozenset(keys)


def survives(target: Target, case: Case) -> bool:
    """Documented deaths are waited for; others show within a moment."""
    deadline = time.monotonic() + (DEATH_TAKES if case.dies else 0.2)
    while target.alive() and time.monotonic() < deadline:
        time.sleep(0.1)
    return target.alive()


def heal(target: Target, server: EngineServer) -> None:
    """By a complete update of weightstream's."""
    chosen = [f"engines.urls=[{target.url}]" if "engines.urls" in o else o for o in overrides(server, "ipc", Path())]
    with WeightUpdater.from_config(chosen) as weights:
        assert weights.update(server.model_dir)


def differences(cases: list[Case], real: Replayed, ours: Replayed) -> Iterator[str]:
    for case in cases:
        (theirs, they_live), (answers, we_live) = real[case.name], ours[case.name]
        for request, expected, found in zip(case.requests, theirs, answers, strict=True):
            ends = case.dies and request is case.requests[-1]
            if not (expected.matches(found, request.loose) or (ends and expected.failed and found.failed)):
                yield f"{case.name}: {request}: the real engine answers {expected}, ours {found}"
        if they_live != we_live:
            yield f"{case.name}: the real engine {'lives' if they_live else 'dies'}, ours {'lives' if we_live else 'dies'}"
        if they_live == case.dies:
            yield f"{case.name}: the corpus says that the real engine {'dies' if case.dies else 'lives'}"


class EmbeddedEngine:
    """`python -m pipelines.engine` as a target of the corpus."""

    def __init__(self, backend: str, model: Path, log: Path) -> None:
        self._command = [sys.executable, "-m", "pipelines.engine", "--model", str(model), "--backend", backend]
        self._command += ["--port", "0", "--on-fatal", "exit", "--exit-with-parent"]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> EmbeddedEngine:
        self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def restart(self) -> None:
        self._end()
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=PROJECT
            )
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], 120)[0], self._log.read_text()
        self.url = json.loads(self._process.stdout.readline())["url"]

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
