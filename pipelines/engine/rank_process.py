"""The process of a rank above 0. Loads nothing heavy before it watches its parent, so that it never outlives it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait


def serve_rank(pipe: Connection, backend: str, rank: int) -> None:
    """Answer `(method, arguments)` with `(True, result)` or `(False, words)` until the parent is gone.

    The first call is `load`, with the arguments of `Weights.replica` and the model type.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from pipelines.engine.loading import make_loader
    from pipelines.engine.loading.base import Loader
    from pipelines.engine.weights import Weights

    loader: Loader | None = None
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            if method == "load":
                folder, dtype, device, tied, model_type = args
                weights = Weights.replica(folder, dtype, device, tied)
                loader = make_loader(backend, rank, weights, torch.device(device), model_type)
                pipe.send((True, None))
            else:
                pipe.send((True, getattr(loader, method)(*args)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
