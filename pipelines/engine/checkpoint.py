"""A Hugging Face checkpoint folder, read tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from stages.errors import ConfigError
from stages.gather.checkpoint import index_of


class Checkpoint:
    """The config and the safetensors files of one folder. Raises ConfigError where it is not such a folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            if not (self.folder / "config.json").is_file():
                raise FileNotFoundError("no such file")
            self.config: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
            if not isinstance(self.config, dict):
                raise ValueError("no JSON object")
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{self.folder} is not a Hugging Face checkpoint: config.json: {error}") from error
        self.files = self._files()

    def _files(self) -> list[Path]:
        if names := sorted(set(index_of(self.folder).values())):
            return [self.folder / name for name in names]
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{self.folder} holds no *.safetensors files; save the model with save_pretrained")
        return files

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every stored tensor, one file at a time. Raises OSError or SafetensorError for a damaged file."""
        for path in self.files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_tensor(name)

    @property
    def block_fp8(self) -> tuple[int, int] | None:
        """The block of a block-fp8 checkpoint, None for an unquantized one. Raises ConfigError for other formats."""
        settings = self.config.get("quantization_config")
        if settings is None:
            return None
        match settings:
            case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if rows > 0 and columns > 0:
                if settings.get("activation_scheme", "dynamic") == "dynamic":
                    return rows, columns
        raise ConfigError(
            f"{self.folder}: the embedded engine serves unquantized and block-fp8 checkpoints (quant_method "
            f"fp8 with weight_block_size); this one says {json.dumps(settings)}"
        )
