"""SGLang: pause, begin, buckets, end, flush, version, continue. Seen in 0.5.23; 0.5.10 to 0.5.20 have no session routes.

The tensor route ends the whole server on a wrong shape, an unaligned entry, a short payload list or a refused pickle, and
accepts unknown or missing names silently: preflight and the layout rules keep all of these from being sent. `/health`
generates a token and blocks while paused, so `/ready` is asked instead. Defaults that abort requests or flush early are
always sent explicitly.
"""

from __future__ import annotations

from typing import Any

import torch

from stages.backends.base import Backend, Engine, Keys
from stages.backends.flattened import PayloadCache, check_load_format, encode, metadata_of, names_of
from stages.backends.http import expect_dict
from stages.errors import CompositionError, ConfigError, EngineError
from stages.flow import Bucket, Shipment
from stages.run import Run, Timeouts, Wire
from stages.transport.messages import DiskMessage, GroupInit, GroupMessage, IpcMessage

_PAUSES = ("abort", "retract", "in_place")


class Sglang(Backend):
    """`pause`: abort running requests, retract them (KV dropped and recomputed), or keep them in_place with their old KV.

    `load_format`: a bucket travels as one flattened_bucket, or per_tensor as a list.
    """

    name = "sglang"
    seen = "0.5.23"
    transports = ("ipc", "nccl", "disk")

    def __init__(self, pause: str = "retract", load_format: str = "flattened_bucket") -> None:
        if pause not in _PAUSES:
            raise ConfigError(f"backend.pause: {pause!r} is not one of {', '.join(_PAUSES)}")
        self.pause = pause
        self.load_format = check_load_format(load_format)

    def wire(self, transport: str) -> Wire:
        per_tensor = self.load_format == "per_tensor"
        return Wire(mixed=True, split=False, align=1, aliases="omit", digest=transport == "disk", per_tensor=per_tensor)

    def engine(self, url: str, tp: int, keys: Keys, timeouts: Timeouts) -> SglangEngine:
        return SglangEngine(url, tp, keys, timeouts, self.pause)


class SglangEngine(Engine):
    """One SGLang server (all its TP ranks)."""

    def __init__(self, url: str, tp: int, keys: Keys, timeouts: Timeouts, pause: str) -> None:
        super().__init__(url, tp, keys, timeouts)
        self._pause = pause
        self._payloads = PayloadCache()
        self._session = False

    def probe(self) -> None:
        info = self._model_info("probe")
        if self.state.version is not None and info.get("weight_version") != self.state.version:
            self.restarted()
        server = expect_dict(self.api, self._server_info(), "probe", "/server_info")
        for key in ("dp_size", "pp_size"):
            if int(server.get(key) or 1) > 1:
                raise CompositionError(
                    f"{self.url}: SGLang with {key}={server[key]} has no working weight update routes"
                )
        if (tp := int(server.get("tp_size") or self.tp)) != self.tp:
            raise CompositionError(f"{self.url}: the engine runs with tp_size={tp}, engines.tp says {self.tp}")

    def model_path(self) -> str | None:
        return self._model_info("probe").get("model_path")

    def software(self) -> str | None:
        return expect_dict(self.api, self._server_info(), "probe", "/server_info").get("version")

    def join_group(self, init: GroupInit) -> None:
        body = {
            "master_address": init.master_address,
            "master_port": init.master_port,
            "rank_offset": init.rank_offset,
            "world_size": init.world_size,
            "group_name": init.group_name,
            "backend": init.backend,
        }
        self._succeed("/init_weights_update_group", "join group", body, init.timeout)

    def leave_group(self, init: GroupInit) -> None:
        self.admin.post(
            "/destroy_weights_update_group", "leave group", self.timeouts.control, {"group_name": init.group_name}
        )

    def detach(self) -> None:
        self._payloads.clear()

    def pause(self, run: Run) -> None:
        self.state.paused = True  # even if no answer comes: it may have heard
        self.admin.post("/pause_generation", "pause", self.timeouts.control, {"mode": self._pause})

    def begin(self, run: Run) -> None:
        self._session = False
        if run.transport.name == "disk":
            return  # nothing reaches it before commit
        self.state.begun = True
        for attempt in range(2):
            try:
                self._succeed("/begin_weight_update", "begin", {"selector": "all"}, self.timeouts.control)
                self._session = True
                return
            except EngineError as error:
                if error.status == 404:
                    return  # before 0.5.21: no session routes, updates go without
                if attempt or "already open" not in str(error):
                    raise
                self._end("begin")  # left open by an update that died

    def put(self, shipment: Shipment, run: Run) -> None:
        message, layout = shipment.message, shipment.bucket.layout
        body: dict[str, Any] = {"flush_cache": False, "abort_all_requests": False}
        if not run.wire.per_tensor:
            body["load_format"] = "flattened_bucket"
        if isinstance(message, IpcMessage):
            body["serialized_named_tensors"] = message.payloads[self.url]
            self._succeed("/update_weights_from_tensor", "put", body, self.timeouts.put)
        elif isinstance(message, GroupMessage):
            body |= {**names_of(layout), "group_name": message.group_names[self.url]}
            self._succeed("/update_weights_from_distributed", "put", body, self.timeouts.put)
        else:
            assert isinstance(message, DiskMessage)

    def commit(self, run: Run) -> None:
        if run.transport.name == "disk":
            self.state.begun = True
            body = {
                "model_path": run.folder,
                "flush_cache": False,
                "abort_all_requests": False,
                "keep_pause": True,
                "weight_version": run.version,
            }
            self._succeed("/update_weights_from_disk", "commit", body, self.timeouts.put)
        elif self._session:
            self._end("commit")
            self._session = False
        if self._pause != "in_place":
            # Aborted requests are answered a moment before the scheduler is idle. Retracted ones wait for us, so that
            # waiting for idleness would be in vain; but retracting leaves nothing running.
            wait = {"timeout": self.timeouts.control / 2} if self._pause == "abort" else None
            self.admin.post("/flush_cache", "flush", self.timeouts.control, query=wait)
        body = {"new_version": run.version, "abort_all_requests": False}
        self._succeed("/update_weight_version", "commit", body, self.timeouts.control)

    def abort(self, run: Run) -> None:
        if self._session:
            self._session = False
            self._end("abort")

    def resume(self, run: Run) -> None:
        self.admin.post("/continue_generation", "resume", self.timeouts.control, {"torch_empty_cache": False})
        ready = self.api.raw("GET", "/ready", "resume", self.timeouts.control)
        if ready.status_code not in (200, 404):  # 404: before it had this route
            raise self.fail("resume", f"/ready answered {ready.status_code}", status=ready.status_code, body=ready.text)

    def verify(self, run: Run) -> str:
        seen = self._model_info("verify").get("weight_version")
        if seen != run.version:
            raise self.fail("verify", f"weight_version is {seen!r}, {run.version!r} was committed")
        return "version"

    def encode_ipc(self, bucket: Bucket, run: Run) -> str:
        assert bucket.slot is not None
        if bucket.slot.memory.is_cuda:
            # Its reply is no device sync: a fresh export, kept by torch until the engine has dropped its references.
            return encode(_content(bucket, bucket.memory.clone(), run), device_by_uuid=True)
        if (cached := self._payloads.get(bucket)) is not None:
            return cached
        return self._payloads.put(bucket, encode(_content(bucket, bucket.memory, run)))

    def generate(self, input_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        body = {
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
            "return_logprob": True,
        }
        answer = expect_dict(
            self.api, self.api.post("/generate", "generate", self.timeouts.control, body), "generate", "/generate"
        )
        logprobs = [item[0] for item in answer["meta_info"]["output_token_logprobs"]]
        return answer["output_ids"], logprobs

    def _end(self, phase: str) -> None:
        self._succeed("/end_weight_update", phase, {}, self.timeouts.put)

    def _model_info(self, phase: str) -> dict[str, Any]:
        return expect_dict(self.api, self.api.get("/model_info", phase, self.timeouts.control), phase, "/model_info")

    def _server_info(self) -> Any:
        return self.api.get("/server_info", "probe", self.timeouts.control)

    def _succeed(self, path: str, phase: str, body: dict[str, Any], timeout: float) -> None:
        answer = expect_dict(self.admin, self.admin.post(path, phase, timeout, body), phase, path)
        if answer.get("success") is not True:
            raise self.fail(phase, f"{path}: {answer.get('message', answer)}", status=200, body=str(answer))


def _content(bucket: Bucket, memory: torch.Tensor, run: Run) -> Any:
    """What the tensor route unpickles: a list of names and tensors, or one flat tensor and where they lie in it."""
    if run.wire.per_tensor:
        return bucket.tensors(memory)
    return {"flattened_tensor": memory, "metadata": metadata_of(bucket.layout, 1)}
