"""Proof by digest: what the trainer's tensors hash to against what the engine says, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import xxhash
from support.chains import MIXED, group_of, make_run, raw, tensor_of
from support.fakes import FakeEngine, Toy, engines_of, updater_for
from support.httpd import Answer, Asked, Server
from support.httpd import server as server

from pipelines.updater import WeightUpdater
from pipelines.verify import ROUTE, Expectation
from stages.digest import bytes_digest, combine_digests, tensor_digest, weights_digest
from stages.errors import UpdateFailed
from stages.gather import GatherParams


def hashes(weights: dict[str, bytes]) -> dict[str, str]:
    return {name: xxhash.xxh3_128_hexdigest(data) for name, data in weights.items()}


@pytest.fixture
def updater(server: Server) -> Iterator[WeightUpdater]:
    """One fake engine that tells its digests over the server."""
    with updater_for([server.url], verify={"minimum": "digest", "probe": False}) as made:
        engine: FakeEngine = engines_of(made)[0]
        server.answers[ROUTE] = lambda asked: Answer(200, {"tensors": hashes(engine.weights)})
        yield made


def test_digests_that_agree_are_a_proof(updater: WeightUpdater) -> None:
    for value in (1.0, 2.0):
        assert updater.update(Toy(value)).engines[0].verified == "digest"


def test_success_with_something_else_in_memory_is_found_out(updater: WeightUpdater, server: Server) -> None:
    """An engine whose broadcast met no peer answers success over uninitialised memory; "the output changed" passes."""
    (engine,) = engines_of(updater)
    engine.script("verify", lambda: engine.weights.update({"norm.weight": b"garbage", "down.weight": b"stale"}))
    with pytest.raises(
        UpdateFailed, match=r"2 of 5 tensors differ from the trainer's, first \['down\.weight', 'norm\.weight'\]"
    ):
        updater.update(Toy(1.0))
    assert not engine.serving
    assert server.url in updater.tainted


def test_a_tensor_that_the_engine_does_not_have_differs(updater: WeightUpdater) -> None:
    (engine,) = engines_of(updater)
    engine.script("verify", lambda: engine.weights.pop("embed.weight"))
    with pytest.raises(UpdateFailed, match="1 of 5 tensors differ"):
        updater.update(Toy(1.0))


def test_tensors_that_only_the_engine_has_are_its_own(updater: WeightUpdater) -> None:
    (engine,) = engines_of(updater)
    engine.script("verify", lambda: engine.weights.update({"rotary": b"x"}))
    assert updater.update(Toy(1.0))


def test_an_engine_without_the_route_proves_less(updater: WeightUpdater, server: Server) -> None:
    del server.answers[ROUTE]
    with pytest.raises(UpdateFailed, match="proved only 'version', session.verify.minimum is 'digest'"):
        updater.update(Toy(1.0))


@pytest.mark.parametrize(
    "answer", [Answer(200, "<html>"), Answer(200, {}), Answer(200, []), Answer(500, "boom")], ids=str
)
def test_an_answer_that_is_none_is_an_error(updater: WeightUpdater, server: Server, answer: Answer) -> None:
    server.answers[ROUTE] = answer
    with pytest.raises(UpdateFailed, match=ROUTE):
        updater.update(Toy(1.0))


def test_nothing_is_asked_where_nothing_must_be_proved(server: Server) -> None:
    asked: list[Asked] = server.asked
    with updater_for([server.url], verify={"minimum": "version", "probe": False}) as updater:
        updater.update(Toy(1.0))
    assert asked == []


def test_digests_are_of_what_travels_not_of_what_the_trainer_stores() -> None:
    """Cast first: the engine has the narrow dtype."""
    run = make_run(MIXED)
    run.model = Toy(1.0 / 3.0)
    stage = GatherParams("bfloat16")
    run.gathered = tuple(stage.plan((), run))
    stage.prepare(run)
    expectation = Expectation([stage], run)
    expectation.compute()
    assert expectation._digests == hashes({n: raw(p.to(torch.bfloat16)) for n, p in run.model.named_parameters()})


# -- the functions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7)])
@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64, torch.bool], ids=str
)
def test_a_tensors_digest_is_that_of_its_contiguous_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = tensor_of(dtype, shape)
    assert tensor_digest(tensor) == xxhash.xxh3_128_hexdigest(raw(tensor))
    if tensor.dim() == 2:
        assert tensor_digest(tensor.t()) == xxhash.xxh3_128_hexdigest(raw(tensor.t()))


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20])
def test_a_buckets_digest_is_that_of_its_bytes(nbytes: int) -> None:
    memory = tensor_of(torch.uint8, (nbytes,))
    assert bytes_digest(memory) == xxhash.xxh3_64_intdigest(raw(memory))


def test_the_digest_of_a_set_knows_names_dtypes_and_shapes_but_no_order() -> None:
    group = group_of({"a": torch.zeros(4), "b": torch.ones(2, 2)})
    pairs: dict[str, Any] = dict(zip(("a", "b"), group.tensors, strict=True))
    whole = weights_digest(pairs.items())
    assert whole == weights_digest(reversed(pairs.items()))
    assert whole == combine_digests((n, t.dtype, tuple(t.shape), tensor_digest(t)) for n, t in pairs.items())
    others = [
        {"a": pairs["b"], "b": pairs["a"]},
        {"a": pairs["a"].view(2, 2), "b": pairs["b"]},
        {"a": pairs["a"].view(torch.int32), "b": pairs["b"]},
        {"a": pairs["a"], "c": pairs["b"]},
        {"a": pairs["a"]},
    ]
    assert len({whole, *(weights_digest(o.items()) for o in others)}) == 6
