"""vLLM's own trainer API over our chain: `WeightTransferTrainerFactory.trainer_init(...)`, then `send_weights()` every step.

    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from pipelines.vllm_trainer import WeightstreamTrainerInitInfo

    trainer = WeightTransferTrainerFactory.trainer_init(
        WeightstreamTrainerInitInfo(rank=0, transport="ipc"),
        client=HTTPVLLMWeightSyncClient("http://127.0.0.1:8000"),
        source=ModuleSource(model),
    )
    trainer.send_weights()

As with vLLM's own backends, pausing, resuming and flushing caches is the caller's part: a forward pass in between ends the
engine. `pipelines.WeightUpdater` does all of it. Importing this module registers the backend "weightstream". Seen in vLLM
0.32.0; 0.33 by its source.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from pipelines.executor import plan_chain, run_chain
from pipelines.vllm_plugin import BACKEND
from stages.backends.base import Keys
from stages.backends.vllm import Vllm, VllmEngine
from stages.barrier import Barrier
from stages.base import Stage
from stages.bucket import Bucket
from stages.comm import Comm
from stages.errors import ConfigError, EngineError, PlanMismatch
from stages.flow import Group, GroupSpec, TensorSpec
from stages.gather import GatherParams
from stages.gather.names import fusion_key
from stages.notify import NotifyEngines
from stages.prefetch import Prefetch
from stages.run import Run, Timeouts
from stages.transport.ipc import Ipc
from stages.transport.nccl import Nccl


@dataclass
class WeightstreamTrainerInitInfo(TrainerInitInfo):
    """`transport`: "ipc" or "nccl"; `tp`: all workers of the engine; `capacity` and `slots`: of the buckets.

    `address` and `port` (0: any free one) are this trainer's, as the engine reaches it, for nccl. `timeout` in seconds holds
    for one bucket and for forming the group.
    """

    backend: ClassVar[str] = BACKEND
    transport: str = "ipc"
    tp: int = 1
    capacity: int | str = "64MiB"
    slots: int = 2
    address: str = "127.0.0.1"
    port: int = 0
    device: str = "cpu"
    timeout: float = 120.0


class WeightstreamTrainer(TrainerWeightTransferEngine[WeightstreamTrainerInitInfo]):
    """Sends a `WeightSource` through gather, bucket, prefetch, transport, barrier and notify. Called alike on every rank.

    A `ModuleSource` is read by our own gather, which knows tied names and shards; any other source is streamed in its order.
    """

    init_info_cls = WeightstreamTrainerInitInfo

    def __init__(self, info: WeightstreamTrainerInitInfo, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        if info.transport not in ("ipc", "nccl"):
            raise ConfigError(f"transport: {info.transport!r} is not one of ipc, nccl")
        transport = Ipc() if info.transport == "ipc" else Nccl(info.address, info.port)
        backend, device = Vllm(), torch.device(info.device)
        module = getattr(source, "_module", None)
        self._stages: list[Stage] = [
            GatherSource() if module is None else GatherParams(),
            Bucket(info.capacity, info.slots),
            Prefetch(),
            transport,
            Barrier(),
            NotifyEngines(),
        ]
        timeouts = Timeouts(control=info.timeout, put=info.timeout, group=info.timeout, agree=info.timeout)
        self._run = Run(
            comm=Comm.from_torch(timeouts.agree),
            device=device,
            backend=backend,
            transport=transport,
            wire=backend.wire(info.transport),
            timeouts=timeouts,
            model=source if module is None else module,
        )
        if self._run.comm.is_head != info.is_sender:
            raise ConfigError(
                f"rank={info.rank}: the sender is rank 0 of torch's default group, which is {self._run.comm.rank}"
            )
        self._engine = _ClientEngine(client, info.tp, timeouts)
        self._run.engines = [self._engine]

    @classmethod
    def trainer_init(cls, init_info: WeightstreamTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Ready to send; the engine is met at the first `send_weights`. Raises ConfigError."""
        if source is None:
            raise ConfigError("source: give a WeightSource, such as ModuleSource(model)")
        trainer = cls(init_info, client, source)
        for stage in trainer._stages:
            stage.open(trainer._run)
        return trainer

    def send_weights(self) -> None:
        """One whole update: start, every bucket, finish with the version, a running number.

        Raises what any rank met. After a failure the engine must stay paused until a later call succeeds.
        """
        run = self._run
        run.update += 1
        run.version = str(run.update)
        run.comm.begin(run.update)
        try:
            with run.comm.together("plan"):
                plan_chain(self._stages, run)
            with run.comm.together("prepare"):
                for stage in self._stages:
                    stage.prepare(run)
            self._as_sender("begin", self._engine.begin)
            with run.comm.together("transfer"):
                run_chain(self._stages, run)
            self._as_sender("finish", self._engine.commit)
        except BaseException:
            run.transport.leave(self._engine)
            if self.is_sender:
                with contextlib.suppress(EngineError):
                    self._engine.abort(run)
            raise

    def shutdown(self) -> None:
        for stage in reversed(self._stages):
            stage.close()

    def _as_sender(self, phase: str, step: Callable[[Run], None]) -> None:
        with self._run.comm.together(phase):
            if self.is_sender:
                step(self._run)


class GatherSource(Stage):
    """The tensors of a vLLM `WeightSource`, one fused set after another, in its own order.

    Raises PlanMismatch where iteration does not yield what the metadata said.
    """

    produces = Group
    phase = "gather"

    def __init__(self) -> None:
        self._specs: tuple[GroupSpec, ...] = ()

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        metadata = run.model.metadata  # a method in vLLM 0.32, a property since 0.33
        tensors = [
            TensorSpec(m.name, m.dtype, tuple(m.shape)) for m in (metadata() if callable(metadata) else metadata)
        ]
        self._specs = tuple(GroupSpec(tuple(of_set)) for _, of_set in groupby(tensors, lambda t: fusion_key(t.name)))
        return self._specs

    def __call__(self, items: Iterator[Any], run: Run) -> Iterator[Group]:
        stream = iter(run.model.iter_full() if hasattr(run.model, "iter_full") else run.model)
        for spec in self._specs:
            yield Group(spec, tuple(self._next(stream, tensor) for tensor in spec.tensors))

    def _next(self, stream: Iterator[tuple[str, torch.Tensor]], expected: TensorSpec) -> torch.Tensor:
        name, tensor = next(stream, ("nothing more", None))
        if tensor is None or name != expected.name:
            raise PlanMismatch(f"the source yielded {name}, its metadata says {expected.name}")
        return tensor.detach()


class _ClientEngine(VllmEngine):
    """Speaks through the caller's client, which has one method for each route that an update takes."""

    def __init__(self, client: Any, tp: int, timeouts: Timeouts) -> None:
        super().__init__(getattr(client, "base_url", type(client).__name__), tp, Keys(), timeouts, "keep")
        self.admin.close()
        self.admin = _Client(client, self.url)  # type: ignore[assignment]


class _Client:
    """The part of `stages.backends.http.Http` that an update uses."""

    def __init__(self, client: Any, url: str) -> None:
        self._client, self._url = client, url

    def post(self, path: str, phase: str, timeout: float, body: Any = None) -> None:
        """Call the method of the route's name with the body's one value. Raises EngineError with the engine's own words."""
        method = getattr(self._client, path.lstrip("/"), None)
        if method is None:
            return  # leaving a group is no part of vLLM's client protocol; its HTTP client can
        try:
            method(*(body or {}).values())
        except Exception as error:
            response = getattr(error, "response", None)
            words = (
                str(error) if response is None else f"{path} answered {response.status_code}: {response.text[:2000]}"
            )
            status = None if response is None else response.status_code
            raise EngineError(
                self._url, phase, words, status=status, body="" if response is None else response.text
            ) from error

    def raw(self, method: str, path: str, phase: str, timeout: float, *, body: Any = None) -> None:
        with contextlib.suppress(EngineError):
            self.post(path, phase, timeout, body)

    def close(self) -> None:
        """The client is the caller's."""


with contextlib.suppress(ValueError):  # registered already
    WeightTransferTrainerFactory.register_engine(BACKEND, WeightstreamTrainer)
