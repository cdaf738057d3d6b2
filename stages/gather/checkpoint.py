"""Reading an HF checkpoint folder: one or many safetensors files, mapped, never loaded whole."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stages.errors import ConfigError
from stages.flow import TensorSpec

INDEX = "model.safetensors.index.json"
SAFETENSORS_DTYPES = {  # https://huggingface.co/docs/safetensors
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor and the file that holds it."""

    spec: TensorSpec
    file: Path


class Checkpoint:
    """An HF safetensors folder. `tensors` maps names to where they are; `config` is config.json ({} where absent).

    Raises ConfigError for a folder that is missing, has no safetensors, or whose index and files disagree.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ConfigError(f"checkpoint folder {self.folder} does not exist")
        self.tensors = _read_headers(self.folder)
        self.config = _read_config(self.folder / "config.json")

    @cached_property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: placed.spec for name, placed in self.tensors.items()}

    @property
    def tied(self) -> bool:
        """Whether lm_head shares the embedding and need not be stored."""
        text = self.config.get("text_config") or {}
        return bool(self.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))

    def reader(self) -> CheckpointReader:
        return CheckpointReader(self)


class CheckpointReader:
    """Open files of a checkpoint, at most one at a time. Use as a context manager."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._file: Path | None = None
        self._open: Any = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def read(self, name: str) -> torch.Tensor:
        """The tensor, backed by the mapped file. Raises ConfigError when the file vanished or is damaged."""
        file = self._checkpoint.tensors[name].file
        if file != self._file:
            self._close()
            try:
                self._open = safe_open(str(file), framework="pt").__enter__()
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"cannot read {file}: {error}") from error
            self._file = file
        tensor: torch.Tensor = self._open.get_tensor(name)
        return tensor

    def _close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = self._file = None


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return config


def _read_headers(folder: Path) -> dict[str, Placed]:
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index} is no safetensors index: {error}") from error
        files = [folder / name for name in dict.fromkeys(weight_map.values())]
    else:
        weight_map, files = {}, sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} holds no safetensors file; convert the checkpoint with transformers' save_pretrained"
        )
    found: dict[str, Placed] = {}
    for file in files:
        for spec in read_header(file):
            if not weight_map or weight_map.get(spec.name) == file.name:
                found[spec.name] = Placed(spec, file)
    missing = sorted(set(weight_map) - set(found))
    if missing:
        raise ConfigError(f"{index} lists {len(missing)} tensors that its files do not hold, first {missing[0]}")
    return found


def read_header(file: Path) -> list[TensorSpec]:
    """Names, dtypes and shapes of one safetensors file, from its header alone.

    Format: https://huggingface.co/docs/safetensors. Raises ConfigError for a missing, short or damaged file.
    """
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if not 2 <= length <= min(size - 8, 100_000_000):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
        specs = [
            TensorSpec(name, SAFETENSORS_DTYPES[info["dtype"]], tuple(info["shape"]))
            for name, info in header.items()
            if name != "__metadata__"
        ]
        end = max((info["data_offsets"][1] for name, info in header.items() if name != "__metadata__"), default=0)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes long, its header says {8 + length + end}")
        return specs
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"{file} is not a complete safetensors file: {error}") from error
