"""GRPO in miniature: FSDP2 over the ranks of torchrun, rollouts from an engine that gets the new weights every step.

torchrun --nproc-per-node 2 tests/examples/grpo_fsdp2.py CHECKPOINT [OVERRIDE ...]

CHECKPOINT is a Hugging Face folder. Without overrides a small engine is started here; `engines=remote
engines.urls=[http://host:30000] backend=sglang` sends to one of yours.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from pipelines.updater import WeightUpdater

STEPS, GROUP, NEW_TOKENS = 3, 4, 6


def rollouts(updater: WeightUpdater, random: torch.Generator) -> list[list[int]]:
    """A group of prompts, each with what the engine makes of it. Rank 0 asks, all ranks get the answers."""
    found: list[list[int] | None] = [None] * GROUP
    if dist.get_rank() == 0:
        for i in range(GROUP):
            prompt = torch.randint(1, 256, (5,), generator=random).tolist()
            tokens, _ = updater.generate(updater.engines[0], prompt, NEW_TOKENS)
            found[i] = prompt + tokens
    dist.broadcast_object_list(found)
    return [f for f in found if f is not None]


def loss_of(model: torch.nn.Module, sequences: torch.Tensor) -> torch.Tensor:
    """Policy gradient towards small token ids, with the group's mean as baseline."""
    new = sequences[:, -NEW_TOKENS:]
    reward = -(new.float() / 256).mean(-1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    logits = model(sequences[:, :-1]).logits[:, -NEW_TOKENS:]
    logprobs = logits.log_softmax(-1).gather(-1, new[..., None])[..., 0]
    return -(advantage[:, None] * logprobs).mean()


def main(checkpoint: str, overrides: list[str]) -> None:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    random = torch.Generator().manual_seed(0)
    with WeightUpdater.from_config(overrides, reference=checkpoint) as updater:
        for step in range(STEPS):
            sequences = torch.tensor(rollouts(updater, random))
            loss = loss_of(model, sequences)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = updater.update(model)
            if dist.get_rank() == 0:
                proofs = [e.verified for e in report.engines]
                print(
                    f"step {step}: loss {loss.item():.4f}, {report.bytes} bytes, {report.outcome}, verified by {proofs}"
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
