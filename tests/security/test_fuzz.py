"""Everything that reads bytes from outside, fed with what nobody should send: the errors are ours, and typed.

Plans have theirs in tests/unit/test_plan.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import save

from pipelines import report_view
from pipelines.cli.job import Status
from pipelines.cli.sweep import result_row
from pipelines.engine.checkpoint import Checkpoint as EngineCheckpoint
from pipelines.engine.pickles import PayloadError
from pipelines.engine.unpickle import loads
from pipelines.report import EngineReport, Report, UpdateReport, read_report
from stages.backends.http import Answer, Http
from stages.errors import ConfigError, EngineError, TransportError, WeightstreamError
from stages.flow import TensorSpec, plan_to_json
from stages.gather.checkpoint import INDEX, Checkpoint, read_header
from stages.quantize.scheme import scheme_of
from stages.receiver import Receiver
from stages.transport import cuda_ipc
from tests.engine.client import LocalEngine
from tests.engine.conftest import Start
from tests.engine.sending import VllmBuckets, by_value, flat_bytes

from .strategies import GOOD_PICKLES, JSON, PICKLES, bodies, damaged, encoded, mutated

FUZZ = settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
FUZZ = settings(FUZZ, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
FEWER = settings(FUZZ, max_examples=max(1, FUZZ.max_examples // 3))


def _bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


# -- payloads and handles ---------------------------------------------------------------------------------------------


@FUZZ
@given(PICKLES)
@example(b"\x80\x04Nr\xff\xff\xff\x7f.")
def test_payloads(data: bytes) -> None:
    with contextlib.suppress(PayloadError):
        loads(data)


@pytest.mark.parametrize("good", GOOD_PICKLES)
def test_every_cut_of_a_payload(good: bytes) -> None:
    for end in range(len(good)):
        with pytest.raises(PayloadError):
            loads(good[:end])


HANDLE = cuda_ipc.to_json(
    (
        *(torch.Tensor, torch.Size((4,)), (1,), 0, torch.UntypedStorage, torch.uint8, 0, b"h" * 64, 4, 0, False),
        *(b"/torch_1_2_3", 0, b"e" * 64, True),
    )
)


@FUZZ
@given(JSON | mutated([{"uuid": "GPU-0", "args": HANDLE}]))
def test_handles(handles: Any) -> None:
    """As far as no GPU is needed: what is malformed is refused before torch would see it."""

    def rebuild(*args: Any) -> torch.Tensor:
        cuda_ipc.check_handle_args([*args])
        return torch.zeros(1)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(TransportError):
        patch.setattr(cuda_ipc, "device_uuid", lambda device: "GPU-0")
        patch.setattr(cuda_ipc.reductions, "rebuild_cuda_tensor", rebuild)
        cuda_ipc.open_handle(handles, torch.device("cuda", 0))


# -- our receiver -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def buckets() -> Iterator[VllmBuckets]:
    made = VllmBuckets({"a": torch.arange(30.0), "b": torch.ones(2, 3, dtype=torch.bfloat16)}, 64)
    yield made
    made.close()


@FUZZ
@given(st.data())
def test_our_receiver(buckets: VllmBuckets, data: st.DataObject) -> None:
    """Whatever comes: a typed error, and no byte beyond what the plan says."""
    seen: list[int] = []

    def sink(spec: TensorSpec, start: int, piece: torch.Tensor) -> None:
        assert 0 <= start <= start + piece.numel() <= spec.nbytes
        seen.append(piece.numel())

    receiver = Receiver(0)
    try:
        with contextlib.suppress(WeightstreamError):
            receiver.init(data.draw(st.just(buckets.init_info()) | mutated(buckets.init_info()).filter(_no_group)))
        for seq in range(len(buckets.segments)):
            with contextlib.suppress(WeightstreamError):
                receiver.start()
                receiver.receive(data.draw(st.just(buckets.update_info(seq)) | mutated(buckets.update_info(seq))), sink)
        with contextlib.suppress(WeightstreamError):
            receiver.finish()
    finally:
        receiver.shutdown()


def _no_group(info: Any) -> bool:
    return not (isinstance(info, dict) and info.get("transport") == "nccl")


@FEWER
@given(bodies(["master_address", "master_port", "rank_offset", "world_size", "group_name", "backend", "slot_bytes"]))
@example({"master_port": 1 << 40})
@example({"world_size": 1 << 62, "master_port": 1})
@example({"group_name": "\udcff", "master_port": 1})
@example({"backend": "mpi", "master_port": 1})
def test_an_invitation_to_a_group(info: dict[str, Any]) -> None:
    """Nobody leads it: joining fails, and says so."""
    info = {"transport": "nccl", "slot_bytes": 8, "timeout": 0.05, "master_address": "127.0.0.1"} | info
    if info["master_address"] not in ("127.0.0.1", "localhost") and isinstance(info["master_address"], str):
        info["master_address"] = "127.0.0.1"  # no look-ups of made-up hosts
    with pytest.raises(WeightstreamError):
        Receiver(0).init(info)


# -- files ------------------------------------------------------------------------------------------------------------

SAFETENSORS = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)})
HEADER = json.loads(SAFETENSORS[8 : 8 + struct.unpack("<Q", SAFETENSORS[:8])[0]])


def file_of(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + SAFETENSORS[8 + struct.unpack("<Q", SAFETENSORS[:8])[0] :]


@FUZZ
@given(st.one_of(st.binary(max_size=40), damaged(SAFETENSORS), mutated(HEADER).map(file_of), JSON.map(file_of)))
@example(file_of({"a": {"dtype": "F32", "shape": [1 << 70, 0], "data_offsets": [0, 34]}}))
@example(struct.pack("<Q", 1 << 63) + b"{}")
@example(struct.pack("<Q", 200_000) + b"[" * 200_000)
def test_headers_of_safetensors(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(data)
    with contextlib.suppress(ConfigError):
        assert sum(spec.nbytes for spec in read_header(file)) <= 1 << 62
    for reader in (Checkpoint, EngineCheckpoint):
        (tmp_path / "config.json").write_text("{}")
        with contextlib.suppress(ConfigError):
            reader(tmp_path)


INDEX_JSON = {"metadata": {"total_size": 34}, "weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}


@FUZZ
@given(st.one_of(st.binary(max_size=20), mutated(INDEX_JSON).map(_bytes)))
@example(b"[" * 100_000)
@example(b'{"weight_map": ' * 50_000)
def test_indexes(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(SAFETENSORS)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_bytes(data)
    for reader in (Checkpoint, EngineCheckpoint):
        with contextlib.suppress(ConfigError):
            reader(tmp_path)


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "ignore": ["lm_head", "re:.*gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
            "input_activations": {"dynamic": True, "num_bits": 8},
        }
    },
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "ignored_layers": ["lm_head"],
    "modules_to_not_convert": ["mlp.gate"],
}


@FUZZ
@given(
    st.one_of(
        JSON,
        *(mutated({"quantization_config": q, "text_config": {}}) for q in (COMPRESSED, FP8, {"quant_method": "mxfp8"})),
        *(mutated({"text_config": {"quantization_config": q}}) for q in (COMPRESSED, FP8)),
    ).map(_bytes)
    | st.binary(max_size=20)
)
@example(_bytes({"quantization_config": FP8 | {"ignored_layers": ["re:("]}}))
@example(_bytes({"quantization_config": COMPRESSED | {"ignore": ["re:" + "(" * 5000]}}))
@example(b"[" * 100_000)
def test_quantization_configs(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config.json").write_bytes(data)
    (tmp_path / "x.safetensors").write_bytes(SAFETENSORS)
    with contextlib.suppress(ConfigError):
        found = scheme_of(tmp_path)
        if found is not None:
            found.rules.wants("model.layers.0.mlp.down_proj")
    with contextlib.suppress(ConfigError):
        _ = EngineCheckpoint(tmp_path).block_fp8
    with contextlib.suppress(ConfigError):
        _ = Checkpoint(tmp_path).tied


UPDATE = UpdateReport("1", "committed", engines=[EngineReport("http://a:1", "committed", "1", "digest", "abc")])
REPORT = Report({"backend": {}}, [UPDATE, UpdateReport("2", error="no")]).to_json()
STATUS = {"number": 1, "overrides": ["a=b"], "folder": "x", "exit_code": 0, "error": None, "traceback": None}


@FUZZ
@given(
    st.binary(max_size=20) | (JSON | mutated(REPORT)).map(_bytes), st.binary(max_size=9) | mutated(STATUS).map(_bytes)
)
def test_reports(tmp_path: Path, report: bytes, status: bytes) -> None:
    """What is read can be shown: as the table of a run, and as a line of a sweep's."""
    (tmp_path / "report.json").write_bytes(report)
    (tmp_path / "status.json").write_bytes(status)
    job = Status(0, [], str(tmp_path))
    with contextlib.suppress(WeightstreamError):
        report_view.show(read_report(tmp_path / "report.json"), Console(file=open(os.devnull, "w")))  # noqa: SIM115
        job.read_report()
        result_row(job)
    with contextlib.suppress(WeightstreamError):
        result_row(Status.read(tmp_path / "status.json"))


# -- what engines answer ----------------------------------------------------------------------------------------------


@FEWER
@given(
    st.binary(max_size=30) | JSON.map(_bytes),
    st.sampled_from([200, 204, 302, 400, 500]),
    st.sampled_from(["application/json", "x"]),
)
def test_answers_of_engines(data: bytes, code: int, kind: str) -> None:
    http = Http("http://x", None, 1.0)
    http.raw = lambda *_, **__: Answer(code, data, kind)  # type: ignore[method-assign]
    with contextlib.suppress(EngineError):
        http.post("/x", "put", 1.0)


# -- the embedded engine ----------------------------------------------------------------------------------------------

TENSORS = {"model.norm.weight": torch.ones(64), "lm_head.weight": torch.zeros(512, 64)}
PAYLOADS = st.lists(encoded(PICKLES) | st.just(by_value(flat_bytes(TENSORS))) | st.just("!"), max_size=2)
TOKENS = st.lists(st.integers(-1, 520), max_size=4)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "serialized_named_tensors": PAYLOADS | encoded(PICKLES),
    "load_format": st.sampled_from([None, "flattened_bucket", "direct", "other"]),
    "input_ids": TOKENS,
    "prompt": TOKENS,
    "token_ids": TOKENS,
    "sampling_params": bodies(
        ["max_new_tokens", "max_tokens", "temperature", "sampling_seed", "ignore_eos", "logprobs"]
    ),
    "max_tokens": st.integers(0, 5),
    "max_new_tokens": st.integers(0, 5),
    "temperature": st.sampled_from([0, 1.0, 5e-324, 1e308, -1.0]),
    "master_address": st.just("127.0.0.1"),
    "names": st.lists(st.sampled_from(["model.norm.weight", "x"]), max_size=2),
    "dtypes": st.lists(st.sampled_from(["float32", "load", "bfloat16"]), max_size=2),
    "shapes": st.lists(st.lists(st.integers(-1, 64), max_size=2), max_size=2),
    "action": st.sampled_from(["checksum", "reset", "compare", "snapshot"]),
    "method": st.sampled_from(["reload_weights", "__class__"]),
    "request_ids": JSON,
    "update_info": JSON,
    "init_info": JSON,
}
NAMES = [*SPECIAL]
NAMES += [
    "seed",
    "rid",
    "mode",
    "model",
    "logprobs",
    "finished",
    "group_name",
    "rank_offset",
    "master_port",
    "world_size",
]
NAMES += [
    "weight_version",
    "new_version",
    "flush_cache",
    "abort_all",
    "abort_all_requests",
    "selector",
    "tags",
    "backend",
]
NAMES += [
    "kwargs",
    "return_logprob",
    "request_id",
    "name",
    "truncate_size",
    "skip_tensor_list",
    "model_path",
    "baseline",
]
BLOCKING = {"/pause", "/sleep", "/pause_generation"}  # what follows would wait for a resume that never comes
AGAIN = {"sglang": "/begin_weight_update", "vllm": "/start_weight_update", "lmdeploy": None}


def is_typed(backend: str, path: str, status: int, text: str) -> bool:
    """200, a refusal, or an end that the real engine is known for and that the answer says in its words."""
    if status in (200, 400, 401, 403, 404, 405, 413, 501, 503):
        return True
    if "forward pass failed" in text:
        return False
    if backend == "vllm" and "Worker failed with error" in text:
        return True
    if backend == "lmdeploy" and path == "/update_weights":
        return text == "Internal Server Error"
    return "real_engine" in text


@pytest.mark.parametrize("backend", ["lmdeploy", "sglang", "vllm"])
def test_requests_to_an_engine(start: Start, backend: str) -> None:
    engine = start(backend, group_timeout=0.1, scale_out=True)
    app: Any = engine._server.config.app
    routes = sorted({r.path for r in app.routes if "POST" in r.methods} - BLOCKING)

    @FUZZ
    @given(
        st.sampled_from(routes),
        bodies(NAMES, SPECIAL).map(_bytes) | JSON.map(_bytes) | st.binary(max_size=20),
        st.booleans(),
    )
    @example("/weightstream/generate", _bytes({"input_ids": [1], "max_new_tokens": 2, "temperature": 5e-324}), False)
    @example("/weightstream/generate", _bytes({"input_ids": [1], "max_new_tokens": 2, "temperature": 10**400}), False)
    @example("/weightstream/generate", _bytes({"input_ids": [1], "max_new_tokens": 2, "seed": 1 << 70}), False)
    def ask(path: str, body: bytes, in_session: bool) -> None:
        if in_session and AGAIN[backend] is not None:
            engine.post(AGAIN[backend], {})
        answer = engine.post(path, data=body)
        assert is_typed(backend, path, answer.status_code, answer.text), (path, body, answer.status_code, answer.text)
        _revive(engine)

    ask()
    assert engine.get("/weightstream/state").status_code == 200


def _revive(engine: LocalEngine) -> None:
    """What a new process would be: some of these requests end a real one."""
    inner = engine.engine
    inner.dead = inner.scheduler.failure = None
    inner.scheduler.thaw()
    updates: Any = getattr(_protocol(engine), "updates", None)
    if updates is not None:
        updates.open = updates.on_meta = False


def _protocol(engine: LocalEngine) -> Any:
    app: Any = engine._server.config.app
    return next(m.kwargs["protocol"] for m in app.user_middleware if "protocol" in m.kwargs)


@pytest.mark.parametrize("backend", ["lmdeploy", "sglang", "vllm"])
def test_query_arguments_of_an_engine(start: Start, backend: str) -> None:
    engine = start(backend)
    route = {"lmdeploy": "/sleep", "sglang": "/flush_cache", "vllm": "/pause"}[backend]

    @FEWER
    @given(
        st.dictionaries(
            st.sampled_from(["level", "mode", "timeout", "clear_cache", "tags"]), st.text(max_size=5), max_size=3
        )
    )
    @example({"level": "9" * 5000})
    @example({"timeout": "nan"})
    def ask(query: dict[str, str]) -> None:
        answer = engine.post(route, params=query)
        assert answer.status_code in (200, 400), (query, answer.text)

    ask()


def test_our_own_plan_is_what_the_receiver_takes(buckets: VllmBuckets) -> None:
    """The other tests fuzz around something that works."""
    receiver, seen = Receiver(0), []
    take: Callable[[TensorSpec, int, torch.Tensor], None] = lambda spec, start, piece: seen.append(spec.name)  # noqa: E731
    receiver.init(buckets.init_info())
    receiver.start()
    for seq in range(len(buckets.segments)):
        receiver.receive(buckets.update_info(seq), take)
    receiver.finish()
    receiver.shutdown()
    assert {"a", "b"} == set(seen)
    assert plan_to_json(buckets.plan)["hash"] == buckets.plan.hash
