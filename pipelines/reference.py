"""Which checkpoint says what an engine expects: the configured one, the one the engine names, or the caller's."""

from __future__ import annotations

import logging
from pathlib import Path

from stages.backends.base import Engine
from stages.errors import ConfigError, EngineError
from stages.gather.checkpoint import Checkpoint

log = logging.getLogger("weightstream")


class References:
    """Finds and keeps the checkpoint of each engine, anew when an engine restarted.

    `configured` (session.reference) holds for all engines. Else an engine's own word counts, if we can see that folder; only
    then `fallback`, which the caller vouches for: an engine may serve something else than the trainer started from.

    Raises ConfigError for a given folder that is no checkpoint, even where an engine's own word makes it needless.
    """

    def __init__(self, configured: str | Path | None, fallback: str | Path | None) -> None:
        self._configured = Checkpoint(configured) if configured is not None else None
        self._fallback = Checkpoint(fallback) if fallback is not None else None
        self._by_folder: dict[str, Checkpoint] = {}
        self._by_engine: dict[str, tuple[str, Checkpoint | None]] = {}  # URL -> (incarnation, checkpoint)

    def of(self, engine: Engine) -> Checkpoint | None:
        """The checkpoint to hold updates of this engine against; None where nobody knows."""
        if self._configured is not None:
            return self._configured
        incarnation, checkpoint = self._by_engine.get(engine.url, ("?", None))
        if incarnation != engine.state.incarnation:
            checkpoint = self._find(engine)
            self._by_engine[engine.url] = (engine.state.incarnation, checkpoint)
        return checkpoint

    def open(self, folder: str) -> Checkpoint:
        """The checkpoint of a folder, its headers read once."""
        if folder not in self._by_folder:
            self._by_folder[folder] = Checkpoint(folder)
        return self._by_folder[folder]

    def _find(self, engine: Engine) -> Checkpoint | None:
        try:
            named = engine.model_path()
        except EngineError:
            named = None
        if named and (Path(named) / "config.json").is_file():
            try:
                found = self.open(named)
            except ConfigError as error:
                log.warning("engine %s serves %s, which cannot be read: %s", engine.url, named, error)
            else:
                if self._fallback is not None and self._fallback.specs != found.specs:
                    log.info(
                        "engine %s serves %s, whose tensors differ from those of reference=%s; the engine's word counts",
                        engine.url,
                        named,
                        self._fallback.folder,
                    )
                return found
        if self._fallback is None:
            log.warning(
                "engine %s: nothing says what it expects, so preflight cannot check; set session.reference to its "
                "checkpoint folder",
                engine.url,
            )
            return None
        if named is None or not Path(named).is_dir():
            log.info(
                "engine %s names no checkpoint that is visible here; compared with %s",
                engine.url,
                self._fallback.folder,
            )
        return self._fallback
