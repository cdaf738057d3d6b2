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
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("text_config") or {}, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return config


def index_of(folder: Path) -> dict[str, str]:
    """Which file of the folder holds which tensor, as the index says; empty where there is none.

    Raises ConfigError for a damaged index, and for one that names a file outside of the folder.
    """
    index = folder / INDEX
    if not index.is_file():
        return {}
    try:
        found = json.loads(index.read_text())["weight_map"]
        if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
            raise TypeError("weight_map does not map names to files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{index} is no safetensors index: {error}") from error
    for name in dict.fromkeys(found.values()):
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise ConfigError(f"{index} names {name!r}, which is no file of its folder")
    return found


def _read_headers(folder: Path) -> dict[str, Placed]:
    weight_map = index_of(folder)
    files = [folder / name for name in dict.fromkeys(weight_map.values())] or sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} holds no safetensors file; convert the checkpoint with transformers' save_pretrained"
        )
    if absent := [file.name for file in files if not file.is_file()]:
        raise ConfigError(
            f"{folder} lacks {len(absent)} of the {len(files)} files that its index lists, first {absent[0]}\n"
            "  fetch the rest of the checkpoint"
        )
    found: dict[str, Placed] = {}
    for file in files:
        for spec in read_header(file):
            if not weight_map or weight_map.get(spec.name) == file.name:
                found[spec.name] = Placed(spec, file)
    missing = sorted(set(weight_map) - set(found))
    if missing:
        raise ConfigError(
            f"{folder / INDEX} lists {len(missing)} tensors that its files do not hold, first {missing[0]}"
        )
    return found


def read_header(file: Path) -> list[TensorSpec]:
    """Names, dtypes and shapes of one safetensors file, from its header alone.

    Format: https://huggingface.co/docs/safetensors. Raises ConfigError for a missing, short or damaged file.
    """
    try:
        size = file.stat().st_size
        if size == 0:
            raise ValueError("it is empty")
        with open(file, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if not 2 <= length <= min(size - 8, 100_000_000):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(stream.read(length))
        specs, end = [], 0
        for name, info in header.items():
            if name == "__metadata__":
                continue
            spec = TensorSpec(name, SAFETENSORS_DTYPES[info["dtype"]], tuple(map(_whole, info["shape"])))
            first, last = map(_whole, info["data_offsets"])
            if last - first != spec.nbytes:
                raise ValueError(f"{name} of {spec.nbytes} bytes lies from {first} to {last}")
            specs.append(spec)
            end = max(end, last)
        if 8 + length + end != size:
            raise ValueError(f"{size} bytes long, its header says {8 + length + end}")
        return specs
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ConfigError(
            f"{file} is not a complete safetensors file: {error}\n"
            "  fetch it again: it was cut short, or is a Git LFS pointer to the file"
        ) from error


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{str(value)[:50]!r} where a whole number from 0 belongs")
    return value
