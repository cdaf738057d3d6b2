"""Whether torchrun, or a launcher that sets the same variables, has started us beside other ranks. Imports nothing heavy."""

from __future__ import annotations

import os

from stages.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ranks() -> int:
    """How many ranks there are; 1 where nobody started others."""
    return _number("WORLD_SIZE") if all(name in os.environ for name in _VARIABLES) else 1


def rank() -> int:
    """Which of them this process is."""
    return _number("RANK") if ranks() > 1 else 0


def _number(variable: str) -> int:
    try:
        return int(os.environ[variable])
    except ValueError:
        raise ConfigError(
            f"{variable}={os.environ[variable]!r} in the environment is not a number\n"
            f"  unset {variable}, or start the ranks with torchrun"
        ) from None
