"""SGLang's update routes: the session, the planes that weights come over, version and read-back."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import xxhash
from starlette.responses import JSONResponse, Response

from pipelines.engine.engine import FatalError
from pipelines.engine.loading.base import Outcome
from pipelines.engine.schema import Field, boolean, integer, list_of, one_of, optional, text
from pipelines.engine.web import Call, Endpoint, answer

if TYPE_CHECKING:
    from pipelines.engine.protocols.sglang import Sglang

_PARTIAL = "The full weights of the ModelRunner are partially updated. Please discard the whole weights."
_NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)
_SELECTOR = Field("selector", one_of("target", "draft", "all"), "all")
_UPDATE = (
    Field("load_format", optional(text), None),
    Field("flush_cache", boolean, True),
    Field("abort_all_requests", boolean, False),
    Field("weight_version", optional(text), None),
)


class SglangUpdates:
    """`open`: between begin and end. What raises inside the scheduler ends the whole server."""

    def __init__(self, protocol: Sglang) -> None:
        self._protocol = protocol
        self._engine = protocol.engine
        self._needs_session = protocol.settings.version != "0.5.20"
        self.open = False

    def endpoints(self) -> list[Endpoint]:
        both = ("GET", "POST")
        routes = [
            Endpoint("/update_weights_from_tensor", self.update_tensor, admin=True),
            Endpoint("/update_weights_from_distributed", self.update_distributed, admin=True),
            Endpoint("/update_weights_from_disk", self.update_disk, admin=True),
            Endpoint("/update_weights_from_ipc", self.update_ipc, admin=True),
            Endpoint("/init_weights_update_group", self.init_group, admin=True),
            Endpoint("/destroy_weights_update_group", self.destroy_group, admin=True),
            Endpoint("/update_weight_version", self.update_version, admin=True),
            Endpoint("/weights_checker", self.check_weights, both, admin=True),
            Endpoint("/get_weights_by_name", self.weights_by_name, both, admin=True),
        ]
        if self._needs_session:
            routes.append(Endpoint("/begin_weight_update", self.begin, admin=True))
            routes.append(Endpoint("/end_weight_update", self.end, admin=True))
        else:
            routes.append(Endpoint("/get_weight_version", self.weight_version, ("GET",)))
        return routes

    # the session

    def begin(self, call: Call) -> Response:
        call.read(_SELECTOR)
        with self._protocol.alone():
            if self.open:
                return _result(False, "a weight-update session is already open; call end_weight_update() first")
            self.open = True
            return _result(True, "Success")

    def end(self, call: Call) -> Response:
        call.read()
        with self._protocol.alone():
            if not self.open:
                return _result(False, "no weight-update session is open; call begin_weight_update() first")
            self._engine.control("post_process")
            self.open = False
            return _result(True, "Success", self._engine.ledger.commit())

    # updates

    def update_tensor(self, call: Call) -> Response:
        body = call.read(
            Field("serialized_named_tensors", list_of(_base64)),
            *_UPDATE,
            _SELECTOR,
            Field("torch_empty_cache", boolean, False),
        )
        self._protocol.abort_if(body)
        with self._protocol.alone():
            if refused := self._refuse("update_weights_from_tensor"):
                return refused
            payloads = body["serialized_named_tensors"]
            outcome = self._engine.apply("update_tensor", payloads, body["load_format"])
            if outcome.error is not None:
                raise FatalError(outcome.error, "the scheduler raises, and the server's whole process tree ends")
            return self._updated(outcome, "Success", body)

    def update_distributed(self, call: Call) -> Response:
        body = call.read(
            Field("names", list_of(text)),
            Field("dtypes", list_of(text)),
            Field("shapes", list_of(list_of(integer))),
            Field("group_name", text, "weight_update_group"),
            *_UPDATE,
            _SELECTOR,
            Field("torch_empty_cache", boolean, False),
        )
        self._protocol.abort_if(body)
        with self._protocol.alone():
            if refused := self._refuse("update_weights_from_distributed"):
                return refused
            arguments = [body[k] for k in ("names", "dtypes", "shapes", "group_name", "load_format")]
            outcome = self._engine.apply("update_distributed", *arguments)
            if outcome.error is not None and outcome.stage == "receive":
                return _result(False, f"Failed to receive weights: {outcome.error}")
            if outcome.error is not None:
                return _result(False, f"Failed to update parameter online: {outcome.error}. {_PARTIAL}")
            return self._updated(outcome, "Succeeded to update parameter online.", body)

    def update_disk(self, call: Call) -> Response:
        body = call.read(
            Field("model_path", text),
            *_UPDATE,
            Field("is_async", boolean, False),
            Field("torch_empty_cache", boolean, False),
            Field("keep_pause", boolean, False),
            Field("recapture_cuda_graph", boolean, False),
            Field("token_step", integer, 0),
        )
        self._protocol.abort_if(body)
        with self._protocol.alone():
            outcome = self._engine.apply("update_disk", body["model_path"])
            extra = {"num_paused_requests": 0}
            if outcome.error is not None and outcome.stage == "receive":
                return _result(False, f"Failed to get weights iterator: {outcome.error}.", extra=extra)
            if outcome.error is not None:
                words = f"Failed to update weights: {outcome.error}.\nRolling back to original weights."
                return _result(False, words, ["the rollback reads the new path again"], extra=extra)
            self._protocol.model_path = body["model_path"]
            notes = outcome.notes + self._engine.ledger.commit()
            outcome = Outcome(outcome.applied, notes)
            return self._updated(outcome, "Succeeded to update model weights.", body, extra=extra)

    def update_ipc(self, call: Call) -> Response:
        call.read(Field("zmq_handles", lambda value: value))
        words = "IPC weight update failed: ImportError checkpoint-engine is not installed"
        return _result(False, words)

    def init_group(self, call: Call) -> Response:
        body = call.read(
            Field("master_address", text),
            Field("master_port", integer),
            Field("rank_offset", integer),
            Field("world_size", integer),
            Field("group_name", text, "weight_update_group"),
            Field("backend", text, "nccl"),
        )
        if not body["group_name"]:
            raise FatalError("Group name cannot be empty", "an assertion in the scheduler ends the server")
        if body["group_name"] in self._engine.loader.groups:
            words = "The specified group name has already been created, please use a different group name"
            return _result(False, f"Failed to initialize custom process group: {words}.")
        outcome = self._engine.join_group(body)
        if outcome.error is not None:
            return _result(False, f"Failed to initialize custom process group: {outcome.error}.")
        return _result(True, "Succeeded to initialize custom process group.")

    def destroy_group(self, call: Call) -> Response:
        name = call.read(Field("group_name", text, "weight_update_group"))["group_name"]
        if name not in self._engine.loader.groups:
            return _result(False, "The group to be destroyed does not exist.")
        self._engine.control("leave_group", name)
        return _result(True, "Succeeded to destroy custom process group.")

    # version and verification

    def update_version(self, call: Call) -> Response:
        body = call.read(Field("new_version", text), Field("abort_all_requests", boolean, True))
        self._protocol.abort_if(body)
        self._engine.set_version(body["new_version"])
        words = f"Weight version updated to {body['new_version']}"
        return _result(True, words, extra={"new_version": body["new_version"]})

    def weight_version(self, call: Call) -> Response:
        return answer({"weight_version": self._engine.version or "default"})

    def check_weights(self, call: Call) -> Response:
        body = {"action": "checksum", "skip_tensor_list": None}
        if call.data:
            body = call.read(
                Field("action", text, "checksum"),
                Field("allow_quant_error", boolean, False),
                Field("skip_tensor_list", optional(list_of(text)), None),
                _SELECTOR,
            )
        if body["action"] != "checksum":
            return _result(False, f"Unsupported action={body['action']!r}")
        per_rank = self._engine.control("checksums", body["skip_tensor_list"] or [])
        return _result(True, "Success.", extra=_checksum_report(per_rank))

    def weights_by_name(self, call: Call) -> Response:
        body = call.read(Field("name", text), Field("truncate_size", integer, 100))
        tensor = self._engine.model.weights.tensors.get(body["name"])
        if "llama" not in str(self._engine.model.config.model_type) or tensor is None:
            return JSONResponse({"error": {"message": "Get parameter by name failed"}}, 400)
        return answer(tensor[: body["truncate_size"]].float().tolist())

    # shared

    def _refuse(self, route: str) -> Response | None:
        if not self._needs_session or self.open:
            return None
        return _result(False, f"{route} must run between begin_weight_update() and end_weight_update()")

    def _updated(
        self,
        outcome: Outcome,
        message: str,
        body: dict[str, Any],
        *,
        extra: dict[str, Any] | None = None,
    ) -> Response:
        """The end of every update that went in: version, flush, answer."""
        version = body["weight_version"]
        if version is not None:
            self._engine.scheduler.version = version
        if not self._needs_session:
            self._engine.ledger.settle()
        if body["flush_cache"] and not self._protocol.flush(0):
            return _result(False, _NOT_FLUSHED, ["the weights have changed all the same"], extra=extra)
        if version is not None:
            self._engine.version = version
            message += f" Weight version updated to {version}."
        return _result(True, message, outcome.notes, extra=extra)


def _result(
    success: bool, message: str, notes: list[str] | None = None, *, extra: dict[str, Any] | None = None
) -> Response:
    content = {"success": success, "message": message} | (extra or {})
    return answer(content, 200 if success else 400, notes)


def _base64(value: Any) -> bytes:
    try:
        return base64.b64decode(text(value), validate=True)
    except binascii.Error as error:
        raise ValueError(f"Base64 decoding error: {error}") from error


def _checksum_report(per_rank: list[dict[str, str]]) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = []
    totals: list[str] = []
    for rank, checksums in enumerate(per_rank):
        place = {"role": "target", "tp_rank": rank, "tp_size": len(per_rank), "rank": rank, "size": len(per_rank)}
        place |= {"dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
        total = xxhash.xxh3_64_hexdigest("".join(checksums[name] for name in sorted(checksums)).encode())
        totals.append(total)
        ranks.append({"checksums": checksums, "per_gpu_checksum": total, "parallelism_info": [place]})
    engine = xxhash.xxh3_64_hexdigest("".join(totals).encode())
    return {"ranks": ranks, "per_engine_checksum": engine}
