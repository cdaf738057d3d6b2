"""One vLLM worker, as of 0.32.0, with weightstream's plug-in as its transfer engine.

    start       the model's parameters go to the meta device until finish; no forward pass may run
    receive     one bucket; any error ends the session
    finish      layers of which nothing came keep their old weights; a fused layer of which only a part came is garbage

Ours writes into the parameters as the bytes arrive. A tensor of a wrong shape stays in its layer's buffer in vLLM and
fails every later update, which no retry repairs.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from pipelines.engine.loading.base import Loader, Outcome
from pipelines.engine.weights import UnknownNameError, cast_note
from stages.errors import WeightstreamError
from stages.flow import TensorSpec
from stages.receiver import Receiver

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class VllmLoader(Loader):
    """The receiving end of our plug-in's init, start, update and finish."""

    def __init__(self, rank: int, weights: Any, device: torch.device, model_type: str) -> None:
        super().__init__(rank, weights, device, model_type)
        self._receiver = Receiver(rank, device)
        self._received: set[str] = set()
        self._staged: dict[str, torch.Tensor] = {}
        self._poison: str | None = None

    def skips(self, name: str) -> bool:
        return False

    def close(self) -> None:
        super().close()
        self._receiver.shutdown()

    def init(self, info: dict[str, Any]) -> Outcome:
        outcome = Outcome(stage="init")
        try:
            self._receiver.init(info)
        except WeightstreamError as error:
            outcome.error = str(error)
        return outcome

    def shutdown(self) -> Outcome:
        self._receiver.shutdown()
        return Outcome()

    def start(self) -> Outcome:
        outcome = Outcome(stage="init")
        try:
            self._receiver.start()
        except WeightstreamError as error:
            outcome.error = str(error)
            return outcome
        self._received.clear()
        self._staged.clear()
        return outcome

    def receive(self, info: dict[str, Any] | list[dict[str, Any]]) -> Outcome:
        """One update; a list holds one entry per rank."""
        outcome = Outcome(stage="receive")
        try:
            own = info[self.rank] if isinstance(info, list) else info
            self._receiver.receive(own, lambda spec, start, piece: self._take(spec, start, piece, outcome))
        except Exception as error:
            outcome.error = str(error)
        return outcome

    def finish(self) -> Outcome:
        outcome = Outcome(stage="receive")
        try:
            self._receiver.finish()
        except WeightstreamError as error:
            outcome.error = str(error)
            return outcome
        for missing in self._torn():
            outcome.notes.append(
                f"{missing} did not come with the rest of its fused layer: its memory is uninitialized"
            )
            self.weights.fill(float("nan"), [missing])
        self.weights.refresh()
        return outcome

    def reload(self, folder: str) -> Outcome:
        """The reload_weights call of /collective_rpc."""
        outcome = self.load_folder(folder)
        self.weights.refresh()
        return outcome

    def checksums(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).cpu().numpy().data).hexdigest()
            for name, tensor in sorted(self.weights.tensors.items())
        }

    def _take(self, spec: TensorSpec, start: int, piece: torch.Tensor, outcome: Outcome) -> None:
        """Write one piece of a tensor; a dtype that is not the parameter's is collected and cast when it is whole."""
        if self._poison is not None:
            raise ValueError(self._poison)
        target = self._target(spec)
        if target.dtype == spec.dtype:
            self.weights.memory(spec.name)[start : start + piece.numel()].copy_(piece)
        else:
            whole = self._staged.setdefault(spec.name, torch.empty(spec.nbytes, dtype=torch.uint8, device=self.device))
            whole[start : start + piece.numel()].copy_(piece)
            if start + piece.numel() == spec.nbytes:
                target.copy_(self._staged.pop(spec.name).view(spec.dtype).view(spec.shape))
                outcome.notes.append(cast_note(spec.name, spec.dtype, target.dtype))
        if start + piece.numel() == spec.nbytes:
            self._received.add(spec.name)
            outcome.applied.append(self.weights.tied.get(spec.name, spec.name))

    def _target(self, spec: TensorSpec) -> torch.Tensor:
        try:
            target = self.weights.resolve(spec.name)
        except UnknownNameError:
            raise ValueError(
                f"There is no module or parameter named {spec.name!r} in the model. "
                f"The available parameters are: {sorted(self.weights.tensors)[:5]} and others"
            ) from None
        if tuple(target.shape) != spec.shape:
            self._poison = (
                f"Attempted to load weight {list(spec.shape)} into parameter {list(target.shape)} ({spec.name})"
            )
            raise ValueError(self._poison)
        return target

    def _torn(self) -> list[str]:
        """Members of fused layers that did not come although others of the same layer did."""
        torn: list[str] = []
        for name in self.weights.tensors:
            if name in self._received:
                continue
            for members in _FUSED:
                own = next((m for m in members if f".{m}." in name), None)
                if own and any(name.replace(f".{own}.", f".{other}.") in self._received for other in members):
                    torn.append(name)
        return torn
