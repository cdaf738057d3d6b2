"""The stage contract: an object from an iterator to an iterator, which brackets each item it passes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from stages.errors import PlanMismatch
from stages.flow import Group, GroupSpec

if TYPE_CHECKING:
    from stages.run import Run


class Stage:
    """One step of a chain.

    `consumes`/`produces` are the classes of the items (None = nothing, for the first stage); a chain that cannot fit is
    refused when it is composed. Code before a `yield` runs on the way down, code after it once everything downstream is
    done with the item. What a stage yields it may reuse once resumed. Resources are released in `close`, or in the
    generator's `finally`.
    """

    consumes: ClassVar[type | None] = None
    produces: ClassVar[type | None] = None
    phase: ClassVar[str | None] = None  # the report column that this stage's own time counts to

    def open(self, run: Run) -> None:
        """Acquire what lives over many updates. Called once, before the first update."""

    def close(self) -> None:
        """Release it. Called once, also after errors; must not raise for a stage that never opened."""

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        """What this stage will make of groups with these specs. Pure; called whenever the metadata changed."""
        return specs

    def prepare(self, run: Run) -> None:
        """Get ready for `run.plan` before any engine is paused: allocate, connect. Collective over all trainer ranks."""

    def __call__(self, items: Iterator[Any], run: Run) -> Iterator[Any]:
        raise NotImplementedError

    def abort(self) -> None:
        """The update is given up: wake whoever waits inside this stage. May come from another thread."""

    def committed(self, version: str) -> None:
        """The update was committed on all required engines; a stage that keeps a base advances it now."""

    def aborted(self) -> None:
        """The update failed; a stage that keeps a base forgets what it prepared."""


class GroupMapper(Stage):
    """A stage of one function: give it the specs, it maps the groups accordingly."""

    consumes = Group
    produces = Group

    def __init__(self) -> None:
        self._mapped: dict[GroupSpec, GroupSpec | None] = {}

    def map_spec(self, spec: GroupSpec) -> GroupSpec | None:
        """The group that comes out for this one, or None to drop it."""
        return spec

    def map_group(self, group: Group, spec: GroupSpec) -> Group:
        """The tensors that go with `spec`. The default keeps them, which is right for a rename."""
        return Group(spec, group.tensors)

    def plan(self, specs: Iterable[GroupSpec], run: Run) -> Iterable[GroupSpec]:
        self._mapped = {spec: self.map_spec(spec) for spec in specs}
        return [out for out in self._mapped.values() if out is not None]

    def __call__(self, items: Iterator[Group], run: Run) -> Iterator[Group]:
        for group in items:
            if group.spec not in self._mapped:
                names = [t.name for t in group.spec.tensors]
                raise PlanMismatch(f"group {names} streamed by {type(self).__name__}, which had not planned it")
            out = self._mapped[group.spec]
            if out is not None:
                yield self.map_group(group, out)


class Rename(GroupMapper):
    """Base class of name mappers: override `rename`, which returns the new HF name, or None to drop the tensor."""

    def rename(self, name: str) -> str | None:
        raise NotImplementedError

    def map_spec(self, spec: GroupSpec) -> GroupSpec | None:
        kept = [(t, self.rename(t.name)) for t in spec.tensors]
        tensors = tuple(replace(t, name=new) for t, new in kept if new is not None)
        names = {t.name: new for t, new in kept}
        aliases = tuple(
            (new, target)
            for alias, old in spec.aliases
            if (new := self.rename(alias)) is not None and (target := names.get(old)) is not None
        )
        return GroupSpec(tensors, aliases) if tensors else None

    def map_group(self, group: Group, spec: GroupSpec) -> Group:
        if len(spec.tensors) == len(group.tensors):
            return Group(spec, group.tensors)
        kept = tuple(
            t for t, s in zip(group.tensors, group.spec.tensors, strict=True) if self.rename(s.name) is not None
        )
        return Group(spec, kept)
