"""GRPO in miniature on Ray: FSDP2 ranks and engines are actors, and every step the engines get the new weights.

python tests/examples/grpo_ray.py CHECKPOINT [OVERRIDE ...]

CHECKPOINT is a Hugging Face folder, `backend=...` the protocol that the engines speak. Your own engine's actor takes the place
of EngineActor; stages/backends/actor.py says which methods it needs.
"""

import socket
import sys
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from pipelines.config import load
from pipelines.engine.actor import EngineActor
from pipelines.updater import WeightUpdater
from tests.examples.grpo_fsdp2 import loss_of

STEPS, GROUP, NEW_TOKENS, RANKS, ENGINES = 3, 4, 6, 2, 2


@ray.remote
class Trainer:
    def address(self) -> str:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, rank: int, address: str, checkpoint: str, overrides: list[str], engines: list[Any]) -> None:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        for part in (*self.model.model.layers, self.model):
            fully_shard(part)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.updater = WeightUpdater.from_config(
            [*overrides, "engines=ray", "engines.proof=digest"], reference=checkpoint
        )
        self.updater.open()
        self.updater.add_engines(engines)

    def rollout(self, number: int, prompt: list[int]) -> list[int]:
        return prompt + self.updater.generate(self.updater.engines[number % ENGINES], prompt, NEW_TOKENS)[0]

    def step(self, sequences: list[list[int]]) -> str:
        loss = loss_of(self.model, torch.tensor(sequences))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        report = self.updater.update(self.model)
        return f"loss {loss.item():.4f}, {report.outcome}, verified by {[e.verified for e in report.engines]}"

    def stop(self) -> None:
        self.updater.close()
        dist.destroy_process_group()


def main(checkpoint: str, overrides: list[str]) -> None:
    ray.init(log_to_driver=False)
    backend = load(overrides)["backend"]["_target_"].split(".")[-2]
    engine = ray.remote(EngineActor).options(max_concurrency=16, scheduling_strategy="SPREAD")
    engines = [engine.remote(model=checkpoint, backend=backend) for _ in range(ENGINES)]
    ranks = [Trainer.options(scheduling_strategy="SPREAD").remote() for _ in range(RANKS)]
    address = ray.get(ranks[0].address.remote())
    ray.get([r.start.remote(n, address, checkpoint, overrides, engines) for n, r in enumerate(ranks)])
    random = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        prompts = torch.randint(1, 256, (GROUP, 5), generator=random).tolist()
        sequences = ray.get([ranks[0].rollout.remote(n, prompt) for n, prompt in enumerate(prompts)])
        print(f"step {step}:", ray.get([rank.step.remote(sequences) for rank in ranks])[0])
    ray.get([rank.stop.remote() for rank in ranks])
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
