"""Good and bad requests to an engine, to be replayed against the real one and against ours: both must answer alike.

A case is a list of requests in order. What they answer is compared by status and by the keys of the body, and at the
end whether the engine is still there. Cases start from an engine that is up and awake with no update open; those that
are not `clean` leave it otherwise (half loaded, or dead), and it is restarted after them.
"""

from __future__ import annotations

import base64
import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import multiprocessing
from torch.multiprocessing.reductions import reduce_tensor

NORM = "model.norm.weight"
HEAD = "lm_head.weight"
Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """`body` is JSON, or bytes as they are. `loose`: the real body may have more keys than ours."""

    method: str
    path: str
    body: Any = None
    query: Json = field(default_factory=dict)
    content_type: str | None = "application/json"
    loose: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Case:
    name: str
    requests: tuple[Request, ...]
    clean: bool = True
    dies: bool = False  # documented: the engine's process ends


def post(path: str, body: Any = None, *, loose: bool = False, **query: Any) -> Request:
    return Request("POST", path, body, query, loose=loose)


def get(path: str, *, loose: bool = False, **query: Any) -> Request:
    return Request("GET", path, None, query, None, loose)


class Payloads:
    """Serialized tensors as a trainer on the same machine sends them: in shared memory, by handle.

    Handles of one consumer: what is decoded twice is made twice. Keeps the memory alive.
    """

    def __init__(self, folder: Path) -> None:
        self.state = load_file(folder / "model.safetensors")
        self._alive: list[Any] = []

    def named(self, tensors: dict[str, torch.Tensor]) -> str:
        """SGLang's list of (name, tensor)."""
        return self._pickled(list(tensors.items()))

    def flattened(self, tensors: dict[str, torch.Tensor], *, unit: int = 1, shift: int = 0) -> Json:
        """One flat uint8 tensor and an object per tensor that says where; counted in `unit` bytes, `shift` bytes
        off."""
        entries, parts, at = [], [torch.zeros(shift, dtype=torch.uint8)], shift
        for name, tensor in tensors.items():
            raw = tensor.contiguous().view(torch.uint8).flatten()
            where = {"start_idx": at // unit, "end_idx": (at + raw.numel()) // unit, "numel": raw.numel() // unit}
            entries.append(SimpleNamespace(name=name, shape=tensor.shape, dtype=tensor.dtype, **where))
            parts.append(raw)
            at += raw.numel()
        return {"flattened_tensor": torch.cat(parts), "metadata": entries}

    def sglang_bucket(self, tensors: dict[str, torch.Tensor], *, shift: int = 0) -> str:
        return self._pickled(self.flattened(tensors, shift=shift))

    def lmdeploy_list(self, tensors: dict[str, torch.Tensor]) -> str:
        """LMDeploy's list of (name, (rebuild, arguments))."""
        with sharing_by_name():
            return self._pickled([(name, reduce_tensor(self._shared(t))) for name, t in tensors.items()])

    def lmdeploy_bucket(self, tensors: dict[str, torch.Tensor], *, with_handle: bool = True) -> str:
        (dtype,) = {t.dtype for t in tensors.values()}
        bucket = self.flattened(tensors, unit=dtype.itemsize)
        flat = bucket.pop("flattened_tensor").view(dtype)
        if with_handle:
            with sharing_by_name():
                bucket["flattened_tensor"] = reduce_tensor(self._shared(flat))
        return self._pickled(bucket)

    def other_pickle(self) -> str:
        """Harmless, yet on no allow-list."""
        return base64.b64encode(pickle.dumps([("x", os.getcwd)])).decode()

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        shared: torch.Tensor = tensor.clone().share_memory_()
        self._alive.append(shared)
        return shared

    def _pickled(self, content: Any) -> str:
        self._alive.append(content)
        out = io.BytesIO()
        with sharing_by_name():
            ForkingPickler(out).dump(content)
        return base64.b64encode(out.getvalue()).decode()


@contextmanager
def sharing_by_name() -> Iterator[None]:
    """torch's default of passing file descriptors works between related processes only."""
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        multiprocessing.set_sharing_strategy(before)


Corpus = Callable[[Path, str], list[Case]]  # of a checkpoint folder and the name that it is served by


def sglang(folder: Path, model: str) -> list[Case]:
    made = Payloads(folder)
    norm = {NORM: made.state[NORM]}
    pause, resume = post("/pause_generation", {"mode": "retract"}), post("/continue_generation", {})
    begin, end = post("/begin_weight_update", {"selector": "all"}), post("/end_weight_update", {})

    def tensor(payload: str | list[str], **more: Any) -> Request:
        payloads = [payload] if isinstance(payload, str) else payload
        return post("/update_weights_from_tensor", {"serialized_named_tensors": payloads, "flush_cache": False} | more)

    def update(*requests: Request) -> tuple[Request, ...]:
        return (pause, begin, *requests, end, resume)

    def killed_by(name: str, request: Request) -> Case:
        return Case(name, (pause, begin, request), clean=False, dies=True)

    bucket = {"load_format": "flattened_bucket"}
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    broadcast = {"names": [NORM], "dtypes": ["bfloat16"], "shapes": [[4]]}
    greedy = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
    return [
        Case("what it is", (get("/model_info", loose=True), get("/server_info", loose=True))),
        Case("ready or paused", (get("/ready"), pause, get("/ready"), resume, get("/ready"))),
        Case("pause modes", (*(r for m in ("abort", "retract", "in_place") for r in (_pause(m), resume)),)),
        Case("a pause mode that does not exist", (_pause("gently"), get("/ready"))),
        Case("paused twice, resumed twice", (pause, pause, resume, resume)),
        Case("update in a session", (*update(tensor(made.named(norm))),)),
        Case("update by a flattened bucket", (*update(tensor(made.sglang_bucket(norm), **bucket)),)),
        Case(
            "update with a version",
            (*update(tensor(made.named(norm), weight_version="v7")), get("/model_info", loose=True)),
        ),
        Case("update without a session", (pause, tensor(made.named(norm)), resume)),
        Case("session opened twice", (pause, begin, begin, end, resume)),
        Case("session that is not open is ended", (end,)),
        Case("selector that does not exist", (post("/begin_weight_update", {"selector": "some"}),)),
        Case("no payload", (post("/update_weights_from_tensor", {}),)),
        Case("payload that is no list", (post("/update_weights_from_tensor", {"serialized_named_tensors": 7}),)),
        Case("payload that is no base64", (*update(tensor("not base64!")),)),
        Case("body that is no JSON", (post("/update_weights_from_tensor", b"{"),)),
        Case("unknown name", (*update(tensor(made.named({"model.nonsense.weight": torch.zeros(4)}))),)),
        Case("field that does not exist", (*update(tensor(made.named(norm), flush_cash=True)),)),
        Case("disk", (post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "v8"}),)),
        Case("disk, no such folder", (post("/update_weights_from_disk", {"model_path": "/nowhere"}),)),
        Case("disk, no path", (post("/update_weights_from_disk", {}),)),
        Case("group that is not there", (*update(post("/update_weights_from_distributed", broadcast)),)),
        Case("group that is not there is destroyed", (post("/destroy_weights_update_group", {"group_name": "g"}),)),
        Case("group without an address", (post("/init_weights_update_group", {k: group[k] for k in list(group)[1:]}),)),
        Case("broadcast without names", (post("/update_weights_from_distributed", {"dtypes": [], "shapes": []}),)),
        Case("version", (post("/update_weight_version", {"new_version": "v9", "abort_all_requests": False}),)),
        Case("version that is missing", (post("/update_weight_version", {}),)),
        Case("flush", (post("/flush_cache"), get("/flush_cache"), pause, post("/flush_cache"), resume)),
        Case("checksum", (post("/weights_checker", {"action": "checksum"}),)),
        Case("checker with another action", (post("/weights_checker", {"action": "admire"}),)),
        Case("abort of all", (post("/abort_request", {"abort_all": True}),)),
        Case("generate", (post("/generate", {"input_ids": [5, 6], "sampling_params": greedy}, loose=True),)),
        Case("generate from nothing", (post("/generate", {"sampling_params": greedy}, loose=True),)),
        Case("route that does not exist", (post("/update_weights", {}), get("/get_weight_version"))),
        killed_by("wrong shape", tensor(made.named({NORM: torch.zeros(3, dtype=torch.bfloat16)}))),
        killed_by("load format that does not exist", tensor(made.named(norm), load_format="zip")),
        killed_by("misaligned bucket", tensor(made.sglang_bucket(norm, shift=1), **bucket)),
        killed_by("pickle of something else", tensor(made.other_pickle())),
    ]


def _pause(mode: str) -> Request:
    return post("/pause_generation", {"mode": mode})


def vllm(folder: Path, model: str) -> list[Case]:
    pause, resume = post("/pause", mode="keep", clear_cache="true"), post("/resume")
    start, finish = post("/start_weight_update"), post("/finish_weight_update", {"weight_version": "v7"})

    def init(**info: Any) -> Request:
        return post("/init_weight_transfer_engine", {"init_info": info})

    def update(**info: Any) -> Request:
        return post("/update_weights", {"update_info": info})

    greedy = {"model": model, "temperature": 0, "max_tokens": 2, "ignore_eos": True}
    nothing = {"transport": "ipc", "timeout": 5.0, "slot_bytes": 64, "segments": []}
    one = {"update": 1, "seq": 0, "plan_hash": "unknown"}
    return [
        Case("what it is", (get("/health"), get("/version"), get("/get_world_size", include_dp="true"))),
        Case("models", (get("/v1/models", loose=True),)),
        Case("pause and resume", (pause, get("/is_paused"), resume, get("/is_paused"))),
        Case("pause modes", (*(r for m in ("abort", "wait", "keep") for r in (post("/pause", mode=m), resume)),)),
        Case("a pause mode that does not exist", (post("/pause", mode="gently"),)),
        Case("paused twice, resumed twice", (pause, pause, resume, resume)),
        Case("update before init", (pause, start, resume), clean=False),
        Case("init with another transport", (init(transport="pigeon", timeout=5.0, slot_bytes=64),)),
        Case("init with a key that does not exist", (init(**nothing, colour="red"),)),
        Case("init without its object", (post("/init_weight_transfer_engine", {}),)),
        Case("update without start", (pause, init(**nothing), update(**one), resume)),
        Case("finish without start", (pause, init(**nothing), finish, resume)),
        Case("started twice", (pause, init(**nothing), start, start), clean=False),
        Case("unknown plan", (pause, init(**nothing), start, update(**one)), clean=False),
        Case(
            "update with a key that does not exist", (pause, init(**nothing), start, update(colour="red")), clean=False
        ),
        Case("update without its object", (post("/update_weights", {}),)),
        Case("body that is no JSON", (post("/update_weights", b"{"),)),
        Case(
            "version", (get("/weight_info"), post("/update_weight_version", {"new_version": "v9"}), get("/weight_info"))
        ),
        Case("version that is missing", (post("/update_weight_version", {}),)),
        Case("disk", (_reload(folder), post("/reset_prefix_cache"))),
        Case("disk, no such folder", (_reload(Path("/nowhere")),), clean=False),
        Case("method that does not exist", (post("/collective_rpc", {"method": "fly"}),)),
        Case("checksum", (post("/weight_checker", {"action": "checksum"}),)),
        Case("comparison without a baseline", (post("/weight_checker", {"action": "compare"}),)),
        Case("flush", (post("/reset_prefix_cache"), post("/reset_mm_cache"), post("/reset_encoder_cache"))),
        Case("sleep", (post("/sleep", level=1), get("/is_sleeping"), post("/wake_up"), get("/is_sleeping"))),
        Case("abort of all", (post("/abort_requests", {}), post("/abort_requests", b""))),
        Case("generate", (post("/v1/completions", greedy | {"prompt": [5, 6]}, loose=True),)),
        Case(
            "generate for a model that does not exist",
            (post("/v1/completions", greedy | {"model": "x", "prompt": [5]}),),
        ),
        Case("generate with versions", (post("/inference/v1/generate", {"token_ids": [5], "sampling_params": {}}),)),
        Case("route that does not exist", (post("/update_weights_from_disk", {}), get("/ready"))),
        Case(
            "generation in the middle of an update",
            (pause, init(**nothing), start, resume, post("/v1/completions", greedy | {"prompt": [5, 6]})),
            clean=False,
            dies=True,
        ),
    ]


def _reload(folder: Path) -> Request:
    return post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})


def lmdeploy(folder: Path, model: str) -> list[Case]:
    made = Payloads(folder)
    norm = {NORM: made.state[NORM]}
    wrong = {NORM: torch.zeros(3, dtype=torch.bfloat16)}
    unknown = {"model.nonsense.weight": torch.zeros(4, dtype=torch.bfloat16)}
    asleep = (post("/sleep", level=2), get("/is_sleeping"), post("/wakeup", tags="weights"), get("/is_sleeping"))
    awake = (post("/wakeup", tags="kv_cache"), get("/is_sleeping"))

    def update(payload: Any, **more: Any) -> Request:
        return post("/update_weights", {"serialized_named_tensors": payload, "finished": True} | more)

    bucket = {"load_format": "flattened_bucket"}
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    broadcast = {"names": [], "dtypes": [], "shapes": [], "group_name": "g"}
    mixed = {"names": [NORM, HEAD], "dtypes": ["bfloat16", "float32"], "shapes": [[4], [4]], "group_name": "g"}
    bare = Request("POST", "/sleep", None, {"level": 1}, None)
    return [
        Case("health", (get("/health"), get("/is_sleeping"))),
        Case("sleep, level 1", (post("/sleep", level=1), get("/health"), post("/wakeup"), get("/is_sleeping"))),
        Case("sleep, level 2", (*asleep, *awake), clean=False),
        Case("sleep, level 3", (post("/sleep", level=3), get("/is_sleeping"))),
        Case("sleep, level deep", (post("/sleep", level="deep"),)),
        Case("sleep without a content type", (bare,)),
        Case("wakeup of what is awake", (post("/wakeup", tags="weights"),)),
        Case("wakeup of what does not exist", (post("/sleep", level=1), post("/wakeup", tags="soul"), post("/wakeup"))),
        Case("generation while asleep", (post("/sleep", level=1), post("/v1/completions", {}), post("/wakeup"))),
        Case("update of a list", (update(made.lmdeploy_list(norm)),)),
        Case("update of a list, one per rank", (update([made.lmdeploy_list(norm)]),)),
        Case("update by a flattened bucket", (update(made.lmdeploy_bucket(norm), **bucket),)),
        Case("bucket without a handle", (update(made.lmdeploy_bucket(norm, with_handle=False), **bucket),)),
        Case("bucket without its load format", (update(made.lmdeploy_bucket(norm)),)),
        Case("load format that does not exist", (update(made.lmdeploy_list(norm), load_format="zip"),)),
        Case("empty list of payloads", (update([]),)),
        Case("payload that is a dict", (update({"a": 1}),)),
        Case("payload that is a number", (update(7),)),
        Case("no payload", (post("/update_weights", {}),)),
        Case("payload that is no base64", (update("not base64!"),)),
        Case("body that is no JSON", (post("/update_weights", b"{"),)),
        Case("unknown name", (update(made.lmdeploy_list(unknown)),)),
        Case("wrong shape", (update(made.lmdeploy_list(wrong)),)),
        Case("another dtype", (update(made.lmdeploy_list({NORM: made.state[NORM].float()})),)),
        Case("field that does not exist", (update(made.lmdeploy_list(norm), finnished=True),)),
        Case("group without an address", (post("/init_weights_update_group", {k: group[k] for k in list(group)[1:]}),)),
        Case("group without a name", (post("/init_weights_update_group", group | {"group_name": ""}),)),
        Case("group that is not there", (post("/update_weights_from_distributed", broadcast),)),
        Case("mixed dtypes for a group that is not there", (post("/update_weights_from_distributed", mixed),)),
        Case("group that is not there is destroyed", (post("/destroy_weights_update_group", {"group_name": "g"}),)),
        Case("broadcast without names", (post("/update_weights_from_distributed", {"dtypes": [], "shapes": []}),)),
        Case("abort of all", (post("/abort_request", {"abort_all": True}),)),
        Case(
            "routes of other engines", (post("/pause", {}), post("/flush_cache"), post("/update_weights_from_disk", {}))
        ),
    ]


CORPORA: dict[str, Corpus] = {"sglang": sglang, "vllm": vllm, "lmdeploy": lmdeploy}
