"""Entry point of group `vllm.general_plugins`: makes the weight-transfer backend "weightstream" known to vLLM.

vLLM calls `register` in each of its processes. It stays light: the engine class is imported when a worker asks for it.
"""

from __future__ import annotations

import contextlib

BACKEND = "weightstream"


def register() -> None:
    """Register the backend once. Raises ImportError when other packages named `stages` or `pipelines` are in the way."""
    _check_packages()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # registered already: plug-ins are loaded more than once per process
        WeightTransferEngineFactory.register_engine(BACKEND, "pipelines.vllm_engine", "WeightstreamEngine")


def _check_packages() -> None:
    """`stages` and `pipelines` are common names: say so when an engine's environment has others of that name."""
    import importlib.util

    for name in ("stages.receiver", "pipelines.vllm_engine"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            package = name.partition(".")[0]
            other = importlib.util.find_spec(package)
            where = other.origin if other is not None else "nowhere"
            raise ImportError(
                f"weightstream's package {package!r} is hidden by another one of that name ({where}); "
                f"remove it from the path of vLLM's environment"
            )
