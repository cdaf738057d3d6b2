"""Optuna looks for the bucket size and the prefetch depth that move weights fastest; the engine starts once and stays up.

python tests/examples/optuna_sweep.py --trials 20 backend=sglang transport=ipc
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import optuna
import torch

from pipelines import WeightUpdater
from pipelines.config import build, load
from pipelines.launch import EngineLauncher
from pipelines.trainers.base import Trainer

UPDATES = 4  # per trial; the first one allocates and does not count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("overrides", nargs="*", help="settings that stay, as for run.py")
    arguments = parser.parse_args()
    settings = load(arguments.overrides)
    trainer = build(settings["trainer"], Trainer)
    launcher = EngineLauncher()
    try:
        backend = settings["backend"]["_target_"].rpartition(".")[2].lower()
        (url,) = launcher.start(trainer.reference, backend)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
        study.optimize(
            lambda trial: gb_per_s(trial, [*arguments.overrides, "engines=remote", f"engines.urls=[{url}]"], trainer),
            n_trials=arguments.trials,
        )
    finally:
        launcher.close()
    for trial in sorted(study.trials, key=lambda t: -t.value)[:5]:
        print(f"{trial.value:8.3f} GB/s  {' '.join(f'{key}={value}' for key, value in trial.params.items())}")


def gb_per_s(trial: optuna.Trial, overrides: list[str], trainer: Any) -> float:
    """The median rate of the warm updates with what this trial suggests."""
    capacity = trial.suggest_categorical("bucket.capacity", ["256KiB", "1MiB", "4MiB", "16MiB", "64MiB"])
    depth = trial.suggest_int("prefetch.depth", 1, 4)
    chosen = [f"bucket.capacity={capacity}", f"prefetch.depth={depth}", f"bucket.slots={depth + 1}"]
    with WeightUpdater.from_config([*overrides, *chosen], reference=trainer.reference) as updater:
        reports = [updater.update(trainer.source) for _ in range(UPDATES)]
    return median(report.gb_per_s for report in reports[1:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
