"""Which engine a test needs: `@serve(Served("sglang", tp=2))` gives it the fixture `server`."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from .checkpoints import Recipe

FP32 = Recipe(dtype="float32")  # what transformers can be compared with to many digits
PLUGIN = ("--weight-transfer-config", '{"backend": "weightstream"}')  # vLLM with our receiver in its workers
READ, CONTROL = "key-for-reading", "key-for-control"


@dataclass(frozen=True)
class Served:
    """An engine, the checkpoint it starts from and its options; tests that name equal ones share a server."""

    name: str
    recipe: Recipe = field(default_factory=Recipe)
    tp: int = 1
    extra: tuple[str, ...] = ()
    api_key: str | None = None
    admin_key: str | None = None

    def __str__(self) -> str:
        parts = [self.name, f"tp{self.tp}", str(self.recipe)]
        if self.api_key or self.admin_key:
            parts.append("keys")
        return "-".join([*parts, *(option.lstrip("-") for option in self.extra[:1])])


def serve(*served: Served) -> pytest.MarkDecorator:
    """Run the test once with each of these."""
    return pytest.mark.parametrize("server", served, indirect=True, ids=str)
