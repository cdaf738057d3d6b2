"""One rank of LMDeploy's PyTorch engine, as of 0.18.0: handles, one cached bucket, one dtype per bucket.

flattened bucket with a tensor    rebuilt (and cloned unless told not to), kept in the one slot
flattened bucket without one      the slot is read again, whatever it holds by now
finished                          layers are post-processed, the slot is dropped
sleep                             the slot is dropped; level 2 also loses the weights
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from pipelines.engine.loading.base import Loader, Outcome
from pipelines.engine.loading.flattened import split_elements
from pipelines.engine.pickles import BlockedError, Call
from pipelines.engine.unpickle import loads
from pipelines.engine.weights import SCALE_SUFFIX, quantize
from stages.errors import TransportError
from stages.flow import dtype_of

# model files that test membership before they load (0.18.0); all others raise KeyError for an unknown name
_LENIENT = {"deepseek_v4", "hy3_mtp", "interns1_pro", "interns2_mobius", "meta_moe", "qwen3_5_moe"}
_DERIVED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class LmdeployLoader(Loader):
    """The receiving end of /update_weights and /update_weights_from_distributed."""

    slot: torch.Tensor | None = None
    on_meta = False
    _event: Any = None

    def ignores(self, name: str) -> bool:
        return self.model_type in _LENIENT

    def skips(self, name: str) -> bool:
        return super().skips(name) or name.endswith(_DERIVED)

    def apply(self, name: str, value: torch.Tensor, outcome: Outcome) -> None:
        """Plain floats for a block-fp8 weight are quantized here, as LMDeploy does on load."""
        target = self.weights.tensors.get(name)
        block = self.weights.block
        if block is None or target is None or target.dtype != torch.float8_e4m3fn or value.dtype == target.dtype:
            super().apply(name, value, outcome)
            return
        codes, scales = quantize(value, block)
        super().apply(name, codes, outcome)
        super().apply(name + SCALE_SUFFIX, scales, outcome)

    def load_or_lose(self, tensors: list[tuple[str, torch.Tensor]], outcome: Outcome) -> None:
        """After a level-2 sleep the parameters are on the meta device, where a copy succeeds and does nothing."""
        if not self.on_meta:
            self.load(tensors, outcome)
        elif tensors:
            outcome.notes.append("the weights are asleep on the meta device: what was sent is lost")

    def update(self, payload: str | list[str], load_format: str | None, finished: bool) -> Outcome:
        """One /update_weights request."""
        outcome = Outcome(stage="receive")
        try:
            own = payload[self.rank] if isinstance(payload, list) else payload
            content = loads(base64.b64decode(own))
            if load_format == "flattened_bucket":
                tensors = self._flattened(content, outcome)
            else:
                tensors = [(name, self._rebuild(item, clone=True)) for name, item in content]
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
            if isinstance(error, BlockedError):
                outcome.notes.append("executes the payload: LMDeploy unpickles without limits")
            return outcome
        outcome.stage = "load"
        self.load_or_lose(tensors, outcome)
        if outcome.error is not None:
            return outcome
        if self._event is not None:
            self._event.record()
        if finished:
            self._finish()
        return outcome

    def update_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str | None,
        finished: bool,
    ) -> Outcome:
        """One /update_weights_from_distributed request; the group exists."""
        outcome = Outcome(stage="receive")
        group = self.groups[group_name]
        try:
            tensors = [
                (name, torch.empty(shape, dtype=dtype_of(dtype), device=self.device))
                for name, dtype, shape in zip(names, dtypes, shapes, strict=False)
            ]
            if names and load_format == "flattened_bucket":
                kinds = [tensor.dtype for _, tensor in tensors]
                if len(set(kinds)) != 1:
                    raise ValueError(f"All tensors should have same dtype, but given {kinds}")
                flat = torch.cat([tensor.flatten() for _, tensor in tensors])
                group.broadcast(flat)
                pieces = torch.split(flat, [tensor.numel() for _, tensor in tensors])
                tensors = [(name, p.view(t.shape)) for (name, t), p in zip(tensors, pieces, strict=True)]
            else:
                for _, tensor in tensors:
                    group.broadcast(tensor)
        except (TransportError, ValueError, RuntimeError) as error:
            outcome.error = str(error)
            return outcome
        outcome.stage = "load"
        self.load_or_lose(tensors, outcome)
        if outcome.error is None and finished:
            self._finish()
        return outcome

    def sleep(self, level: int) -> None:
        self.slot = self._event = None
        self.on_meta = level == 2

    def wake_weights(self) -> None:
        """After level 2 the model is rebuilt without its weights; NaN stands for uninitialized memory."""
        if self.on_meta:
            self.on_meta = False
            self.weights.fill(float("nan"))

    def _finish(self) -> None:
        if not self.on_meta:
            self.weights.refresh()
        self.slot = self._event = None

    def _flattened(self, content: dict[str, Any], outcome: Outcome) -> list[tuple[str, torch.Tensor]]:
        metadata = content["metadata"]
        if not metadata:
            return []
        handle = content.get("event_ipc_handle")
        if "flattened_tensor" in content:
            clone = bool(content.get("require_clone", True))
            self.slot = self._rebuild(content["flattened_tensor"], clone=clone)
        elif self.slot is None:
            raise ValueError(
                "flattened_tensor is not provided in weights and no cached ipc tensor is available. "
                "Please provide flattened_tensor on the first update_params call."
            )
        elif metadata[0].dtype != self.slot.dtype:
            outcome.notes.append("a bucket without a handle read the cached tensor of another dtype")
        else:
            outcome.notes.append("a bucket without a handle read the cached tensor of an earlier one")
        if handle is not None and self.device.type == "cuda":
            self._event = torch.cuda.Event.from_ipc_handle(self.device, handle)
        if self._event is not None:
            self._event.wait()
        assert self.slot is not None
        return list(split_elements(self.slot, metadata))

    def _rebuild(self, item: tuple[Call, tuple[Any, ...]], *, clone: bool) -> torch.Tensor:
        """Call a reduction. The engine writes its own device into a CUDA handle, whatever the sender's was."""
        function, arguments = item
        if not isinstance(function, Call):
            raise BlockedError("Blocked payload: a tensor must come as (rebuild function, arguments)")
        values = list(arguments)
        if function.name.startswith(("rebuild_cuda_tensor", "_rebuild_cuda_tensor")):
            values[6] = self.device.index or 0
        tensor: torch.Tensor = function(*values)
        return tensor.clone() if clone else tensor
