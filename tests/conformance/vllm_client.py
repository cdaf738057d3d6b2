"""A trainer as vLLM documents one: its client and its source, our backend. Run by the interpreter of vLLM's environment.

python vllm_client.py URL TRANSPORT TP module|stream FOLDER [FOLDER ...]: one update from each checkpoint folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import requests
import torch
from transformers import AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from pipelines.vllm_trainer import WeightstreamTrainerInitInfo


class Streamed(ModuleSource):
    """A source of its own kind, backwards as to order: only what `WeightSource` promises may be used."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._tensors = dict(reversed(list(module.named_parameters())))

    def metadata(self) -> list[object]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, p.dtype, tuple(p.shape)) for name, p in self._tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def main(url: str, transport: str, tp: str, kind: str, *folders: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folders[0], dtype="auto")
    trainer = WeightTransferTrainerFactory.trainer_init(
        WeightstreamTrainerInitInfo(rank=0, transport=transport, tp=int(tp), capacity="256KiB", timeout=60.0),
        client=HTTPVLLMWeightSyncClient(url),
        source=ModuleSource(model) if kind == "module" else Streamed(model),
    )
    for folder in folders:
        with torch.no_grad():
            model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict())
        requests.post(f"{url}/pause", params={"mode": "keep", "clear_cache": "true"}, timeout=60).raise_for_status()
        trainer.send_weights()
        requests.post(f"{url}/resume", timeout=60).raise_for_status()
    trainer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
