"""The SGLang adapter against a scripted server: the exact requests, and what it makes of each answer."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import updater_over
from support.chains import raw
from support.fakes import Toy
from support.httpd import Answer, Asked, Server
from support.httpd import server as server

from pipelines.updater import WeightUpdater
from stages.backends.sglang import Sglang
from stages.errors import CompositionError, ConfigError, EngineError, UpdateFailed
from stages.transport.group import BroadcastGroup
from stages.transport.messages import GroupInit

OK = Answer(200, {"success": True, "message": "Success"})


class Engine:
    """SGLang 0.5.23 as far as updates go: sessions, versions, pauses; bytes decoded as it does."""

    def __init__(self, server: Server, tp: int = 1) -> None:
        self.server, self.tp = server, tp
        self.version = "default"
        self.session = self.paused = False
        self.weights: dict[str, bytes] = {}
        self.groups: dict[str, BroadcastGroup] = {}
        self.routes: dict[str, Any] = {
            "/model_info": lambda a: Answer(200, {"model_path": "/nowhere", "weight_version": self.version}),
            "/server_info": lambda a: Answer(200, {"tp_size": tp, "dp_size": 1, "pp_size": 1}),
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/ready": lambda a: Answer(503 if self.paused else 200),
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/update_weights_from_tensor": self.tensor,
            "/update_weights_from_distributed": self.distributed,
            "/init_weights_update_group": self.join,
            "/destroy_weights_update_group": self.leave,
            "/update_weights_from_disk": self.disk,
            "/flush_cache": lambda a: Answer(200, "Cache flushed."),
            "/update_weight_version": self.label,
        }
        server.answers = dict(self.routes)

    def pause(self, asked: Asked) -> Answer:
        self.paused = True
        return Answer(200, {"message": "Generation paused successfully.", "status": "ok"})

    def resume(self, asked: Asked) -> Answer:
        self.paused = False
        return Answer(200, {"message": "Generation continued successfully.", "status": "ok"})

    def begin(self, asked: Asked) -> Answer:
        if self.session:
            return no("a weight-update session is already open; call end_weight_update() first")
        self.session = True
        return OK

    def end(self, asked: Asked) -> Answer:
        if not self.session:
            return no("no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return OK

    def tensor(self, asked: Asked) -> Answer:
        if not self.session:
            return no("update_weights_from_tensor must run between begin_weight_update() and end_weight_update()")
        payloads = asked.body["serialized_named_tensors"]
        assert len(payloads) == self.tp, "a list shorter than tp_size ends the server"
        for payload in payloads:
            data = pickle.loads(base64.b64decode(payload, validate=True))
            self.decode(data["flattened_tensor"], data["metadata"])
        return OK

    def decode(self, flat: torch.Tensor, metadata: list[Any]) -> None:
        assert flat.dtype == torch.uint8
        for m in metadata:
            assert m.numel == m.end_idx - m.start_idx
            tensor = flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape)
            self.weights[m.name] = raw(tensor)

    def distributed(self, asked: Asked) -> Answer:
        body, offset = asked.body, 0
        group = self.groups.get(body["group_name"])
        if group is None:
            return no(
                f"Group {body['group_name']} not in {list(self.groups)}. Please call `init_weights_update_group` first."
            )
        dtypes = [getattr(torch, d) for d in body["dtypes"]]
        sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(body["shapes"], dtypes, strict=True)]
        flat = torch.zeros(sum(sizes), dtype=torch.uint8)
        group.broadcast(flat)
        for name, dtype, shape, size in zip(body["names"], dtypes, body["shapes"], sizes, strict=True):
            self.weights[name] = raw(flat[offset : offset + size].view(dtype).reshape(shape))
            offset += size
        return OK

    def join(self, asked: Asked) -> Answer:
        b = asked.body
        init = GroupInit(
            b["master_address"],
            b["master_port"],
            b["rank_offset"],
            b["world_size"],
            b["group_name"],
            b["backend"],
            20.0,
        )
        self.groups[b["group_name"]] = BroadcastGroup.join(init, init.rank_offset)
        return OK

    def leave(self, asked: Asked) -> Answer:
        group = self.groups.pop(asked.body["group_name"], None)
        if group is None:
            return no("The group to be destroyed does not exist.")
        group.destroy()
        return OK

    def disk(self, asked: Asked) -> Answer:
        from safetensors.torch import load_file

        for file in Path(asked.body["model_path"]).glob("*.safetensors"):
            self.weights |= {n: raw(t) for n, t in load_file(file).items()}
        self.version = asked.body["weight_version"]
        return OK

    def label(self, asked: Asked) -> Answer:
        self.version = asked.body["new_version"]
        return Answer(200, {"success": True, "message": "", "new_version": self.version})


def no(words: str, status: int = 400) -> Answer:
    return Answer(status, {"success": False, "message": words})


@pytest.fixture
def engine(server: Server) -> Engine:
    return Engine(server)


def backend(pause: str = "retract") -> dict[str, Any]:
    return {"_target_": "stages.backends.sglang.Sglang", "pause": pause}


@pytest.fixture
def updater(engine: Engine) -> Iterator[WeightUpdater]:
    with updater_over(engine.server, backend()) as made:
        yield made


def since(server: Server, start: int = 0) -> list[str]:
    """Requests, without those that only look."""
    looks = ("/model_info", "/server_info", "/ready")
    return [str(a) for a in server.asked[start:] if a.path not in looks]


PUT = "POST /update_weights_from_tensor"
SEQUENCE = [
    "POST /pause_generation",
    "POST /begin_weight_update",
    *[PUT] * 3,
    "POST /end_weight_update",
    "POST /flush_cache",
    "POST /update_weight_version",
    "POST /continue_generation",
]

# -- the right way --------------------------------------------------------------------------------------------------


def test_the_requests_of_an_update_in_order(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    report = updater.update(Toy(1.0), "v1")
    assert since(server) == SEQUENCE
    assert engine.weights == Toy(1.0).bytes()
    assert engine.version == "v1"
    assert not engine.paused
    assert report.engines[0].verified == "version"
    start = len(server.asked)
    updater.update(Toy(2.0), "v2")
    assert since(server, start) == SEQUENCE
    assert engine.weights == Toy(2.0).bytes()


def test_every_flag_with_a_harmful_default_is_sent(updater: WeightUpdater, server: Server) -> None:
    """The version call aborts all requests unless told not to (radixark/miles#2589)."""
    updater.update(Toy(1.0), "v1")
    assert server.last("/pause_generation").body == {"mode": "retract"}
    assert server.last("/begin_weight_update").body == {"selector": "all"}
    assert server.last("/update_weight_version").body == {"new_version": "v1", "abort_all_requests": False}
    assert server.last("/continue_generation").body == {"torch_empty_cache": False}
    put = dict(server.last("/update_weights_from_tensor").body)
    assert len(put.pop("serialized_named_tensors")) == 1
    assert put == {"load_format": "flattened_bucket", "flush_cache": False, "abort_all_requests": False}


def test_the_cache_is_flushed_before_anything_is_generated(updater: WeightUpdater, server: Server) -> None:
    """Prompts with a shared prefix reuse the KV cache of the old weights (InternLM/lmdeploy#4917)."""
    updater.update(Toy(1.0))
    paths = since(server)
    assert (
        paths.index("POST /end_weight_update")
        < paths.index("POST /flush_cache")
        < paths.index("POST /continue_generation")
    )
    assert "timeout" not in server.last("/flush_cache").query  # it would wait for what was retracted, in vain


def test_aborted_requests_may_take_a_moment_to_leave(engine: Engine, server: Server) -> None:
    with updater_over(server, backend("abort")) as updater:
        updater.update(Toy(1.0))
    assert server.last("/flush_cache").query == {"timeout": ["10.0"]}


def test_paused_in_place_nothing_is_flushed(engine: Engine, server: Server) -> None:
    with updater_over(server, backend("in_place")) as updater:
        updater.update(Toy(1.0))
    assert server.last("/pause_generation").body == {"mode": "in_place"}
    assert since(server) == [s for s in SEQUENCE if "flush" not in s]


def test_every_rank_gets_a_payload(server: Server) -> None:
    engine = Engine(server, tp=3)
    with updater_over(server, backend(), tp=3) as updater:
        updater.update(Toy(1.0))
    assert len(server.last("/update_weights_from_tensor").body["serialized_named_tensors"]) == 3
    assert engine.weights == Toy(1.0).bytes()


def test_payloads_hold_handles_not_bytes(updater: WeightUpdater, server: Server) -> None:
    class Large(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1 << 20))

    updater.update(Large())
    (payload,) = server.last("/update_weights_from_tensor").body["serialized_named_tensors"]
    assert len(payload) < 4096


def test_mixed_dtypes_share_a_bucket_without_padding(engine: Engine, server: Server) -> None:
    model = Toy(1.5)
    model.down.weight = torch.nn.Parameter(torch.tensor([1, 2, 3], dtype=torch.uint8), requires_grad=False)
    model.norm.weight = torch.nn.Parameter(torch.randn(5).to(torch.bfloat16))
    with updater_over(server, backend(), capacity=4096) as updater:
        assert updater.update(model).buckets == 1
    assert engine.weights == model.bytes()


def test_distributed_requests(engine: Engine, server: Server) -> None:
    with updater_over(server, backend(), "nccl") as updater:
        updater.update(Toy(1.0), "v1")
        join = server.last("/init_weights_update_group").body
        assert (join["rank_offset"], join["world_size"], join["backend"]) == (1, 2, "gloo")
        put = server.last("/update_weights_from_distributed").body
        assert put == {
            "names": ["norm.weight"],
            "dtypes": ["float32"],
            "shapes": [[5]],
            "group_name": join["group_name"],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        updater.update(Toy(2.0), "v2")
        assert engine.weights == Toy(2.0).bytes()
        assert len([a for a in server.asked if a.path == "/init_weights_update_group"]) == 1
    assert engine.groups == {}
    assert server.paths()[-1] == "POST /destroy_weights_update_group"


def test_disk_requests(engine: Engine, server: Server, tmp_path: Path) -> None:
    with updater_over(server, backend(), "disk", path=tmp_path) as updater:
        updater.update(Toy(1.0), "v1")
    assert since(server) == [
        "POST /pause_generation",
        "POST /update_weights_from_disk",
        "POST /flush_cache",
        "POST /update_weight_version",
        "POST /continue_generation",
    ]
    assert server.last("/update_weights_from_disk").body == {
        "model_path": str(tmp_path / "v1"),
        "flush_cache": False,
        "abort_all_requests": False,
        "keep_pause": True,
        "weight_version": "v1",
    }
    assert engine.weights == Toy(1.0).bytes()


def test_two_keys_each_where_it_belongs(engine: Engine, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", "api-key")
    monkeypatch.setenv("WEIGHTSTREAM_ADMIN_KEY", "admin-key")
    with updater_over(server, backend()) as updater:
        updater.update(Toy(1.0))
    for asked in server.asked:
        wanted = "api-key" if asked.path in ("/model_info", "/server_info", "/ready") else "admin-key"
        assert asked.headers["authorization"] == f"Bearer {wanted}", asked


# -- answers that say no --------------------------------------------------------------------------------------------


def test_success_false_with_status_200_is_a_failure(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    """Nothing was applied, and yet `ok` says yes (PaddlePaddle/FastDeploy#6052)."""
    server.answers["/update_weights_from_tensor"] = Answer(200, {"success": False, "message": "not today"})
    with pytest.raises(UpdateFailed, match="update_weights_from_tensor: not today"):
        updater.update(Toy(1.0))
    assert engine.paused


def test_a_refused_bucket_closes_the_session_and_stays_paused(
    engine: Engine, updater: WeightUpdater, server: Server
) -> None:
    server.answers["/update_weights_from_tensor"] = [engine.tensor, no("Weights partially updated"), engine.tensor]
    with pytest.raises(UpdateFailed, match="partially updated"):
        updater.update(Toy(1.0))
    assert since(server) == [*SEQUENCE[:4], "POST /end_weight_update"]
    assert engine.paused
    assert not engine.session
    assert updater.update(Toy(2.0)).outcome == "committed"
    assert engine.weights == Toy(2.0).bytes()


def test_a_session_that_a_dead_trainer_left_open_is_ended_first(
    engine: Engine, updater: WeightUpdater, server: Server
) -> None:
    engine.session = True
    updater.update(Toy(1.0))
    assert since(server)[1:4] == ["POST /begin_weight_update", "POST /end_weight_update", "POST /begin_weight_update"]


def test_an_old_engine_without_sessions_is_updated_without(
    engine: Engine, updater: WeightUpdater, server: Server
) -> None:
    for path in ("/begin_weight_update", "/end_weight_update"):
        server.answers[path] = Answer(404, {"detail": "Not Found"})
    engine.session = True  # it takes tensors at any time
    updater.update(Toy(1.0))
    assert "POST /end_weight_update" not in since(server)


def test_a_flush_that_is_refused_is_a_failed_update_not_a_dead_engine(
    engine: Engine, updater: WeightUpdater, server: Server
) -> None:
    """Flushing while requests are pending is refused (areal-project/AReaL#140)."""
    server.answers["/flush_cache"] = [Answer(400, "Flush cache failed."), Answer(200, "Cache flushed.")]
    with pytest.raises(UpdateFailed, match="Flush cache failed"):
        updater.update(Toy(1.0), "v1")
    assert engine.version == "default"
    assert engine.paused
    assert updater.update(Toy(2.0), "v2").outcome == "committed"


@pytest.mark.parametrize(
    "info", [{"weight_version": "other"}, {"model_path": "v1"}, {}, {"weight_version": None}], ids=str
)
def test_a_version_that_is_not_the_committed_one_stops(
    engine: Engine, updater: WeightUpdater, server: Server, info: dict[str, Any]
) -> None:
    """A missing version was read from another field: the model's path (vllm-project/vime#45)."""
    server.answers["/model_info"] = Answer(200, info)
    with pytest.raises(UpdateFailed, match="weight_version is .*, 'v1' was committed"):
        updater.update(Toy(1.0), "v1")
    assert engine.paused


def test_a_server_that_dies_at_a_bucket_is_unreachable_and_tainted(
    engine: Engine, updater: WeightUpdater, server: Server
) -> None:
    server.answers["/update_weights_from_tensor"] = [engine.tensor, Answer(drop=True)]
    with pytest.raises(UpdateFailed, match="connection failed or dropped"):
        updater.update(Toy(1.0))
    assert updater.tainted


def test_a_disk_update_that_fails_before_its_commit_resumes_on_the_old_version(
    engine: Engine, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with updater_over(server, backend(), "disk", path=tmp_path) as updater:
        updater.update(Toy(1.0), "v1")
        monkeypatch.setattr("stages.transport.disk._write_file", full_disk)
        with pytest.raises(UpdateFailed, match="aborted"):
            updater.update(Toy(2.0), "v2")
        assert not engine.paused
        assert updater.tainted == {}
        assert engine.weights == Toy(1.0).bytes()


def full_disk(*args: Any) -> None:
    from stages.errors import TransportError

    raise TransportError("the disk is full")


def test_an_engine_that_is_not_ready_after_resuming_is_a_failure(
    engine: Engine, updater: WeightUpdater, server: Server
) -> None:
    server.answers["/ready"] = Answer(503)
    with pytest.raises(UpdateFailed, match="/ready answered 503"):
        updater.update(Toy(1.0))


# -- what is refused before anything is touched ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "info, words",
    [
        ({"tp_size": 2}, "tp_size=2, engines.tp says 1"),
        ({"tp_size": 1, "dp_size": 2}, "dp_size=2 has no working weight update routes"),
        ({"tp_size": 1, "pp_size": 4}, "pp_size=4 has no working weight update routes"),
    ],
)
def test_a_topology_that_cannot_be_updated_is_refused(
    engine: Engine, updater: WeightUpdater, server: Server, info: dict[str, int], words: str
) -> None:
    """pp_size above 1 runs out of memory instead of saying no (sgl-project/sglang#8203)."""
    server.answers["/server_info"] = Answer(200, info)
    with pytest.raises(CompositionError, match=words):
        updater.update(Toy(1.0))
    assert since(server) == []


def test_a_server_that_is_something_else_is_refused(updater: WeightUpdater, server: Server) -> None:
    server.answers = {"/model_info": Answer(200, "<html>Welcome to nginx</html>")}
    with pytest.raises(EngineError, match="/model_info answered no JSON object"):
        updater.update(Toy(1.0))
    assert since(server) == []


def test_a_restart_is_noticed_by_its_version_and_everything_is_set_up_anew(engine: Engine, server: Server) -> None:
    with updater_over(server, backend(), "nccl") as updater:
        updater.update(Toy(1.0), "v1")
        engine.version = "default"
        engine.groups.clear()
        updater.update(Toy(2.0), "v2")
        names = [a.body["group_name"] for a in server.asked if a.path == "/init_weights_update_group"]
        assert len(names) == len(set(names)) == 2
        assert engine.weights == Toy(2.0).bytes()


def test_pause_modes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"backend\.pause: 'stop' is not one of abort, retract, in_place"):
        Sglang("stop")
