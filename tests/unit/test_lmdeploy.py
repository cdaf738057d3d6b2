"""The LMDeploy adapter against a scripted server: the exact requests, and what it makes of each answer."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.adapters import updater_over
from support.chains import raw
from support.fakes import Toy
from support.httpd import Answer, Asked, Server
from support.httpd import server as server

from pipelines.updater import WeightUpdater
from stages.backends.lmdeploy import Lmdeploy
from stages.errors import CompositionError, ConfigError, UpdateFailed
from stages.transport.group import BroadcastGroup
from stages.transport.messages import GroupInit

OK = Answer(200, {"success": True, "message": "Succeeded"})


class Engine:
    """LMDeploy 0.18 as far as updates go: two sleeping tags, a cached slot, one dtype per bucket."""

    def __init__(self, server: Server, tp: int = 1) -> None:
        self.server, self.tp = server, tp
        self.sleeping: set[str] = set()
        self.finished = 0
        self.weights: dict[str, bytes] = {}
        self.dtypes: list[set[torch.dtype]] = []  # of each bucket
        self.groups: dict[str, BroadcastGroup] = {}
        self.slot: torch.Tensor | None = None
        self.routes: dict[str, Any] = {
            "/health": Answer(200),
            "/v1/models": Answer(200, {"data": [{"id": "/nowhere"}]}),
            "/is_sleeping": lambda a: Answer(200, {"is_sleeping": bool(self.sleeping)}),
            "/sleep": self.sleep,
            "/wakeup": self.wakeup,
            "/update_weights": self.update,
            "/init_weights_update_group": self.join,
            "/destroy_weights_update_group": self.leave,
            "/update_weights_from_distributed": self.distributed,
        }
        server.answers = dict(self.routes)

    def sleep(self, asked: Asked) -> Answer:
        assert asked.headers["content-type"] == "application/json"
        self.sleeping, self.slot = {"weights", "kv_cache"}, None
        return Answer(200)

    def wakeup(self, asked: Asked) -> Answer:
        self.sleeping -= set(asked.query.get("tags", ["weights", "kv_cache"]))
        return Answer(200)

    def update(self, asked: Asked) -> Answer:
        assert self.sleeping == {"kv_cache"}, "weights must be awake and the KV cache asleep"
        payloads = asked.body["serialized_named_tensors"]
        assert len(payloads) == self.tp
        assert asked.body["load_format"] == "flattened_bucket"
        for payload in payloads:
            data = pickle.loads(base64.b64decode(payload))
            if "flattened_tensor" in data:
                rebuild, args = data["flattened_tensor"]
                self.slot = rebuild(*args)
            if data["metadata"]:
                self.decode(data["metadata"])
        if asked.body["finished"]:
            self.finished += 1
            self.slot = None
        return Answer(200, b"null", kind="application/json")

    def decode(self, metadata: list[Any]) -> None:
        assert self.slot is not None, "metadata without a tensor loads what is left of an earlier update"
        self.dtypes.append({m.dtype for m in metadata})
        for m in metadata:
            assert self.slot.dtype == m.dtype
            assert m.numel == m.end_idx - m.start_idx == torch.Size(m.shape).numel()
            self.weights[m.name] = raw(self.slot[m.start_idx : m.end_idx].reshape(m.shape))

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
        self.groups.pop(asked.body["group_name"]).destroy()
        return OK

    def distributed(self, asked: Asked) -> Answer:
        body, offset = asked.body, 0
        if body["group_name"] not in self.groups:
            return no(f"group '{body['group_name']}' not initialized. Call init_weights_update_group first.")
        if body["names"]:
            (dtype,) = {getattr(torch, d) for d in body["dtypes"]}
            counts = [torch.Size(s).numel() for s in body["shapes"]]
            flat = torch.zeros(sum(counts), dtype=dtype)
            self.groups[body["group_name"]].broadcast(flat)
            for name, shape, count in zip(body["names"], body["shapes"], counts, strict=True):
                self.weights[name] = raw(flat[offset : offset + count].reshape(shape))
                offset += count
        self.finished += body["finished"]
        return OK


def no(words: str, status: int = 400) -> Answer:
    return Answer(status, {"success": False, "message": words})


@pytest.fixture
def engine(server: Server) -> Engine:
    return Engine(server)


def backend(level: int = 2) -> dict[str, Any]:
    return {"_target_": "stages.backends.lmdeploy.Lmdeploy", "sleep_level": level}


@pytest.fixture
def updater(engine: Engine) -> Iterator[WeightUpdater]:
    with updater_over(engine.server, backend(), wire="one dtype") as made:
        yield made


def mixed(value: float) -> Toy:
    """Two dtypes."""
    model = Toy(value)
    for module in (model.q_proj, model.norm):
        module.weight = torch.nn.Parameter(torch.full_like(module.weight, value).to(torch.bfloat16))
    return model


def steps(server: Server, start: int = 0) -> list[str]:
    """What changes the engine: with its tags, level, or finish marker."""
    result = []
    for asked in server.asked[start:]:
        if asked.path in ("/sleep", "/wakeup"):
            result.append(f"{asked.path} {asked.query.get('level') or asked.query.get('tags')}")
        elif asked.path == "/update_weights":
            result.append(f"{asked.path} {asked.body['finished']}")
    return result


SEQUENCE = [
    "/sleep ['2']",
    "/wakeup ['weights']",
    *["/update_weights False"] * 3,
    "/update_weights True",
    "/wakeup ['kv_cache']",
]

# -- the right way --------------------------------------------------------------------------------------------------


def test_the_requests_of_an_update_in_order(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    report = updater.update(Toy(1.0))
    assert steps(server) == SEQUENCE
    assert engine.weights == Toy(1.0).bytes()
    assert engine.sleeping == set()
    assert report.engines[0].verified == "acknowledged"
    start = len(server.asked)
    updater.update(Toy(2.0))
    assert steps(server, start) == SEQUENCE
    assert engine.weights == Toy(2.0).bytes()


def test_answers_that_say_nothing_are_checked(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    """/sleep and /wakeup answer 200 whatever happened."""
    updater.update(Toy(1.0))
    paths = [a.path for a in server.asked]
    for index, path in enumerate(paths):
        if path in ("/sleep", "/wakeup"):
            assert paths[index + 1] == "/is_sleeping"


def test_the_finish_marker_comes_exactly_once(engine: Engine, updater: WeightUpdater) -> None:
    """Post-load work that runs twice permutes the weights again (sgl-project/sglang#28963)."""
    for count in (1, 2, 3):
        updater.update(mixed(float(count)))
        assert engine.finished == count


def test_one_dtype_per_bucket_and_a_handle_with_each(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    """The engine keeps one slot: a bucket of another dtype without a handle is read from the wrong memory."""
    updater.update(mixed(1.25))
    assert engine.weights == mixed(1.25).bytes()
    assert {len(d) for d in engine.dtypes} == {1}
    assert len({next(iter(d)) for d in engine.dtypes}) == 2
    for asked in server.asked:
        if asked.path == "/update_weights":
            data = pickle.loads(base64.b64decode(asked.body["serialized_named_tensors"][0]))
            assert ("flattened_tensor" in data) == (not asked.body["finished"])


def test_the_first_bucket_after_a_failed_update_carries_its_handle_again(
    engine: Engine, updater: WeightUpdater, server: Server
) -> None:
    """After an aborted update the engine still holds the old slot, and reads it without a word."""
    server.answers["/update_weights"] = [engine.update, Answer(500, "Internal Server Error"), engine.update]
    with pytest.raises(UpdateFailed):
        updater.update(Toy(1.0))
    engine.slot = torch.full((1000,), 9.0)  # stale
    updater.update(Toy(2.0))
    assert engine.weights == Toy(2.0).bytes()


def test_sleep_level_1_keeps_a_copy(engine: Engine, server: Server) -> None:
    with updater_over(server, backend(1), wire="one dtype") as updater:
        updater.update(Toy(1.0))
    assert steps(server)[0] == "/sleep ['1']"


def test_every_rank_gets_a_payload(server: Server) -> None:
    engine = Engine(server, tp=2)
    with updater_over(server, backend(), tp=2, wire="one dtype") as updater:
        updater.update(Toy(1.0))
    assert all(len(a.body["serialized_named_tensors"]) == 2 for a in server.asked if a.path == "/update_weights")
    assert engine.weights == Toy(1.0).bytes()


def test_distributed_requests(engine: Engine, server: Server) -> None:
    with updater_over(server, backend(), "nccl", wire="one dtype") as updater:
        for count in (1, 2):
            updater.update(mixed(float(count)))
            assert engine.weights == mixed(float(count)).bytes()
            assert engine.finished == count
        joins = [a.body for a in server.asked if a.path == "/init_weights_update_group"]
        assert len(joins) == 1
        assert (joins[0]["rank_offset"], joins[0]["world_size"], joins[0]["backend"]) == (1, 2, "gloo")
        last = server.last("/update_weights_from_distributed").body
        assert last == {"names": [], "dtypes": [], "shapes": [], "group_name": joins[0]["group_name"], "finished": True}
    assert engine.groups == {}


def test_one_bearer_token_on_every_route(engine: Engine, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", "key")
    monkeypatch.delenv("WEIGHTSTREAM_ADMIN_KEY", raising=False)
    with updater_over(server, backend(), wire="one dtype") as updater:
        updater.update(Toy(1.0))
    assert {a.headers.get("authorization") for a in server.asked} == {"Bearer key"}


# -- answers that say no --------------------------------------------------------------------------------------------


def test_an_error_without_words_says_where_to_look(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    server.answers["/update_weights"] = [engine.update, Answer(500, "Internal Server Error"), engine.update]
    with pytest.raises(UpdateFailed, match=r"engine's log.*--distributed-executor-backend ray.*unknown tensor name"):
        updater.update(Toy(1.0))
    assert engine.sleeping == {"kv_cache"}
    assert engine.finished == 0
    assert updater.tainted


def test_a_failed_engine_stays_asleep_and_the_next_update_starts_over(
    engine: Engine, updater: WeightUpdater, server: Server
) -> None:
    """After a level-2 sleep it would generate from whatever the memory holds (huggingface/trl#5312)."""
    server.answers["/update_weights"] = [Answer(500), engine.update]
    with pytest.raises(UpdateFailed):
        updater.update(Toy(1.0))
    start = len(server.asked)
    updater.update(Toy(2.0))
    assert steps(server, start) == SEQUENCE[1:]  # it is asleep already
    assert engine.sleeping == set()
    assert engine.weights == Toy(2.0).bytes()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    "answer, words", [(Answer(drop=True), "dropped"), (Answer(500, "Internal Server Error"), "answered 500")]
)
def test_a_sleep_that_may_have_happened_is_taken_for_a_sleep(
    server: Server, level: int, answer: Answer, words: str
) -> None:
    engine = Engine(server)

    def sleep(asked: Asked) -> Answer:
        engine.sleep(asked)
        return answer

    with updater_over(server, backend(level), wire="one dtype") as updater:
        server.answers["/sleep"] = sleep
        with pytest.raises(UpdateFailed, match=words):
            updater.update(Toy(1.0))
        assert bool(updater.tainted) == (level == 2)  # at level 1 its weights are there, and it is woken again
        assert bool(engine.sleeping) == (level == 2)
        server.answers["/sleep"] = engine.sleep
        updater.update(Toy(2.0))
        assert engine.weights == Toy(2.0).bytes()
        assert updater.tainted == {}


def test_a_sleep_that_is_refused_leaves_it_awake(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    server.answers["/sleep"] = Answer(401, {"message": "Unauthorized."})
    with pytest.raises(UpdateFailed, match="Unauthorized"):
        updater.update(Toy(1.0))
    assert updater.tainted == {}
    assert updater.report.updates[-1].outcome == "aborted"


def test_a_sleep_that_did_not_happen_is_noticed(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    server.answers["/sleep"] = Answer(200)
    with pytest.raises(UpdateFailed, match="/sleep answered 200 but /is_sleeping says false"):
        updater.update(Toy(1.0))
    assert "/update_weights" not in [a.path for a in server.asked]


def test_a_cache_that_woke_up_too_early_is_noticed(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    def all_awake(asked: Asked) -> Answer:
        engine.sleeping.clear()
        return Answer(200)

    server.answers["/wakeup"] = all_awake
    with pytest.raises(UpdateFailed, match="must stay asleep during an update"):
        updater.update(Toy(1.0))


def test_a_wakeup_that_did_not_happen_is_noticed(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    server.answers["/wakeup"] = lambda a: engine.wakeup(a) if a.query["tags"] == ["weights"] else Answer(200)
    with pytest.raises(UpdateFailed, match="/wakeup answered 200 but /is_sleeping still says true"):
        updater.update(Toy(1.0))


def test_a_distributed_refusal_is_heard_while_the_broadcast_waits(engine: Engine, server: Server) -> None:
    with updater_over(server, backend(), "nccl", wire="one dtype") as updater:
        updater.update(Toy(1.0))
        known = dict(engine.groups)

        def refuse(asked: Asked) -> Answer:
            return no("Failed to update parameter online: 'x'.") if asked.body["names"] else engine.distributed(asked)

        server.answers["/update_weights_from_distributed"] = refuse
        with pytest.raises(UpdateFailed, match="Failed to update parameter online"):
            updater.update(Toy(2.0))
        server.answers["/update_weights_from_distributed"] = engine.distributed
        updater.update(Toy(3.0))
        assert engine.weights == Toy(3.0).bytes()
        assert not set(known) & set(engine.groups)


# -- what is refused before anything is touched ---------------------------------------------------------------------


def test_turbomind_is_refused(engine: Engine, updater: WeightUpdater, server: Server) -> None:
    server.answers["/update_weights_from_distributed"] = Answer(501, {"message": "not supported"})
    with pytest.raises(CompositionError, match="TurboMind"):
        updater.update(Toy(1.0))
    assert steps(server) == []


def test_disk_is_refused_when_composed(server: Server, tmp_path: Any) -> None:
    with pytest.raises(CompositionError, match=r"no route that loads a checkpoint folder.*transport=ipc \| nccl"):
        updater_over(server, backend(), "disk", path=tmp_path)


def test_a_restart_is_noticed_by_its_lost_group(engine: Engine, server: Server) -> None:
    with updater_over(server, backend(), "nccl", wire="one dtype") as updater:
        updater.update(Toy(1.0))
        for group in engine.groups.values():
            group.destroy()
        engine.groups.clear()
        updater.update(Toy(2.0))
        assert engine.weights == Toy(2.0).bytes()
        names = [a.body["group_name"] for a in server.asked if a.path == "/init_weights_update_group"]
        assert len(set(names)) == 2


def test_an_engine_that_restarted_awake_while_it_should_sleep_is_put_to_sleep_again(
    engine: Engine, updater: WeightUpdater, server: Server
) -> None:
    server.answers["/update_weights"] = [Answer(500), engine.update]
    with pytest.raises(UpdateFailed):
        updater.update(Toy(1.0))
    engine.sleeping = set()  # a new process
    start = len(server.asked)
    updater.update(Toy(2.0))
    assert steps(server, start) == SEQUENCE


def test_sleep_levels_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"backend\.sleep_level: 3 is not one of 1, 2"):
        Lmdeploy(3)
