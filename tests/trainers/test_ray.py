"""Ray, for real: a cluster of three nodes on this machine, with actors as trainer ranks and as engines."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelines import config, ray_launcher
from pipelines.trainers.toy import ToyTrainer
from pipelines.updater import WeightUpdater
from stages.errors import ConfigError, EngineError, EngineUnreachable, UpdateFailed, WaitTimeout, WeightstreamError
from tests.config.command import Command, run

SMALL = ("trainer.layers=1", "trainer.hidden_size=64", "updates=2", "gather.batch=16KiB", "bucket.capacity=64KiB")


@pytest.fixture(scope="module")
def ray(ray_cluster: str) -> Iterator[Any]:
    import ray

    ray.init(address=ray_cluster, log_to_driver=False, namespace="tests")
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def trainer() -> ToyTrainer:
    return ToyTrainer(layers=1, hidden_size=64)


def start_engine(ray: Any, trainer: ToyTrainer, backend: str, **options: Any) -> Any:
    from pipelines.engine.actor import EngineActor

    actor = ray.remote(EngineActor).options(max_concurrency=16, num_cpus=0.1, **options)
    return actor.remote(model=str(trainer.reference), backend=backend)


def launched(*overrides: str) -> tuple[int, list[dict[str, Any]]]:
    shown: list[dict[str, Any]] = []
    settings = config.load(["launcher=ray", "launcher.cpus=0.5", *SMALL, *overrides])
    return ray_launcher.run(settings, shown.append), shown


def test_the_launcher_places_ranks_and_engines_over_the_nodes(ray: Any) -> None:
    how = (
        "launcher.ranks=2",
        "launcher.strategy=SPREAD",
        "engines.count=2",
        "backend=sglang",
        "transport=nccl",
        "transport.port=0",
    )
    code, (report,) = launched(*how)
    assert code == 0
    assert [e["verified"] for update in report["updates"] for e in update["engines"]] == ["digest"] * 4
    nodes = {tuple(sorted(set(g["bundles_to_node_id"].values()))) for g in ray.util.placement_group_table().values()}
    assert max(len(n) for n in nodes) == 3, "four bundles over three nodes"
    assert all(g["state"] == "REMOVED" for g in ray.util.placement_group_table().values())


def test_a_cluster_without_room_says_what_it_has(ray: Any) -> None:
    with pytest.raises(WaitTimeout, match=r"no room for \[\{'CPU': 100"):
        launched("launcher.cpus=100", "launcher.wait=0.5")


def test_what_the_ranks_refuse_is_refused_here(ray: Any) -> None:
    with pytest.raises(ConfigError, match="multiple of 64"):
        launched("launcher.ranks=2", "trainer.hidden_size=100")


def test_a_rank_that_dies_ends_the_run_with_its_cause(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is killed as soon as all work."""

    def wait(references: list[Any], **options: Any) -> Any:
        ranks = monkeypatched.ranks
        if len(references) == 2 and ranks:
            ray.kill(ranks.pop()[1])
        return original(references, **options)

    class monkeypatched:  # noqa: N801
        ranks: list[Any] = []

    begin = ray_launcher._Ranks._start

    def started(self: Any) -> None:
        begin(self)
        monkeypatched.ranks.append(self._actors)

    original = ray.wait
    monkeypatch.setattr(ray_launcher._Ranks, "_start", started)
    monkeypatch.setattr(ray, "wait", wait)
    began = time.monotonic()
    with pytest.raises(WeightstreamError, match=r"trainer rank 1: the actor is dead: .*killed by `ray.kill`"):
        launched("launcher.ranks=2", "updates=100000", "session.timeouts.agree=5")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(("backend", "transport"), [("lmdeploy", "ipc"), ("vllm", "nccl"), ("sglang", "disk")])
def test_engines_that_are_actors_take_updates(
    ray: Any, trainer: ToyTrainer, tmp_path: Path, backend: str, transport: str
) -> None:
    named = start_engine(ray, trainer, backend, name=f"{backend}-0")
    handle = start_engine(ray, trainer, backend)
    how = [
        "engines=ray",
        "engines.proof=digest",
        f"engines.actors=[tests/{backend}-0]",
        f"backend={backend}",
        f"transport={transport}",
    ]
    how += {"nccl": ["transport.port=0"], "disk": [f"transport.path={tmp_path}"], "ipc": []}[transport]
    with WeightUpdater.from_config(how, reference=trainer.reference) as updater:
        updater.add_engines([handle])
        for _ in range(2):
            trainer.step()
            report = updater.update(trainer.source)
            assert [(e.outcome, e.verified) for e in report.engines] == [("committed", "digest")] * 2
        tokens = [updater.generate(engine, [1, 2, 3], 4) for engine in (f"ray://tests/{backend}-0", handle)]
        assert tokens[0] == tokens[1]
        updater.remove_engines([handle])
        assert updater.engines == (f"ray://tests/{backend}-0",)
    ray.kill(named)
    ray.kill(handle)


def test_a_dead_actor_fails_the_update_with_its_cause_and_a_new_one_of_its_name_is_found(
    ray: Any, trainer: ToyTrainer
) -> None:
    engine = start_engine(ray, trainer, "sglang", name="mortal")
    how = ["backend=sglang", "engines=ray", "engines.actors=[mortal]"]
    with WeightUpdater.from_config(how, reference=trainer.reference) as updater:
        updater.update(trainer.source)
        ray.kill(engine)
        began = time.monotonic()
        with pytest.raises(
            EngineUnreachable, match=r"ray://mortal: probe: .*the actor is dead: .*killed by `ray.kill`"
        ):
            updater.update(trainer.source)
        assert time.monotonic() - began < 30
        again = start_engine(ray, trainer, "sglang", name="mortal")
        assert updater.update(trainer.source).outcome == "committed"
        ray.kill(again)


def test_an_actor_that_dies_in_the_middle_taints_itself_with_its_cause(ray: Any, trainer: ToyTrainer) -> None:
    engine = start_engine(ray, trainer, "sglang")
    how = ["backend=sglang", "engines=ray", "bucket.capacity=16KiB", "prefetch.depth=1"]
    with WeightUpdater.from_config(how, reference=trainer.reference) as updater:
        updater.add_engines([engine])
        updater.on_progress = lambda done, total: ray.kill(engine)
        with pytest.raises(UpdateFailed, match="put: .*the actor is dead: .*killed by `ray.kill`"):
            updater.update(trainer.source)
        assert list(updater.tainted)


def test_an_actor_may_have_a_method_for_each_route(ray: Any, trainer: ToyTrainer) -> None:
    from pipelines.engine.actor import EngineActor

    class Lmdeploy(EngineActor):
        """As somebody's own engine: no `request`, a method for each route; errors are raised."""

        def _do(self, method: str, path: str, **fields: Any) -> Any:
            status, answer = EngineActor.request(self, method, path, fields, fields)
            if status >= 400:
                raise Refused(status, answer)
            return answer

        request = None  # type: ignore[assignment]

        def health(self) -> Any:
            return self._do("GET", "/health")

        def v1_models(self) -> Any:
            return self._do("GET", "/v1/models")

        def is_sleeping(self) -> Any:
            return self._do("GET", "/is_sleeping")

        def sleep(self, level: int) -> Any:
            return self._do("POST", "/sleep", level=level)

        def wakeup(self, tags: list[str] | str) -> Any:
            return self._do("POST", "/wakeup", tags=tags)

        def update_weights(self, **fields: Any) -> Any:
            return self._do("POST", "/update_weights", **fields)

        def update_weights_from_distributed(self, **fields: Any) -> Any:
            return self._do("POST", "/update_weights_from_distributed", **fields)

    class Refused(Exception):
        def __init__(self, status: int, answer: Any) -> None:
            self.status = status
            super().__init__(status, answer)

    engine = ray.remote(Lmdeploy).options(max_concurrency=4, num_cpus=0.1)
    handle = engine.remote(model=str(trainer.reference), backend="lmdeploy")
    with WeightUpdater.from_config(["engines=ray"], reference=trainer.reference) as updater:
        updater.add_engines([handle])
        (part,) = updater.update(trainer.source).engines
        assert (part.outcome, part.verified) == ("committed", "acknowledged")
        with pytest.raises(EngineError, match="no method 'generate', and no method 'request'"):
            updater.generate(handle, [1, 2], 2)
        with pytest.raises(EngineError) as refused:
            updater._find(handle).admin.post("/update_weights", "put", 10.0, {"no": "such field"})
        assert refused.value.status is not None
        assert 400 <= refused.value.status < 600
    ray.kill(handle)


def test_an_actor_that_does_not_answer_is_given_up(ray: Any) -> None:
    class Silent:
        def request(self, method: str, path: str, body: Any, query: Any) -> Any:
            time.sleep(60)

    handle = ray.remote(Silent).options(num_cpus=0.1).remote()
    with WeightUpdater.from_config(["engines=ray", "session.timeouts.control=1"]) as updater:
        updater.add_engines([handle])
        with pytest.raises(EngineUnreachable, match="no answer within 1.0 s"):
            updater.update(ToyTrainer(layers=1, hidden_size=64).source)
    ray.kill(handle)


def test_an_actor_that_does_not_exist_is_said_so(ray: Any, trainer: ToyTrainer) -> None:
    with (
        WeightUpdater.from_config(["engines=ray", "engines.actors=[nobody]"]) as updater,
        pytest.raises(EngineUnreachable, match="there is no such actor.*nobody"),
    ):
        updater.update(trainer.source)


def test_the_command_line_runs_on_a_cluster_and_ctrl_c_leaves_it_empty(
    ray: Any, ray_cluster: str, tmp_path: Path
) -> None:
    how = ("launcher=ray", f"launcher.address={ray_cluster}", "launcher.ranks=2", "launcher.cpus=0.5", *SMALL)
    command = run(tmp_path, *how)
    assert command.process.returncode == 0, command.err
    (path,) = tmp_path.rglob("report.json")
    assert json.loads(path.read_text())["outcome"] == "committed"
    endless = Command(tmp_path, *how, "updates=100000")
    deadline = time.monotonic() + 60
    while not working(ray) and time.monotonic() < deadline:
        time.sleep(0.1)
    endless.interrupt(signal.SIGINT)
    assert endless.wait(60.0) == 130
    assert all(g["state"] == "REMOVED" for g in ray.util.placement_group_table().values())
    assert not endless.left_behind()


def working(ray: Any) -> bool:
    return any(g["state"] == "CREATED" for g in ray.util.placement_group_table().values())
