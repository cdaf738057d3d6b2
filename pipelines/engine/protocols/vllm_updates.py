"""vLLM's weight routes: init, start, update, finish, version, checksums, and the collective call that loads a folder."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from pipelines.engine.loading.base import Outcome, merge
from pipelines.engine.schema import Field, either, list_of, mapping, one_of, optional, read, text
from pipelines.engine.web import Call, Endpoint, answer

if TYPE_CHECKING:
    from pipelines.engine.protocols.vllm import Vllm


class WorkerError(Exception):
    """What a worker raised inside a collective call."""

    def __init__(self, message: str, call: str = "collective_rpc") -> None:
        super().__init__(
            f"Call to {call} method failed: Worker failed with error '{message}', "
            f"please check the stack trace above for the root cause"
        )


class HttpError(Exception):
    """An error that the handler itself answers with a status."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class VllmUpdates:
    """`open`: between start and finish. `on_meta`: no forward pass may run, also after a failed update."""

    def __init__(self, protocol: Vllm) -> None:
        self._engine = protocol.engine
        self._one_call = threading.Lock()
        self.open = False
        self.on_meta = False

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("/init_weight_transfer_engine", self.init_transfer),
            Endpoint("/shutdown_weight_transfer_engine", self.shutdown_transfer),
            Endpoint("/start_weight_update", self.start),
            Endpoint("/start_draft_weight_update", self.start_draft),
            Endpoint("/update_weights", self.update),
            Endpoint("/finish_weight_update", self.finish),
            Endpoint("/update_weight_version", self.update_version),
            Endpoint("/weight_info", self.weight_info, ("GET",)),
            Endpoint("/weight_checker", self.weight_checker),
            Endpoint("/collective_rpc", self.collective_rpc),
        ]

    def init_transfer(self, call: Call) -> Response:
        info = _embedded(call, Field("init_info", mapping))["init_info"]
        _worker(merge(self._engine.control("init", info)))
        return answer({"message": "Weight transfer initialized"})

    def shutdown_transfer(self, call: Call) -> Response:
        with self._one_call:
            if self.open:
                raise WorkerError("Cannot release a trainer connection during a weight update")
            self._engine.control("shutdown")
        return answer({"message": "Weight transfer shut down"})

    def start(self, call: Call) -> Response:
        with self._one_call:
            if self.open:
                raise WorkerError(
                    "start_weight_update called while a weight update is already active. "
                    "Call finish_weight_update first."
                )
            _worker(merge(self._engine.control("start")))
            self.open = self.on_meta = True
        return answer({"message": "Weight update started"})

    def start_draft(self, call: Call) -> Response:
        raise WorkerError("no speculative draft model is loaded")

    def update(self, call: Call) -> Response:
        info = _embedded(call, Field("update_info", either(mapping, list_of(mapping))))["update_info"]
        with self._one_call:
            if not self.open:
                raise WorkerError("start_weight_update must be called before update_weights.")
            outcome = self._engine.apply("receive", info)
            if outcome.error is not None:
                self.open = False
                self._engine.ledger.spoil(f"an update failed: {outcome.error}")
        _worker(outcome)
        return answer({"message": "Weights updated"}, notes=outcome.notes)

    def finish(self, call: Call) -> Response:
        version = _embedded(call, Field("weight_version", optional(text), None))["weight_version"]
        with self._one_call:
            if not self.open:
                raise WorkerError("finish_weight_update called without a matching start_weight_update.")
            outcome = merge(self._engine.control("finish"))
            _worker(outcome)
            notes = outcome.notes + self._engine.ledger.commit()
            self.open = self.on_meta = False
            if version is not None:
                self._engine.set_version(version)
        return answer({"message": "Weight update finished"}, notes=notes)

    def update_version(self, call: Call) -> Response:
        version = _embedded(call, Field("new_version", text))["new_version"]
        self._engine.set_version(version)
        return answer({"success": True, "new_version": version})

    def weight_info(self, call: Call) -> Response:
        return answer({"weight_version": self._engine.version or "default"})

    def weight_checker(self, call: Call) -> Response:
        action = Field("action", one_of("checksum", "reset", "compare"))
        body = _embedded(call, action, Field("baseline", optional(mapping), None))
        if body["action"] == "reset":
            self._engine.control("fill", 0.0)
            self._engine.ledger.spoil("/weight_checker reset the weights to zero")
            return answer({"status": "reset"})
        if body["action"] == "compare" and body["baseline"] is None:
            raise HttpError(400, "action='compare' requires a 'baseline' object")
        checksums = self._checksums()
        if body["action"] == "checksum":
            return answer({"checksums": checksums})
        baseline = body["baseline"]
        wrong = sorted(k for k in checksums.keys() | baseline.keys() if checksums.get(k) != baseline.get(k))
        return answer({"match": not wrong, "mismatches": wrong})

    def collective_rpc(self, call: Call) -> Response:
        try:
            body = json.loads(call.data)
        except ValueError as error:
            raise HttpError(400, f"JSON decode error: {error}") from error
        if not isinstance(body, dict):
            raise HttpError(400, "Request body must be a JSON object")
        if body.get("method") is None:
            raise HttpError(400, "Missing 'method' in request body")
        if body["method"] != "reload_weights":
            raise WorkerError(f"the embedded engine's workers have no method {body['method']!r}")
        folder = (body.get("kwargs") or {}).get("weights_path") or self._engine.settings.model
        outcome = self._engine.apply("reload", folder)
        _worker(outcome)
        notes = outcome.notes + self._engine.ledger.commit()
        return answer({"results": [None] * self._engine.settings.tp}, notes=notes)

    def _checksums(self) -> dict[str, str]:
        if self.on_meta:
            raise WorkerError("Cannot copy out of meta tensor; no data!", "compute_weight_checksums")
        per_rank: list[dict[str, str]] = self._engine.control("checksums")
        return {
            f"dp0:pp0:pcp0:tp{rank}:{name}": value
            for rank, found in enumerate(per_rank)
            for name, value in found.items()
        }


def _worker(outcome: Outcome) -> None:
    if outcome.error is not None:
        raise WorkerError(outcome.error)


def _embedded(call: Call, *fields: Field) -> dict[str, Any]:
    """Fields that the framework embeds in a body: no body, or one that is not announced as JSON, lacks all of them."""
    announced = "json" in call.headers.get("content-type", "")
    return read(call.json() if call.data and announced else {}, *fields)
