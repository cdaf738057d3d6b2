"""One rank of SGLang, as of 0.5.23. What fails in `update_tensor` ends a real server; elsewhere it is answered."""

from __future__ import annotations

from typing import Any

import torch

from pipelines.engine.loading.base import Loader, Outcome
from pipelines.engine.loading.flattened import empty_bytes, split_bytes
from pipelines.engine.unpickle import loads
from stages.digest import tensor_digest
from stages.flow import dtype_of


class SglangLoader(Loader):
    """The receiving end of the tensor, distributed and disk routes."""

    def ignores(self, name: str) -> bool:
        return True

    def skips(self, name: str) -> bool:
        return super().skips(name) or "rotary_emb.inv_freq" in name

    def update_tensor(self, payloads: list[bytes], load_format: str | None) -> Outcome:
        """One request of the tensor route; this rank reads its own payload only."""
        outcome = Outcome(stage="receive")
        try:
            tensors = self._decode(loads(payloads[self.rank]), load_format)
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
            return outcome
        outcome.stage = "load"
        self.load(tensors, outcome)
        return outcome

    def update_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, load_format: str | None
    ) -> Outcome:
        """One request of the distributed route."""
        outcome = Outcome(stage="receive")
        try:
            if group_name not in self.groups:
                raise KeyError(
                    f"Group {group_name} not in {list(self.groups)}. Please call `init_weights_update_group` first."
                )
            tensors = self._receive(names, [dtype_of(d) for d in dtypes], shapes, group_name, load_format)
        except Exception as error:
            outcome.error = str(error.args[0] if error.args else error)
            return outcome
        outcome.stage = "load"
        self.load(tensors, outcome)
        return outcome

    def post_process(self) -> Outcome:
        """What /end_weight_update does on every layer with a quantization method."""
        self.weights.refresh()
        return Outcome()

    def update_disk(self, folder: str) -> Outcome:
        outcome = self.load_folder(folder)
        self.weights.refresh()
        return outcome

    def checksums(self, skip: list[str]) -> dict[str, str]:
        """16 hex digits per tensor, except those whose names contain one of `skip`."""
        return {
            name: tensor_digest(tensor)[:16]
            for name, tensor in sorted(self.weights.tensors.items())
            if not any(part in name for part in skip)
        }

    def _decode(self, content: Any, load_format: str | None) -> list[tuple[str, torch.Tensor]]:
        if load_format == "flattened_bucket":
            return list(split_bytes(content["flattened_tensor"], content["metadata"]))
        tensors = [(name, tensor.to(self.device)) for name, tensor in content]
        if load_format == "direct":
            for name, _ in tensors:
                if name not in self.weights.tensors:
                    raise KeyError(name)
        elif load_format is not None:
            raise NotImplementedError(f"Unknown load_format={load_format}")
        return tensors

    def _receive(
        self,
        names: list[str],
        dtypes: list[torch.dtype],
        shapes: list[list[int]],
        group_name: str,
        load_format: str | None,
    ) -> list[tuple[str, torch.Tensor]]:
        group = self.groups[group_name]
        if load_format == "flattened_bucket":
            buffer, entries = empty_bytes(names, dtypes, shapes, self.device)
            group.broadcast(buffer)
            return [(name, buffer[a:b].view(dtype).reshape(shape)) for name, dtype, shape, a, b in entries]
        tensors = [
            (name, torch.empty(shape, dtype=dtype, device=self.device))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=False)
        ]
        for _, tensor in tensors:
            group.broadcast(tensor)
        return tensors
