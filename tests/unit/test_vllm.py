"""The vLLM adapter against a scripted server with our receiver in it: the exact requests, and what it makes of each answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import pieces, updater_over
from support.chains import raw
from support.fakes import Toy
from support.httpd import Answer, Asked, Server
from support.httpd import server as server
from support.vllm_like import VllmLike, no

from pipelines.updater import WeightUpdater
from stages.backends.vllm import Vllm
from stages.errors import CompositionError, ConfigError, EngineError, UpdateFailed
from stages.receiver import ABORT_SEQ


@pytest.fixture
def engine(server: Server) -> Iterator[VllmLike]:
    made = VllmLike(server)
    yield made
    made.receiver.shutdown()


def backend(**settings: Any) -> dict[str, Any]:
    return {"_target_": "stages.backends.vllm.Vllm", **settings}


@pytest.fixture
def updater(engine: VllmLike) -> Iterator[WeightUpdater]:
    with updater_over(engine.server, backend(), capacity=200) as made:
        yield made


def steps(server: Server, start: int = 0) -> list[str]:
    """Requests, without those that only look."""
    looks = ("/health", "/v1/models", "/get_world_size", "/weight_info", "/is_paused")
    return [str(a).removeprefix("POST ") for a in server.asked[start:] if a.path not in looks]


def puts(server: Server, start: int = 0) -> list[dict[str, Any]]:
    return [a.body["update_info"] for a in server.asked[start:] if a.path == "/update_weights"]


BUCKETS = 5  # one tensor each: entries start at multiples of 256
SEQUENCE = [
    "/pause",
    "/start_weight_update",
    *["/update_weights"] * BUCKETS,
    "/finish_weight_update",
    "/resume",
]

# -- the right way --------------------------------------------------------------------------------------------------


def test_the_requests_of_an_update_in_order(engine: VllmLike, updater: WeightUpdater, server: Server) -> None:
    report = updater.update(Toy(1.0), "v1")
    assert steps(server) == ["/init_weight_transfer_engine", *SEQUENCE]
    assert engine.weights == Toy(1.0).bytes()
    assert engine.version == "v1"
    assert not engine.paused
    assert report.engines[0].verified == "digest"
    start = len(server.asked)
    updater.update(Toy(2.0), "v2")
    assert steps(server, start) == SEQUENCE
    assert engine.weights == Toy(2.0).bytes()


def test_every_flag_is_sent_explicitly(updater: WeightUpdater, server: Server) -> None:
    updater.update(Toy(1.0), "v1")
    assert server.last("/pause").query == {"mode": ["keep"], "clear_cache": ["true"]}
    assert server.last("/get_world_size").query == {"include_dp": ["true"]}
    assert server.last("/finish_weight_update").body == {"weight_version": "v1"}
    info = server.last("/init_weight_transfer_engine").body["init_info"]
    assert pieces(info, "transport", "timeout") == {"transport": "ipc", "timeout": 20.0}
    assert len(info["segments"]) == 2


def test_a_steady_update_sends_no_metadata_that_the_engine_has(updater: WeightUpdater, server: Server) -> None:
    updater.update(Toy(1.0))
    first = puts(server)
    assert [i["plan"] is not None for i in first] == [True] + [False] * (BUCKETS - 1)
    start = len(server.asked)
    updater.update(Toy(2.0))
    second = puts(server, start)
    assert all(i["plan"] is None for i in second)
    assert [i["seq"] for i in second] == list(range(BUCKETS))
    assert {i["plan_hash"] for i in first + second} == {first[0]["plan_hash"]}
    assert all(len(i["digest"]) == 16 for i in second)
    model = Toy(3.0)
    model.norm.weight = torch.nn.Parameter(torch.zeros(9))
    start = len(server.asked)
    updater.update(model)
    assert puts(server, start)[0]["plan"] is not None


def test_tied_names_travel_as_tensors_of_their_own(engine: VllmLike, updater: WeightUpdater) -> None:
    """On CPU its head has a packed copy of its own, and keeps the old one otherwise."""
    model = Toy(1.0)
    model.head = torch.nn.Module()
    model.head.weight = model.embed.weight
    updater.update(model)
    assert engine.weights["head.weight"] == engine.weights["embed.weight"] == raw(model.embed.weight)


def test_a_tensor_larger_than_a_bucket_is_cut(engine: VllmLike, server: Server) -> None:
    model = Toy(1.0)
    model.norm.weight = torch.nn.Parameter(torch.randn(1000))
    with updater_over(server, backend(), capacity=512) as updater:
        report = updater.update(model)
        assert report.buckets > 8
        assert engine.weights == model.bytes()


def test_without_integrity_no_digest_is_sent(engine: VllmLike, server: Server) -> None:
    with updater_over(server, backend(), integrity="off") as updater:
        report = updater.update(Toy(1.0))
    assert all(i["digest"] is None for i in puts(server))
    assert report.engines[0].verified == "version"


def test_the_group_is_joined_by_every_worker(engine: VllmLike, server: Server) -> None:
    with updater_over(server, backend(), "nccl", capacity=300) as updater:
        for value in (1.0, 2.0):
            updater.update(Toy(value))
            assert engine.weights == Toy(value).bytes()
        info = server.last("/init_weight_transfer_engine").body["init_info"]
        assert pieces(info, "transport", "rank_offset", "world_size", "backend") == {
            "transport": "nccl",
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        }
        assert all(i["slot"] is None for i in puts(server))
        assert steps(server).count("/init_weight_transfer_engine") == 1
    assert steps(server)[-1] == "/shutdown_weight_transfer_engine"


def test_outgrowing_the_buffer_starts_a_new_generation(engine: VllmLike, server: Server) -> None:
    with updater_over(server, backend(), "nccl", capacity=1024) as updater:
        model = Toy(1.0)
        updater.update(model)
        model.norm.weight = torch.nn.Parameter(torch.randn(400))
        updater.update(model)
        assert engine.weights == model.bytes()
        infos = [a.body["init_info"] for a in server.asked if a.path == "/init_weight_transfer_engine"]
        assert infos[0]["slot_bytes"] < infos[1]["slot_bytes"]
        assert infos[0]["group_name"] != infos[1]["group_name"]


def test_disk_requests(engine: VllmLike, server: Server, tmp_path: Path) -> None:
    with updater_over(server, backend(), "disk", path=tmp_path) as updater:
        updater.update(Toy(1.0), "v1")
    assert steps(server) == ["/pause", "/collective_rpc", "/update_weight_version", "/resume"]
    assert server.last("/collective_rpc").body == {
        "method": "reload_weights",
        "kwargs": {"weights_path": str(tmp_path / "v1")},
    }
    assert engine.weights == Toy(1.0).bytes()


# -- answers that say no --------------------------------------------------------------------------------------------


def test_what_arrives_changed_fails_the_update(engine: VllmLike, updater: WeightUpdater, server: Server) -> None:
    """200 and success with nothing transferred: only a digest tells (lightseekorg/tokenspeed#1373)."""

    def garbled(asked: Asked) -> Answer:
        if asked.body["update_info"]["seq"] == 2:
            asked.body["update_info"]["digest"] = "0" * 16
        return engine.update(asked)

    server.answers["/update_weights"] = garbled
    with pytest.raises(UpdateFailed, match="bucket 2 arrived changed"):
        updater.update(Toy(1.0))
    assert engine.paused
    assert not engine.active
    server.answers["/update_weights"] = engine.update
    updater.update(Toy(2.0))
    assert engine.weights == Toy(2.0).bytes()


def test_an_error_of_a_bucket_has_ended_the_session_already(
    engine: VllmLike, updater: WeightUpdater, server: Server
) -> None:
    calls = iter(range(100))

    def third_fails(asked: Asked) -> Answer:
        if next(calls) == 2:
            engine.active = False
            return no("There is no module or parameter named x")
        return engine.update(asked)

    server.answers["/update_weights"] = third_fails
    with pytest.raises(UpdateFailed, match="no module or parameter named x"):
        updater.update(Toy(1.0))
    assert steps(server)[-4:] == ["/start_weight_update", *["/update_weights"] * 3]
    start = len(server.asked)
    updater.update(Toy(2.0))
    assert steps(server, start) == ["/init_weight_transfer_engine", *SEQUENCE]
    assert engine.weights == Toy(2.0).bytes()


def test_an_open_session_is_closed_without_finishing_it(
    engine: VllmLike, updater: WeightUpdater, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finishing a half-sent update makes it final; a refused bucket only closes the session."""

    def fail(run: Any) -> None:
        raise EngineError(server.url, "prepare", "the trainer changed its mind")

    monkeypatch.setattr(updater._known[0], "prepare", fail)
    with pytest.raises(UpdateFailed, match="changed its mind"):
        updater.update(Toy(1.0))
    assert puts(server)[-1]["seq"] == ABORT_SEQ
    assert "/finish_weight_update" not in steps(server)
    assert not engine.active
    assert engine.paused
    assert engine.weights == {}


def test_a_session_that_a_dead_trainer_left_open_is_closed_first(
    engine: VllmLike, updater: WeightUpdater, server: Server
) -> None:
    engine.paused = engine.active = True
    updater.update(Toy(1.0))
    assert steps(server)[2:5] == ["/start_weight_update", "/update_weights", "/start_weight_update"]
    assert puts(server)[0]["seq"] == ABORT_SEQ
    assert engine.weights == Toy(1.0).bytes()


def test_an_incomplete_update_cannot_be_finished(engine: VllmLike, updater: WeightUpdater, server: Server) -> None:
    """Completeness is judged per update, not per call (sgl-project/sglang#9663)."""
    server.answers["/update_weights"] = lambda a: (
        Answer(200, {"message": "Weights updated"}) if a.body["update_info"]["seq"] == BUCKETS - 1 else engine.update(a)
    )
    with pytest.raises(UpdateFailed, match=f"incomplete: {BUCKETS - 1} of {BUCKETS} buckets"):
        updater.update(Toy(1.0))
    assert engine.weights == {}
    assert engine.paused


def test_a_pause_that_did_not_happen_is_noticed_and_undone(
    engine: VllmLike, updater: WeightUpdater, server: Server
) -> None:
    server.answers["/is_paused"] = Answer(200, {"is_paused": False})
    with pytest.raises(UpdateFailed, match="/is_paused says false"):
        updater.update(Toy(1.0))
    assert steps(server)[-1] == "/resume"
    assert updater.tainted == {}


@pytest.mark.parametrize("info", [{"weight_version": "other"}, {}, {"model": "v1"}], ids=str)
def test_a_version_that_is_not_the_committed_one_stops(
    engine: VllmLike, updater: WeightUpdater, server: Server, info: dict[str, Any]
) -> None:
    server.answers["/weight_info"] = Answer(200, info)
    with pytest.raises(UpdateFailed, match="weight_version is .*, 'v1' was committed"):
        updater.update(Toy(1.0), "v1")
    assert engine.paused


def test_a_500_then_503_is_noticed_before_the_next_update(
    engine: VllmLike, updater: WeightUpdater, server: Server
) -> None:
    """One bad request kills the scheduler, and then everyone gets 503 (lightseekorg/tokenspeed#1479)."""
    server.answers["/update_weights"] = no("EngineCore died")
    with pytest.raises(UpdateFailed, match="EngineCore died"):
        updater.update(Toy(1.0))
    server.answers["/health"] = Answer(503)
    start = len(server.asked)
    with pytest.raises(EngineError, match="/health answered 503"):
        updater.update(Toy(2.0))
    assert steps(server, start) == []


# -- not started the way it must be -----------------------------------------------------------------------------------

HINTS = {
    "no dev mode": (Answer(404, {"detail": "Not Found"}), "VLLM_SERVER_DEV_MODE=1"),
    "no transfer": (no("Weight transfer not configured"), "--weight-transfer-config"),
    "another backend": (no("Invalid init_info for NCCL: unexpected keyword 'transport'"), "--weight-transfer-config"),
    "pickles refused": (
        no("Refusing to deserialize without VLLM_ALLOW_INSECURE_SERIALIZATION"),
        "VLLM_ALLOW_INSECURE_SERIALIZATION=1",
    ),
}


@pytest.mark.parametrize("answer, hint", HINTS.values(), ids=list(HINTS))
def test_what_to_do_is_part_of_the_error(
    engine: VllmLike, updater: WeightUpdater, server: Server, answer: Answer, hint: str
) -> None:
    """An engine that needs a flag answers with a wall of text, or nothing (vllm-project/vllm#35928)."""
    server.answers["/init_weight_transfer_engine"] = answer
    with pytest.raises(EngineError, match=f"start vLLM with .*{hint}"):
        updater.update(Toy(1.0))
    assert "/pause" not in steps(server)


def test_a_wrong_number_of_workers_is_refused(server: Server) -> None:
    VllmLike(server, world=4)
    with (
        updater_over(server, backend()) as updater,
        pytest.raises(CompositionError, match="has 4 workers, engines.tp says 1"),
    ):
        updater.update(Toy(1.0))
    assert steps(server) == []


def test_a_restart_is_noticed_by_its_version_and_the_engine_initialised_again(
    engine: VllmLike, updater: WeightUpdater, server: Server
) -> None:
    updater.update(Toy(1.0))
    engine.restart()
    start = len(server.asked)
    updater.update(Toy(2.0))
    assert steps(server, start) == ["/init_weight_transfer_engine", *SEQUENCE]
    assert puts(server, start)[0]["plan"] is not None
    assert engine.weights == Toy(2.0).bytes()


@pytest.mark.parametrize(
    "settings, words", [({"pause": "stop"}, r"backend\.pause"), ({"transfer": "fax"}, r"backend\.transfer")]
)
def test_settings_are_checked(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Vllm(**settings)


def test_vllms_own_wires_need_a_gpu(server: Server) -> None:
    with pytest.raises(CompositionError, match=r"GPU only; use backend\.transfer=plugin"):
        updater_over(server, backend(transfer="native"))
