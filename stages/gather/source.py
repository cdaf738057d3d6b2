"""What a trainer may hand over, as descriptions: a module in any way of sharding, or a folder of safetensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Protocol

import torch

from stages.errors import ConfigError
from stages.flow import TensorSpec
from stages.gather.checkpoint import Checkpoint, CheckpointReader
from stages.gather.exchange import own_shares
from stages.gather.layout import Description, Leaf, Part, Stored, whole
from stages.gather.megatron import describe_megatron, models_in
from stages.gather.module import describe, describe_tensors

Expected = Mapping[str, TensorSpec] | None


class Source(Protocol):
    """Something to read. Its tensors can be read inside a `with` block only."""

    def describe(self, rank: int = 0, expected: Expected = None) -> Description:
        """What this rank has. `expected` is what the engines' checkpoint holds, where known."""
        ...

    def shares(self, rank: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's own share of each HF tensor, without asking other ranks."""
        ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class ModuleSource:
    """A torch module, sharded or not; or the chunks of a Megatron model."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        self._modules = modules

    def describe(self, rank: int = 0, expected: Expected = None) -> Description:
        chunks = [model for module in self._modules for model in models_in(module)]
        if chunks:
            return describe_megatron(chunks, rank, expected)
        if len(self._modules) > 1:
            raise ConfigError("update() takes several modules only where they are the chunks of a Megatron GPT model")
        return describe(self._modules[0], rank)

    def shares(self, rank: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        return own_shares(self.describe(rank), rank)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class StateSource:
    """HF names and whole tensors, as a state dict or a snapshot has them; one that shares another's memory is tied to it."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self._state = state

    def describe(self, rank: int = 0, expected: Expected = None) -> Description:
        return describe_tensors(self._state, rank)

    def shares(self, rank: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        return own_shares(self.describe(rank), rank)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class FolderSource:
    """An HF safetensors folder, read tensor by tensor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._reader: CheckpointReader = checkpoint.reader()
        self._stack = ExitStack()

    def describe(self, rank: int = 0, expected: Expected = None) -> Description:
        made = Description(tensors=_Files(self._checkpoint, self._reader))
        for s in self._checkpoint.specs.values():
            made.stored[s.name] = Stored(s.name, s.dtype, s.shape)
            made.leaves.append(Leaf(s.name, s.dtype, s.shape, (Part(s.name, whole(s.shape)),)))
        names = self._checkpoint.tensors
        embeddings = [n for n in names if n.endswith("embed_tokens.weight")]
        if self._checkpoint.tied and embeddings and "lm_head.weight" not in names:
            made.aliases.append(("lm_head.weight", min(embeddings, key=len)))  # layers may have embeddings of their own
        return made

    def shares(self, rank: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        return own_shares(self.describe(rank), rank)

    def __enter__(self) -> None:
        self._stack.enter_context(self._reader)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class _Files(Mapping[str, torch.Tensor]):
    """The tensors of a folder, each read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint, reader: CheckpointReader) -> None:
        self._checkpoint = checkpoint
        self._reader = reader

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._reader.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)

    def __len__(self) -> int:
        return len(self._checkpoint.tensors)
