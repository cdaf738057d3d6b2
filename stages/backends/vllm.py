"""vLLM: pause with a cache reset, start, updates, finish with the version, resume. Seen in 0.32.0; 0.33 by its source.

The engine must run with VLLM_SERVER_DEV_MODE=1 and `--weight-transfer-config '{"backend": "weightstream"}'`: the plug-in that
this package installs puts our own receiver (`stages.receiver`) into its workers. A forward pass between start and finish
ends the engine, so it is paused first and stays so until finish succeeded. A tensor of a wrong shape cannot be repaired
without a restart. On CPU a tied lm_head has a packed copy of its own, so tied names travel as tensors of their own.
"""

from __future__ import annotations

from typing import Any

import torch

from stages.backends.base import Backend, Engine, Keys
from stages.backends.flattened import names_of
from stages.backends.http import Http, expect_dict
from stages.errors import CompositionError, ConfigError, EngineError
from stages.flow import Bucket, Shipment, plan_to_json
from stages.receiver import ABORT_SEQ
from stages.run import Run, Timeouts, Wire
from stages.transport.cuda_ipc import pickle_for_vllm
from stages.transport.messages import DiskMessage, GroupInit, GroupMessage, IpcMessage, SharedSlots

_PAUSES = ("keep", "wait", "abort")


class Vllm(Backend):
    """`pause`: keep running requests frozen, wait for them, or abort them.

    `transfer`: "plugin" is our own receiver inside vLLM (weightstream installed there, backend "weightstream"), on CPU and GPU;
    "native" is vLLM's own ipc or nccl backend, GPU only, with nothing installed in the engine's environment.
    """

    name = "vllm"
    seen = "0.32.0"
    transports = ("ipc", "nccl", "disk")

    def __init__(self, pause: str = "keep", transfer: str = "plugin") -> None:
        if transfer not in ("plugin", "native"):
            raise ConfigError(f"backend.transfer: {transfer!r} is not one of plugin, native")
        if pause not in _PAUSES:
            raise ConfigError(f"backend.pause: {pause!r} is not one of {', '.join(_PAUSES)}")
        self.pause, self.transfer = pause, transfer

    def check_device(self, device: torch.device) -> None:
        if self.transfer == "native" and device.type != "cuda":
            raise CompositionError(
                "backend.transfer=native: vLLM's own ipc and nccl backends work on GPU only; use backend.transfer=plugin on CPU"
            )

    def wire(self, transport: str) -> Wire:
        if transport == "disk":
            return Wire(mixed=True, split=False, align=1, aliases="duplicate", digest=True)
        if self.transfer == "native":
            return Wire(mixed=True, split=False, align=1, aliases="omit", bootstrap="unique_id")
        return Wire(mixed=True, split=True, align=256, aliases="duplicate", digest=True)

    def engine(self, url: str, tp: int, keys: Keys, timeouts: Timeouts) -> VllmEngine:
        kind = NativeVllmEngine if self.transfer == "native" else VllmEngine
        return kind(url, tp, keys, timeouts, self.pause)


class VllmEngine(Engine):
    """One vLLM server (all its workers)."""

    def __init__(self, url: str, tp: int, keys: Keys, timeouts: Timeouts, pause: str) -> None:
        super().__init__(url, tp, keys, timeouts)
        self._pause = pause
        self._started = False

    def probe(self) -> None:
        self.admin.get("/health", "probe", self.timeouts.control)
        if self.state.version is not None and self._version("probe") != self.state.version:
            self.restarted()
        answer = self.admin.get("/get_world_size", "probe", self.timeouts.control, {"include_dp": "true"})
        world = int(expect_dict(self.admin, answer, "probe", "/get_world_size").get("world_size", 0))
        if world != self.tp:
            raise CompositionError(f"{self.url}: the engine has {world} workers, engines.tp says {self.tp}")

    def model_path(self) -> str | None:
        models = expect_dict(
            self.api, self.api.get("/v1/models", "probe", self.timeouts.control), "probe", "/v1/models"
        )
        data = models.get("data") or [{}]
        root: str | None = data[0].get("root")
        return root

    def software(self) -> str | None:
        answer = expect_dict(self.api, self.api.get("/version", "probe", self.timeouts.control), "probe", "/version")
        version: str | None = answer.get("version")
        return version

    def attach(self, slots: SharedSlots) -> None:
        info = {
            "transport": "ipc",
            "segments": slots.segments,
            "handles": slots.handles,
            "slot_bytes": slots.slot_bytes,
            "timeout": self.timeouts.put,
        }
        self._init(info, self.timeouts.control)

    def detach(self) -> None:
        self._shut_down()

    def join_group(self, init: GroupInit) -> None:
        info = {
            "transport": "nccl",
            "master_address": init.master_address,
            "master_port": init.master_port,
            "rank_offset": init.rank_offset,
            "world_size": init.world_size,
            "group_name": init.group_name,
            "backend": init.backend,
            "slot_bytes": init.bucket_bytes,
            "timeout": init.timeout,
        }
        self._init(info, init.timeout)

    def leave_group(self, init: GroupInit) -> None:
        self._shut_down()

    def pause(self, run: Run) -> None:
        self.state.paused = True  # even if no answer comes: it may have heard
        self._tell("/pause", "pause", self.timeouts.control, query={"mode": self._pause, "clear_cache": "true"})
        answer = self.admin.get("/is_paused", "pause", self.timeouts.control)
        if expect_dict(self.admin, answer, "pause", "/is_paused").get("is_paused") is not True:
            raise self.fail("pause", "/pause answered 200 but /is_paused says false")

    def begin(self, run: Run) -> None:
        if run.transport.name == "disk":
            return  # nothing reaches it before commit
        self.state.begun = True
        try:
            self._tell("/start_weight_update", "begin", self.timeouts.control)
        except EngineError as error:
            if error.status != 500 or ("start" not in str(error).lower() and "active" not in str(error).lower()):
                raise
            self._close_session("begin")  # left open by an update that died
            self._tell("/start_weight_update", "begin", self.timeouts.control)
        self._started = True

    def put(self, shipment: Shipment, run: Run) -> None:
        message, bucket = shipment.message, shipment.bucket
        if isinstance(message, DiskMessage):
            return
        assert isinstance(message, IpcMessage | GroupMessage) and bucket.slot is not None
        fresh = bucket.layout.seq == 0 and self.state.known_plan != bucket.plan.hash
        info = {
            "update": bucket.update,
            "seq": bucket.layout.seq,
            "plan_hash": bucket.plan.hash,
            "plan": plan_to_json(bucket.plan) if fresh else None,
            "slot": bucket.slot.index if isinstance(message, IpcMessage) else None,
            "digest": None if bucket.digest is None else f"{bucket.digest:016x}",
        }
        try:
            self._tell("/update_weights", "put", self.timeouts.put, {"update_info": info})
        except EngineError:
            self._started = False  # the engine closes the session by itself
            self.state.known_plan = None
            raise
        self.state.known_plan = bucket.plan.hash

    def commit(self, run: Run) -> None:
        if run.transport.name == "disk":
            self.state.begun = True
            body = {"method": "reload_weights", "kwargs": {"weights_path": run.folder}}
            self._tell("/collective_rpc", "commit", self.timeouts.put, body)
            self._tell("/update_weight_version", "commit", self.timeouts.control, {"new_version": run.version})
            return
        self._started = False
        self._tell("/finish_weight_update", "commit", self.timeouts.put, {"weight_version": run.version})

    def abort(self, run: Run) -> None:
        if self._started:
            self._close_session("abort")

    def _close_session(self, phase: str) -> None:
        """A refused bucket ends the session without finishing it, as any error does; the next update starts over."""
        self._started = False
        info = {"update": 0, "seq": ABORT_SEQ, "plan_hash": ""}
        self.admin.raw("POST", "/update_weights", phase, self.timeouts.put, body={"update_info": info})

    def resume(self, run: Run) -> None:
        self._tell("/resume", "resume", self.timeouts.control)

    def verify(self, run: Run) -> str:
        seen = self._version("verify")
        if seen != run.version:
            raise self.fail("verify", f"weight_version is {seen!r}, {run.version!r} was committed")
        own_receiver = run.transport.name != "disk"
        return "digest" if own_receiver and run.integrity and run.device.type == "cpu" else "version"

    def encode_ipc(self, bucket: Bucket, run: Run) -> str:
        return ""  # our receiver has the slots mapped and is told their index

    def generate(self, input_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        models = expect_dict(
            self.api, self.api.get("/v1/models", "generate", self.timeouts.control), "generate", "/v1/models"
        )
        body = {
            "model": models["data"][0]["id"],
            "prompt": input_ids,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = expect_dict(
            self.api,
            self.api.post("/v1/completions", "generate", self.timeouts.control, body),
            "generate",
            "/v1/completions",
        )
        choice = answer["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def _tell(
        self, path: str, phase: str, timeout: float, body: Any = None, query: dict[str, Any] | None = None
    ) -> None:
        """Every route here answers an object. A page or nothing at all, with 200, comes from somebody in between."""
        more = {} if query is None else {"query": query}
        answer = self.admin.post(path, phase, timeout, body, **more)
        if isinstance(self.admin, Http):
            expect_dict(self.admin, answer, phase, path)

    def _shut_down(self) -> None:
        """Its receiver drops mappings and groups."""
        self.state.known_plan = None
        self._tell("/shutdown_weight_transfer_engine", "leave group", self.timeouts.control)

    def _init(self, info: dict[str, Any], timeout: float) -> None:
        self.state.known_plan = None
        try:
            self._tell("/init_weight_transfer_engine", "join", timeout, {"init_info": info})
        except EngineError as error:
            self._explain(error)
            raise

    def _explain(self, error: EngineError) -> None:
        """Raise it with what to do about it, where we know."""
        if hint := _hint(error):
            words = str(error).removeprefix(f"{error.engine}: {error.phase}: ")
            raise self.fail(error.phase, words + hint, status=error.status, body=error.body) from error

    def _version(self, phase: str) -> str | None:
        try:
            answer = self.admin.get("/weight_info", phase, self.timeouts.control)
        except EngineError as error:
            self._explain(error)
            raise
        return expect_dict(self.admin, answer, phase, "/weight_info").get("weight_version")


class NativeVllmEngine(VllmEngine):
    """vLLM's own ipc and nccl backends, packed: one bucket is one chunk and one update call.

    Packed buffers are the plain concatenation of the tensors' bytes, widest item first (wire format of vLLM 0.32 and 0.33).
    The engine cuts nccl chunks by itself once they exceed its buffer, so the buffer is as large as our largest bucket; ipc
    handles travel pickled, which the server must allow. Bytes and requests are tested on CPU; not run on a GPU yet.
    """

    def __init__(self, url: str, tp: int, keys: Keys, timeouts: Timeouts, pause: str) -> None:
        super().__init__(url, tp, keys, timeouts, pause)
        self._handles: list[str] = []

    def attach(self, slots: SharedSlots) -> None:
        self._handles = [pickle_for_vllm(handles) for handles in slots.handles]
        self._init({"packed": True}, self.timeouts.control)

    def join_group(self, init: GroupInit) -> None:
        info = {
            "nccl_unique_id_b64": init.unique_id,
            "rank_offset": init.rank_offset,
            "world_size": init.world_size,
            "packed": True,
            "packed_buffer_size_bytes": init.bucket_bytes,
            "packed_num_buffers": 2,
        }
        self._init(info, init.timeout)

    def put(self, shipment: Shipment, run: Run) -> None:
        message, bucket = shipment.message, shipment.bucket
        if isinstance(message, DiskMessage):
            return
        lists = names_of(bucket.layout)
        info = {"names": lists["names"], "dtype_names": lists["dtypes"], "shapes": lists["shapes"]}
        if isinstance(message, IpcMessage):
            assert bucket.slot is not None
            info["tensor_sizes"] = [e.nbytes for e in bucket.layout.entries]
            info["ipc_handles_pickled"] = self._handles[bucket.slot.index]
        try:
            self._tell("/update_weights", "put", self.timeouts.put, {"update_info": info})
        except EngineError as error:
            self._started = False
            self._explain(error)
            raise

    def verify(self, run: Run) -> str:
        super().verify(run)
        return "version"

    def _close_session(self, phase: str) -> None:
        self._started = False
        self.admin.raw("POST", "/update_weights", phase, self.timeouts.put, body={"update_info": {"given_up": True}})


def _hint(error: EngineError) -> str:
    """What to do about answers that mean: not started the way it must be."""
    if error.status == 404:
        return "; start vLLM with VLLM_SERVER_DEV_MODE=1, without which it has no weight routes"
    if "Refusing to deserialize" in error.body:
        return "; start vLLM with VLLM_ALLOW_INSECURE_SERIALIZATION=1 (its ipc handles are pickled), or use transfer=plugin"
    if "not configured" in error.body or "Invalid init_info" in error.body:
        return (
            '; start vLLM with --weight-transfer-config \'{"backend": "weightstream"}\' and the weightstream package '
            "installed in its environment"
        )
    return ""
