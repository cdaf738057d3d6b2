"""LMDeploy (PyTorch engine, 0.18): sleep, wake the weights, update, finish, wake the KV cache.

Facts seen in lmdeploy 0.18.0: the update routes take one dtype per bucket; a bucket without a handle reuses the last one;
`finished: true` must come exactly once per update; there is no version, checksum or flush route; sleep drops the KV cache
and the CUDA graphs; /sleep and /wakeup answer 200 whatever happened, so /is_sleeping is asked after each.
"""

from __future__ import annotations

from typing import Any

import torch

from stages.backends.base import Backend, Engine, Keys
from stages.backends.flattened import PayloadCache, check_load_format, encode, metadata_of, names_of
from stages.backends.http import Http, expect_dict
from stages.errors import CompositionError, ConfigError, EngineError, EngineUnreachable
from stages.flow import Bucket, Shipment
from stages.run import Run, Timeouts, Wire
from stages.transport.messages import GroupInit, GroupMessage, IpcMessage
from stages.transport.shm import reduce_handle


class Lmdeploy(Backend):
    """`sleep_level` 2 frees the old weights before the update, 1 keeps a copy in host memory.

    `load_format`: a bucket of one dtype travels as one flattened_bucket, or one of any dtypes per_tensor as a list.
    """

    name = "lmdeploy"
    seen = "0.18.0"
    transports = ("ipc", "nccl")
    quantizes_on_load = ("fp8_block",)
    refusals = {"disk": "LMDeploy has no route that loads a checkpoint folder"}

    def __init__(self, sleep_level: int = 2, load_format: str = "flattened_bucket") -> None:
        if sleep_level not in (1, 2):
            raise ConfigError(f"backend.sleep_level: {sleep_level} is not one of 1, 2")
        self.sleep_level = sleep_level
        self.load_format = check_load_format(load_format)

    def wire(self, transport: str) -> Wire:
        per_tensor = self.load_format == "per_tensor"
        return Wire(mixed=per_tensor, split=False, align=1, aliases="omit", per_tensor=per_tensor)

    def engine(self, url: str, tp: int, keys: Keys, timeouts: Timeouts) -> LmdeployEngine:
        return LmdeployEngine(url, tp, keys, timeouts, self.sleep_level)


class LmdeployEngine(Engine):
    """One LMDeploy server (all its TP ranks)."""

    def __init__(self, url: str, tp: int, keys: Keys, timeouts: Timeouts, sleep_level: int) -> None:
        super().__init__(url, tp, keys, timeouts)
        self._sleep_level = sleep_level
        self._payloads = PayloadCache()
        self._handle: tuple[int, torch.dtype] | None = None  # the slot and dtype that the engine has cached
        self._event: Any = None
        self._group: str | None = None
        self._weights_awake = False
        self._checked = False  # that it is no TurboMind engine

    def probe(self) -> None:
        self.admin.get("/health", "probe", self.timeouts.control)
        asleep = self._asleep("probe")
        if self.state.paused and not asleep:
            self.restarted()
        self.state.paused = asleep and self.state.paused
        if self._group is not None and not self._knows_group(self._group):
            self.restarted()
        elif not self._checked:
            self._knows_group("none")
        self._checked = True

    def restarted(self) -> None:
        super().restarted()
        self._group = None
        self._checked = False

    def model_path(self) -> str | None:
        models = expect_dict(
            self.api, self.api.get("/v1/models", "probe", self.timeouts.control), "probe", "/v1/models"
        )
        data = models.get("data") or [{}]
        name: str | None = data[0].get("id")
        return name

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
        self._group = init.group_name

    def leave_group(self, init: GroupInit) -> None:
        self._group = None
        self.admin.post(
            "/destroy_weights_update_group", "leave group", self.timeouts.control, {"group_name": init.group_name}
        )

    def detach(self) -> None:
        self._payloads.clear()

    def pause(self, run: Run) -> None:
        if self._asleep("pause"):  # by an earlier update that failed, or by the trainer
            self.state.begun = True
        else:
            self._weights_awake = False
            try:
                self.admin.post("/sleep", "pause", self.timeouts.control, query={"level": self._sleep_level})
            except EngineError as error:  # whoever answered, it may have heard all the same
                self.state.paused = isinstance(error, EngineUnreachable) or self._may_sleep()
                self.state.begun = self.state.paused and self._sleep_level == 2
                raise
            self.state.begun = self._sleep_level == 2
        self.state.paused = True
        if not self._asleep("pause"):
            raise self.fail("pause", "/sleep answered 200 but /is_sleeping says false")

    def begin(self, run: Run) -> None:
        self.admin.post("/wakeup", "begin", self.timeouts.control, query={"tags": "weights"})
        if not self._asleep("begin"):
            # Its KV cache was awake already: an earlier update failed between its two calls of /wakeup.
            self.admin.post("/sleep", "begin", self.timeouts.control, query={"level": self._sleep_level})
            self.admin.post("/wakeup", "begin", self.timeouts.control, query={"tags": "weights"})
        if not self._asleep("begin"):
            raise self.fail(
                "begin", "the KV cache woke up together with the weights; it must stay asleep during an update"
            )
        self._weights_awake = self.state.begun = True
        self._handle = None

    def put(self, shipment: Shipment, run: Run) -> None:
        message, layout = shipment.message, shipment.bucket.layout
        if isinstance(message, IpcMessage):
            body: dict[str, Any] = {"serialized_named_tensors": message.payloads[self.url], "finished": False}
            self._update_params(body | _load_format(run))
            if self._event is not None:
                self._event.synchronize()  # recorded by the engine once it has read the slot
        elif isinstance(message, GroupMessage):
            body = {**names_of(layout), "group_name": message.group_names[self.url]}
            body |= {"finished": False} | _load_format(run)
            self._succeed("/update_weights_from_distributed", "put", body, self.timeouts.put)

    def commit(self, run: Run) -> None:
        """The finish marker, without tensors: it goes out once per update, whatever the last bucket was."""
        if run.transport.name == "ipc":
            nothing = encode([] if run.wire.per_tensor else {"metadata": []})
            body: dict[str, Any] = {"serialized_named_tensors": [nothing] * self.tp, "finished": True}
            self._update_params(body | _load_format(run), phase="commit")
        else:
            body = {
                "names": [],
                "dtypes": [],
                "shapes": [],
                "group_name": self._group,
                "finished": True,
            }
            self._succeed("/update_weights_from_distributed", "commit", body, self.timeouts.put)
        self._handle = None

    def abort(self, run: Run) -> None:
        """Nothing to close: it stays asleep, and the next update starts over with the handle."""
        self._handle = None

    def resume(self, run: Run) -> None:
        tags: dict[str, Any] = {"tags": "kv_cache"} if self._weights_awake else {}
        self.admin.post("/wakeup", "resume", self.timeouts.control, query=tags)
        if self._asleep("resume"):
            raise self.fail("resume", "/wakeup answered 200 but /is_sleeping still says true")

    def verify(self, run: Run) -> str:
        return "acknowledged"

    def encode_ipc(self, bucket: Bucket, run: Run) -> str:
        slot, layout = bucket.slot, bucket.layout
        assert slot is not None
        on_gpu = slot.memory.is_cuda
        if not on_gpu and (cached := self._payloads.get(bucket)) is not None:
            return cached
        if run.wire.per_tensor:
            # Its reply is no device sync, and a list has no event: a fresh export, freed by torch after the engine.
            tensors = bucket.tensors(bucket.memory.clone() if on_gpu else None)
            payload = encode([(name, reduce_handle(tensor)) for name, tensor in tensors])
            return payload if on_gpu else self._payloads.put(bucket, payload)
        dtype = layout.entries[0].spec.dtype
        state: dict[str, Any] = {"metadata": metadata_of(layout, dtype.itemsize), "require_clone": False}
        if on_gpu:
            state |= self._event_handle()
        if not on_gpu or self._handle != (slot.index, dtype):
            state["flattened_tensor"] = reduce_handle(slot.memory[: _whole_items(slot.memory, dtype)].view(dtype))
            self._handle = (slot.index, dtype)
        payload = encode(state)
        return payload if on_gpu else self._payloads.put(bucket, payload)

    def generate(self, input_ids: list[int], max_new_tokens: int) -> tuple[list[int], list[float]]:
        body = {
            "input_ids": input_ids,
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_logprob": True,
        }
        answer = self.api.post("/generate", "generate", self.timeouts.control, body)
        answer = expect_dict(self.api, answer, "generate", "/generate")
        return answer["output_ids"], [item[0] for item in answer["meta_info"]["output_token_logprobs"]]

    def _event_handle(self) -> dict[str, Any]:
        """One interprocess event both ways: filled (recorded here) and consumed (recorded by the engine)."""
        if self._event is None:
            self._event = torch.cuda.Event(interprocess=True)
        self._event.record()
        return {"event_ipc_handle": self._event.ipc_handle()}

    def _update_params(self, body: dict[str, Any], phase: str = "put") -> None:
        answer = self.admin.raw("POST", "/update_weights", phase, self.timeouts.put, body=body)
        status, words = answer.status_code, self.admin.clean(answer.text)
        if status == 500:
            raise self.fail(
                phase,
                "/update_weights answered 500, which it does without a reason (part of the bucket may be loaded); "
                "the reason is in the engine's log. Common ones: not started with --distributed-executor-backend ray, "
                "TurboMind backend, unknown tensor name, wrong shape",
                status=500,
                body=words,
            )
        # It says null. A page or nothing at all, with 200, comes from somebody in between.
        if status != 200 or (isinstance(self.admin, Http) and words.strip() != "null"):
            raise self.fail(phase, f"/update_weights answered {status}: {words[:500]!r}", status=status, body=words)

    def _succeed(self, path: str, phase: str, body: dict[str, Any], timeout: float) -> None:
        answer = expect_dict(self.admin, self.admin.post(path, phase, timeout, body), phase, path)
        if answer.get("success") is not True:
            raise self.fail(phase, f"{path}: {answer.get('message', answer)}", status=200, body=str(answer))

    def _asleep(self, phase: str) -> bool:
        answer = self.admin.get("/is_sleeping", phase, self.timeouts.control)
        return bool(expect_dict(self.admin, answer, phase, "/is_sleeping").get("is_sleeping"))

    def _may_sleep(self) -> bool:
        try:
            return self._asleep("pause")
        except EngineError:
            return True

    def _knows_group(self, name: str) -> bool:
        """An empty, unfinished bucket loads nothing, but is refused when there is no such group; TurboMind refuses all."""
        body = {"names": [], "dtypes": [], "shapes": [], "group_name": name, "finished": False}
        try:
            self._succeed("/update_weights_from_distributed", "probe", body, self.timeouts.control)
        except EngineError as error:
            if error.status == 501:
                raise CompositionError(
                    f"{self.url} runs LMDeploy's TurboMind engine, whose online update is dead code (0.16 to 0.18); start it "
                    f"with --backend pytorch --distributed-executor-backend ray"
                ) from error
            if error.status in (200, 400):
                return False
            raise
        return True


def _load_format(run: Run) -> dict[str, str]:
    """Nothing where a bucket is a list: LMDeploy takes any word but one for that."""
    return {} if run.wire.per_tensor else {"load_format": "flattened_bucket"}


def _whole_items(memory: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes of `memory` that make whole items of `dtype`: the handle covers the whole slot, so that it can be reused."""
    return memory.numel() // dtype.itemsize * dtype.itemsize
