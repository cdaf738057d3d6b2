"""A small model of a real architecture that really trains: AdamW steps on a task it can learn, in float32."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from pipelines.trainers.base import Score, Trainer
from stages.errors import ConfigError

_FORMAT = 1  # of the cached folder; counts up when what is written there changes
_BATCH, _LENGTH = 8, 32
_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1.5e-1}  # other kernels, the same weights


class ToyTrainer(Trainer):
    """Makes an HF checkpoint once per set of settings, caches it, and trains on from it.

    `dtype` is that of the checkpoint, and so of the engines; the masters here are float32. The cache is
    `$XDG_CACHE_HOME/weightstream/toy` (default `~/.cache`) and safe to share between processes. Over several ranks of
    torch.distributed the model is sharded by FSDP2, and each rank trains on sequences of its own.
    """

    def __init__(
        self,
        arch: str = "qwen3",
        hidden_size: int = 128,
        layers: int = 2,
        vocab_size: int = 512,
        tied: bool = True,
        dtype: str = "float32",
        lr: float = 1e-3,
        seed: int = 0,
    ) -> None:
        settings = {
            "arch": arch,
            "hidden_size": hidden_size,
            "layers": layers,
            "vocab_size": vocab_size,
            "tied": tied,
            "dtype": dtype,
            "seed": seed,
        }
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.tolerance = _TOLERANCE[dtype]
        self._vocab_size, self._seed = vocab_size, seed
        rank, self._ranks = _world()
        self.reference = _cached(settings) if self._ranks == 1 else _cached_by_rank_0(settings, rank)
        self.source = _transformers().AutoModelForCausalLM.from_pretrained(self.reference, dtype=torch.float32).train()
        if self._ranks > 1:
            self._shard()
        self._optimizer = torch.optim.AdamW(self.source.parameters(), lr=lr)
        self._random = torch.Generator().manual_seed(seed + 1000 * rank)
        self._scorer: torch.nn.Module | None = None

    def step(self) -> None:
        """One AdamW step on sequences in which every token follows from the one before."""
        tokens = self._sequences(_BATCH, _LENGTH)
        loss = self.source(input_ids=tokens, labels=tokens, use_cache=False).loss
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        self._scorer = None

    def prompts(self) -> list[list[int]]:
        """Two prompts of different length, the same in every run."""
        rows: list[list[int]] = self._sequences(2, 12, torch.Generator().manual_seed(self._seed)).tolist()
        return [rows[0], rows[1][:7]]

    @torch.no_grad()
    def score(self, input_ids: Sequence[int], output_ids: Sequence[int]) -> list[Score]:
        """One forward pass in the checkpoint's dtype over prompt and answer together."""
        if self._scorer is None:
            self._scorer = self._whole().to(self._dtype).eval()
        tokens = torch.tensor([[*input_ids, *output_ids]])
        logits = self._scorer(input_ids=tokens, use_cache=False).logits[0, len(input_ids) - 1 : -1].float()
        logprobs = logits.log_softmax(-1)
        return [Score(row[token].item(), row.max().item()) for row, token in zip(logprobs, output_ids, strict=True)]

    def _shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self._ranks,))
        for layer in self.source.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.source, mesh=mesh)

    def _whole(self) -> torch.nn.Module:
        """A copy of the model that is not sharded."""
        whole: torch.nn.Module
        if self._ranks == 1:
            whole = copy.deepcopy(self.source)
            return whole
        whole = _transformers().AutoModelForCausalLM.from_pretrained(self.reference, dtype=torch.float32)
        with torch.no_grad():
            for mine, theirs in zip(whole.parameters(), self.source.parameters(), strict=True):
                mine.copy_(theirs.full_tensor())
        return whole

    def _sequences(self, rows: int, length: int, random: torch.Generator | None = None) -> torch.Tensor:
        starts = torch.randint(self._vocab_size, (rows, 1), generator=random or self._random)
        return (starts + 7 * torch.arange(length)) % self._vocab_size


def _world() -> tuple[int, int]:
    """`(rank, ranks)`"""
    dist: Any = torch.distributed
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _cached(settings: dict[str, Any]) -> Path:
    """The folder of this checkpoint, made if it is not there. It appears by one rename, whole or not at all."""
    key = hashlib.sha256(json.dumps([_FORMAT, settings], sort_keys=True).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightstream" / "toy"
    folder = cache / f"{settings['arch']}-{key}"
    if (folder / "config.json").is_file():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=cache))
    except OSError as error:
        raise ConfigError(f"the toy checkpoint cannot be cached: {error}\n  point XDG_CACHE_HOME elsewhere") from error
    try:
        _make(settings, unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was first, with the same bytes
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _cached_by_rank_0(settings: dict[str, Any], rank: int) -> Path:
    """The same where torch.distributed has several ranks: transformers then saves on rank 0 only."""
    box: list[Path | str | None] = [None]
    if rank == 0:
        try:
            box[0] = _cached(settings)
        except Exception as error:
            box[0] = str(error)
            raise
        finally:
            torch.distributed.broadcast_object_list(box)
    else:
        torch.distributed.broadcast_object_list(box)
    folder = box[0]
    if not isinstance(folder, Path):
        raise ConfigError(f"rank 0 has no checkpoint: {folder}")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}, which rank 0 has made, is not visible on this machine\n  share XDG_CACHE_HOME")
    return folder


def _make(settings: dict[str, Any], folder: Path) -> None:
    transformers = _transformers()
    with torch.random.fork_rng():
        torch.manual_seed(settings["seed"])
        model = transformers.AutoModelForCausalLM.from_config(_model_config(settings), dtype=torch.float32)
    model.to(getattr(torch, settings["dtype"])).save_pretrained(folder)
    _write_tokenizer(settings["vocab_size"], folder)


def _model_config(settings: dict[str, Any]) -> Any:
    hidden = settings["hidden_size"]
    if hidden % 64:
        raise ConfigError(f"trainer.hidden_size: {hidden} must be a multiple of 64")
    transformers = _transformers()
    common: dict[str, Any] = {
        "vocab_size": settings["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": settings["layers"],
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": settings["tied"],
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if settings["arch"] == "llama":
        return transformers.LlamaConfig(**common)
    if settings["arch"] == "qwen3":
        return transformers.Qwen3Config(**common)
    return transformers.Qwen3MoeConfig(
        **common, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=hidden, norm_topk_prob=True
    )


def _write_tokenizer(vocab_size: int, folder: Path) -> None:
    """One word per token, so that an engine that insists on a tokenizer can serve the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    _transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "trainer=toy needs transformers, which is not installed\n"
            "  pip install 'weightstream[demo]', or choose trainer=checkpoint"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    return transformers
