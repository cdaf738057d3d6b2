"""launcher=ray: the trainer ranks and the embedded engines of a run as actors in one placement group.

this process                              the cluster
compose, resolve, check the config
place actors, send them the settings  ->  engines load; rank 0 holds the store, ranks meet there
wait; write and show the report       <-  rank 0's report, and how each rank ended
"""

from __future__ import annotations

import copy
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines import torchrun
from stages.backends.actor import address_of, brief
from stages.errors import ConfigError, RemoteRankError, UpdateFailed, WaitTimeout, WeightstreamError

_END_SECONDS = 15.0
_ENGINE_THREADS = 16


@dataclass
class Ended:
    """How a rank ended. `unexpected`: its error is none of ours, the text is a traceback. `heard`: it is another rank's."""

    code: int = 1
    error: str = ""
    refused: bool = False
    unexpected: bool = False
    heard: bool = False
    report: dict[str, Any] | None = field(default=None, repr=False)


class Rank:
    """The actor of one trainer rank. Needs two threads: one works, one hears `stop`."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._store: Any = None

    def host(self, size: int) -> tuple[str, int]:
        """As rank 0: hold the store of `size` ranks; where it is."""
        import ray

        from pipelines import world

        address = ray.util.get_node_ip_address()
        self._store = world.make_store(address, size)
        return address, self._store.port

    def work(self, settings: dict[str, Any], rank: int, size: int, address: str, port: int) -> Ended:
        """Make all updates. Never raises; the actor's death is another matter."""
        from pipelines import world
        from pipelines.main import make_updates

        ended = Ended()

        def keep(report: dict[str, Any]) -> None:
            ended.report = report

        try:
            with world.joined(rank, size, address, port, self._store):
                ended.code = make_updates(settings, keep if rank == 0 else None, self._stop.is_set)
        except WeightstreamError as error:
            cause = error.__cause__ if isinstance(error, UpdateFailed) else error
            ended.error, ended.refused = str(error), isinstance(error, ConfigError)
            ended.heard = isinstance(cause, RemoteRankError)
        except KeyboardInterrupt:
            ended.error = "stopped"
        except Exception:
            ended.error, ended.unexpected = traceback.format_exc(), True
        return ended

    def stop(self) -> None:
        """End between two updates."""
        self._stop.set()


def run(settings: Mapping[str, Any], show: Callable[[dict[str, Any]], None]) -> int:
    """Run `settings` on a Ray cluster, give the report to `show`, and leave nothing running there.

    Returns 0 only if every update was committed and verified. Raises what rank 0 raised, in its words; a rank that died is named
    with Ray's word for the cause.
    """
    if torchrun.ranks() > 1:
        raise ConfigError(
            "launcher=ray starts ranks itself, and torchrun has started some\n  start it without torchrun"
        )
    with _cluster(settings["launcher"]) as ray, _Ranks(ray, settings) as ranks:
        ended, dead = ranks.work()
    first = ended.get(0, Ended())
    if first.report is not None:
        show(first.report)
    if dead:
        raise WeightstreamError("; ".join(f"trainer rank {r}: the actor is dead: {why}" for r, why in dead.items()))
    failed = sorted((e.heard, rank) for rank, e in ended.items() if e.error)
    if failed:  # a rank's own error before what others heard of it
        _, rank = failed[0]
        words = ended[rank].error if rank == 0 else f"trainer rank {rank} failed: {ended[rank].error}"
        raise ConfigError(words) if ended[rank].refused else WeightstreamError(words)
    return first.code


@contextmanager
def _cluster(launcher: Mapping[str, Any]) -> Iterator[Any]:
    """Ray, connected; disconnected again if it was not before."""
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "launcher=ray needs Ray, which is not installed\n  pip install 'weightstream[ray]'"
        ) from error
    if ray.is_initialized():
        yield ray
        return
    try:
        ray.init(address=launcher["address"], log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"launcher.address: no Ray cluster at {launcher['address'] or 'RAY_ADDRESS'}: {brief(error)}\n"
            "  start one with `ray start --head`, or leave the address out"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


class _Ranks:
    """The placement group and the actors of all ranks. Rank 0 starts the embedded engines, in the bundles that follow."""

    def __init__(self, ray: Any, settings: Mapping[str, Any]) -> None:
        self._ray = ray
        self._settings = copy.deepcopy(dict(settings))
        self._launcher = settings["launcher"]
        self._count = self._launcher["ranks"]
        self._actors: list[Any] = []
        self._pending: dict[Any, int] = {}
        self._group: Any = None

    def __enter__(self) -> _Ranks:
        try:
            self._place()
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def work(self) -> tuple[dict[int, Ended], dict[int, str]]:
        """How each rank ended, and of what each dead one died. Ranks that wait for a dead one are given time to notice."""
        ended: dict[int, Ended] = {}
        dead: dict[int, str] = {}
        deadline = float("inf")
        while self._pending and time.monotonic() < deadline:
            done, _ = self._ray.wait([*self._pending], timeout=0.5)
            for reference in done:
                rank = self._pending.pop(reference)
                try:
                    ended[rank] = self._ray.get(reference)
                except self._ray.exceptions.RayActorError as error:
                    dead[rank] = brief(error)
                    agree = self._settings["session"]["timeouts"]["agree"]
                    deadline = min(deadline, time.monotonic() + agree + _END_SECONDS)
        return ended, dead

    def _place(self) -> None:
        engines, wait = self._settings["engines"], self._launcher["wait"]
        rank = {"CPU": self._launcher["cpus"], "GPU": self._launcher["gpus"]}
        bundles = [rank] * self._count
        if engines["kind"] == "embedded":
            bundles += [engine_resources(self._settings)] * engines["count"]
        bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
        self._group = self._ray.util.placement_group(bundles, strategy=self._launcher["strategy"])
        if not self._group.wait(wait):
            raise WaitTimeout(
                f"the Ray cluster had no room for {bundles} ({self._launcher['strategy']}) within {wait} s (launcher.wait); "
                f"it has {self._ray.cluster_resources()}"
            )

    def _start(self) -> None:
        ray, size = self._ray, self._count
        for rank in range(size):
            options = placed(ray, self._group, rank) | {
                "num_cpus": self._launcher["cpus"],
                "num_gpus": self._launcher["gpus"],
                "max_concurrency": 2,
            }
            self._actors.append(ray.remote(Rank).options(**options).remote())
        try:
            address, port = ray.get(self._actors[0].host.remote(size), timeout=self._launcher["wait"])
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
            raise WeightstreamError(f"trainer rank 0: the actor did not start: {brief(error)}") from error
        transport = self._settings["transport"]
        if transport.get("address") in ("127.0.0.1", "localhost"):
            transport["address"] = address  # engines may be on another node
        for rank, actor in enumerate(self._actors):
            self._pending[actor.work.remote(self._settings, rank, size, address, port)] = rank

    def _end(self) -> None:
        ray = self._ray
        if self._pending:
            for actor in self._actors:
                actor.stop.remote()
            ray.wait([*self._pending], num_returns=len(self._pending), timeout=_END_SECONDS)
        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)


def placed(ray: Any, group: Any, bundle: int) -> dict[str, Any]:
    """Actor options that put it into this bundle."""
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=bundle
    )
    return {"scheduling_strategy": strategy}


def engine_resources(settings: Mapping[str, Any]) -> dict[str, float]:
    """What one embedded engine takes of a node."""
    engines = settings["engines"]
    cuda = str(engines["device"]).startswith("cuda")
    return {"CPU": settings["launcher"]["cpus"], "GPU": engines["tp"] if cuda else 0}


class EngineActors:
    """Starts embedded engines as actors: in the caller's placement group behind the ranks, if there is one."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._actors: list[Any] = []

    def start(self, model: Path, backend: str, count: int, tp: int, device: str, on_fatal: str) -> list[str]:
        """`count` engines of `tp` ranks; their addresses once all of them answer. Raises WeightstreamError when one does not."""
        import ray

        from pipelines.engine.actor import EngineActor

        group, launcher = ray.util.get_current_placement_group(), self._settings["launcher"]
        resources = engine_resources(self._settings)
        for index in range(count):
            options: dict[str, Any] = {"num_cpus": resources["CPU"], "num_gpus": resources["GPU"]}
            if group is not None:
                options |= placed(ray, group, launcher["ranks"] + index)
            actor = ray.remote(EngineActor).options(max_concurrency=_ENGINE_THREADS, **options)
            self._actors.append(
                actor.remote(model=str(model), backend=backend, tp=tp, device=device, on_fatal=on_fatal)
            )
        try:
            ray.get([actor.ready.remote() for actor in self._actors], timeout=launcher["wait"])
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
            raise WeightstreamError(f"an embedded engine did not start as an actor: {brief(error)}") from error
        return [address_of(actor) for actor in self._actors]

    def close(self) -> None:
        import ray

        actors, self._actors = self._actors, []
        for actor in actors:
            with suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
                ray.get(actor.close.remote(), timeout=_END_SECONDS)
            ray.kill(actor)
