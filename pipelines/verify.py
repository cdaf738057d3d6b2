"""Proof by digest: what the trainer's tensors hash to, against what an engine that can tell says that its weights do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stages.backends.base import Engine
from stages.base import Stage
from stages.digest import tensor_digest
from stages.errors import EngineError
from stages.flow import Group
from stages.run import Run

ROUTE = "/weightstream/digest"


class Expectation:
    """The digests of an update's tensors, taken from the trainer's side of the chain, not from the buckets that travel."""

    def __init__(self, stages: Sequence[Stage], run: Run) -> None:
        self._run = run
        self._makers = [s for s in stages if s.produces is Group]
        self._digests: dict[str, str] | None = None

    def compute(self) -> None:
        """One pass of its own over the tensors as they are. Collective over all trainer ranks, like any gather."""
        digests: dict[str, str] = {}
        items: Iterator[Any] = iter(())
        for stage in self._makers:
            items = stage(items, self._run)
        group: Group
        for group in items:
            for spec, tensor in zip(group.spec.tensors, group.tensors, strict=True):
                if not tensor.is_meta:  # a rank that holds no bytes takes part and has nothing to tell
                    digests[spec.name] = tensor_digest(tensor.to(spec.dtype))
        self._digests = digests

    def prove(self, engine: Engine) -> str | None:
        """ "digest" when the engine's own digests equal ours; None when it has no such route, or none were computed.

        Raises EngineError naming the first tensors that differ.
        """
        if self._digests is None:
            return None
        response = engine.api.raw("GET", ROUTE, "verify", engine.timeouts.put)
        if response.status_code == 404:
            return None
        try:
            theirs: dict[str, str] = response.json()["tensors"]
        except (ValueError, KeyError, TypeError) as error:
            raise engine.fail("verify", f"{ROUTE} answered {response.status_code}: {response.text[:200]}") from error
        wrong = [n for n, digest in self._digests.items() if theirs.get(n) != digest]
        if wrong:
            raise EngineError(
                engine.url,
                "verify",
                f"{len(wrong)} of {len(self._digests)} tensors differ from the trainer's, first {wrong[:3]}",
            )
        return "digest"
