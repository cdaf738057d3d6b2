"""What vLLM's workers run when started with `--weight-transfer-config '{"backend": "weightstream"}'`.

Our receiver takes the bytes (shared memory or a broadcast group, as init_info says); complete tensors go to the model's own
`load_weights` under vLLM's layerwise reload, which re-quantizes, repacks and keeps storages, and which holds on to what it is
given until the layer is complete: so it gets memory of its own. Not inside `torch.device(...)`: that is a torch-function mode,
under which the compiled online quantization recurses without end. Seen in vLLM 0.32.0; 0.33 by its source.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from stages.flow import TensorSpec
from stages.receiver import Receiver


@dataclass
class WeightstreamInitInfo(WeightTransferInitInfo):
    """stages.receiver.InitInfo, as vLLM's typed init info."""

    transport: str
    timeout: float
    slot_bytes: int
    segments: list[str] = field(default_factory=list)
    handles: list[list[dict[str, Any]]] = field(default_factory=list)
    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 0
    world_size: int = 0
    group_name: str = ""
    backend: str = "gloo"


@dataclass
class WeightstreamUpdateInfo(WeightTransferUpdateInfo):
    """stages.receiver.UpdateInfo, as vLLM's typed update info: one bucket."""

    update: int
    seq: int
    plan_hash: str
    plan: dict[str, Any] | None = None
    slot: int | None = None
    digest: str | None = None


class Assembler:
    """Puts the pieces of tensors together, in memory of their own on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, tuple[torch.Tensor, int]] = {}
        self._complete: list[tuple[str, torch.Tensor]] = []

    def __call__(self, spec: TensorSpec, start: int, memory: torch.Tensor) -> None:
        """A stages.receiver.Sink."""
        if start == 0:
            tensor, done = torch.empty(spec.shape, dtype=spec.dtype, device=self._device), 0
        else:
            tensor, done = self._open.pop(spec.name)
        if memory.numel():
            tensor.view(-1).view(torch.uint8)[start : start + memory.numel()].copy_(memory)
        done += memory.numel()
        if done == spec.nbytes:
            self._complete.append((spec.name, tensor))
        else:
            self._open[spec.name] = (tensor, done)

    def take(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors completed since the last call."""
        complete, self._complete = self._complete, []
        return complete

    def clear(self) -> None:
        self._open.clear()
        self._complete.clear()


class WeightstreamEngine(WeightTransferEngine[WeightstreamInitInfo, WeightstreamUpdateInfo]):
    """One worker's receiving end."""

    init_info_cls = WeightstreamInitInfo
    update_info_cls = WeightstreamUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        replica = getattr(parallel, "data_parallel_index", 0) or 0
        self._receiver = Receiver(replica * world + parallel.rank, device)
        self._assembler = Assembler(device)

    def init_transfer_engine(self, init_info: WeightstreamInitInfo) -> None:
        self._receiver.init(asdict(init_info))

    def start_weight_update(self) -> None:
        self._receiver.start()
        self._assembler.clear()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """The base class ends with an accelerator synchronization, which raises where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightstreamUpdateInfo) -> None:
        self._receiver.receive(asdict(update_info), self._assembler)
        weights = self._assembler.take()
        if weights:
            with _partial_loads_allowed():
                self.model.load_weights(weights)

    def finish_weight_update(self) -> None:
        self._receiver.finish()  # raises before anything is made final
        finalize_layerwise_reload(self.model, self.model_config)
        self._assembler.clear()

    def shutdown(self) -> None:
        self._receiver.shutdown()
        self._assembler.clear()


def _partial_loads_allowed() -> Any:
    """Since 0.32 draft models check completeness per load call, unless told that more is to come."""
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:
        return nullcontext()
    return disable_mtp_completeness_check()
