"""A model known by its description alone: config.json, and the index of its files where there is one. No weights.

The model is built on torch's meta device, so that 671 B parameters take seconds and no memory.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stages.errors import ConfigError
from stages.flow import TensorSpec
from stages.gather import group_specs, source_of
from stages.gather.checkpoint import INDEX, Checkpoint, index_of
from stages.quantize.auto import Auto
from stages.run import Run

CONFIG = "config.json"


@dataclass(frozen=True)
class Outline:
    """`source` is what gather reads; `folder` holds config.json, `config` is its content, and all there is where `guessed`."""

    source: Any
    folder: Path
    config: dict[str, Any]
    guessed: bool = False

    def expected(self, run: Run) -> dict[str, TensorSpec]:
        """What an engine started from this folder holds: by name, in its own dtype, quantized as its config says."""
        if isinstance(self.source, Checkpoint):
            return self.source.specs
        described = source_of(self.source).describe()
        wide = [TensorSpec(leaf.name, leaf.dtype, leaf.shape) for leaf in described.leaves]
        run.reference, run.expected = self.folder, None
        quantized = Auto().plan(group_specs(wide, described.aliases), run)
        specs = {t.name: t for group in quantized for t in group.tensors}
        listed = index_of(self.folder)
        # What the index lists and the config does not explain has no known shape; preflight only has to name it.
        return {n: specs.get(n) or TensorSpec(n, torch.uint8, ()) for n in listed} if listed else specs


def outline_of(path: Path) -> Outline:
    """The model of a folder, or of the config.json or index in it. Raises ConfigError for one that cannot be described."""
    folder = path.parent if path.name in (CONFIG, INDEX) else path
    if not folder.is_dir():
        raise ConfigError(f"trainer.path: {path} does not exist\n  give a folder with config.json, or that file")
    if path == folder and (index_of(folder) or any(folder.glob("*.safetensors"))) and _has_files(folder):
        checkpoint = Checkpoint(folder)
        return Outline(checkpoint, folder, checkpoint.config)
    if not (folder / CONFIG).is_file():
        raise ConfigError(
            f"{folder} holds no {CONFIG}, which says the shapes; an index has names alone\n  put the model's {CONFIG} there"
        )
    config = _config_of(folder)
    return Outline(_on_meta(config, folder), folder, config.to_dict(), guessed=True)


def _has_files(folder: Path) -> bool:
    listed = set(index_of(folder).values())
    return any((folder / name).is_file() for name in listed) if listed else True


def _config_of(folder: Path) -> Any:
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ConfigError(
            "a model known by its config.json alone is built by transformers, which is not installed\n"
            "  pip install 'weightstream[engine]'"
        ) from error
    with _quiet():
        try:
            return AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{folder / CONFIG} cannot be read: {_first(error)}\n  it needs a model_type that transformers knows"
            ) from error


def _on_meta(config: Any, folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.bfloat16
    with _quiet(), torch.device("meta"):
        try:
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise ConfigError(
                f"{folder / CONFIG}: transformers builds no language model of it: {_first(error)}\n"
                "  give a folder with its safetensors files, whose headers say all"
            ) from error
    return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' warnings, about keys of the config that it does not know and the like, are no answer of ours."""
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        log.setLevel(before)


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
