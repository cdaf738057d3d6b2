"""The token loop: requests take turns, pauses keep what they promise, cached prefixes are really reused."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from pipelines.engine.generation import Generation
from pipelines.engine.model import ServedModel
from pipelines.engine.prefix import BLOCK, PrefixCache
from pipelines.engine.scheduler import Scheduler
from tests.engine.checkpoints import Folders, tensors_of
from tests.engine.client import LONG_PROMPT, PROMPT, wait_until


class Loop:
    """A scheduler on a tiny model."""

    def __init__(self, folder: str) -> None:
        self.model = ServedModel(folder, "auto", "cpu")
        self.fatal: str | None = None
        self.deaths: list[str] = []
        self.scheduler = Scheduler(self.model, PrefixCache(64), lambda: self.fatal, self.deaths.append)

    def begin(self, limit: int, prompt: list[int] = PROMPT, rid: str = "r") -> Generation:
        generation = Generation(rid, prompt, limit)
        self.scheduler.submit(generation)
        return generation

    def finish(self, generation: Generation) -> Generation:
        assert generation.done.wait(30)
        return generation

    def run(self, limit: int, prompt: list[int] = PROMPT) -> Generation:
        return self.finish(self.begin(limit, prompt))

    def load(self, folder: object) -> None:
        with self.scheduler.exclusive():
            for name, tensor in tensors_of(folder).items():  # type: ignore[arg-type]
                self.model.weights.apply(name, tensor)


@pytest.fixture
def loop(folders: Folders) -> Iterator[Loop]:
    made = Loop(str(folders.qwen3_a))
    yield made
    made.scheduler.fail("the test is over")
    made.scheduler.stop()


def greedy(model: ServedModel, prompt: list[int], limit: int) -> list[int]:
    """The same tokens without a cache."""
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(int(model.forward(tokens, model.new_cache()).argmax()))
    return tokens[len(prompt) :]


def test_generation_is_greedy_decoding(loop: Loop) -> None:
    done = loop.run(6)
    assert done.output == greedy(loop.model, PROMPT, 6)
    assert done.finish == "length"
    assert len(done.logprobs) == 6
    assert all(p <= 0 for p in done.logprobs)


def test_generation_ends_at_an_end_token(loop: Loop) -> None:
    third = greedy(loop.model, PROMPT, 3)[2]
    generation = Generation("r", PROMPT, 50, end_tokens=frozenset({third}))
    loop.scheduler.submit(generation)
    done = loop.finish(generation)
    assert done.finish == "stop"
    assert done.output[-1] == third


def test_sampling_with_a_seed_repeats(loop: Loop) -> None:
    outputs = []
    for _ in range(2):
        generation = Generation("r", PROMPT, 8, 1.5, generator=torch.Generator().manual_seed(3))
        loop.scheduler.submit(generation)
        outputs.append(loop.finish(generation).output)
    assert outputs[0] == outputs[1]
    assert outputs[0] != greedy(loop.model, PROMPT, 8)


def test_requests_take_turns(loop: Loop) -> None:
    long = loop.begin(400)
    short = loop.begin(5, LONG_PROMPT)
    loop.finish(short)
    assert not long.done.is_set()
    assert short.output == greedy(loop.model, LONG_PROMPT, 5)


def test_a_frozen_request_continues_where_it_was_with_the_old_kv(loop: Loop, folders: Folders) -> None:
    loop.scheduler.version = "a"
    request = loop.begin(300)
    wait_until(lambda: len(request.output) > 5)
    loop.scheduler.freeze()
    so_far = list(request.output)
    kv = request.kv
    loop.load(folders.qwen3_b)
    loop.scheduler.version = "b"
    assert request.output == so_far
    loop.scheduler.thaw()
    wait_until(lambda: len(request.output) > len(so_far))
    assert request.kv is kv
    done = loop.finish(request)
    assert done.output[: len(so_far)] == so_far
    cut = len(so_far)
    assert done.spans() == [{"version": "a", "start": 0, "end": cut}, {"version": "b", "start": cut, "end": 300}]


def test_a_retracted_request_recomputes_its_kv_under_the_new_weights(loop: Loop, folders: Folders) -> None:
    request = loop.begin(200)
    wait_until(lambda: len(request.output) > 3)
    loop.scheduler.freeze()
    loop.scheduler.retract()
    assert request.kv is None
    assert list(loop.scheduler.waiting) == [request]
    so_far = list(request.output)
    loop.load(folders.qwen3_b)
    loop.scheduler.flush()
    loop.scheduler.thaw()
    done = loop.finish(request)
    other = ServedModel(str(folders.qwen3_b), "auto", "cpu")
    assert done.output[len(so_far)] == greedy(other, PROMPT + so_far, 1)[0]
    assert done.retractions == 1


def test_aborted_requests_return_what_they_have(loop: Loop) -> None:
    first, second = loop.begin(500, rid="one"), loop.begin(500, rid="two")
    wait_until(lambda: len(first.output) > 2)
    assert loop.scheduler.abort(["one"]) == 1
    assert loop.finish(first).finish == "abort"
    assert 2 < len(first.output) < 500
    assert not second.done.is_set()
    assert loop.scheduler.abort() == 1


def test_draining_finishes_what_runs_and_admits_nothing(loop: Loop) -> None:
    running = loop.begin(100)
    wait_until(lambda: bool(running.output))
    drain = threading.Thread(target=loop.scheduler.drain)
    drain.start()
    wait_until(lambda: not loop.scheduler.admitting)
    late = loop.begin(1)
    drain.join(30)
    assert running.finish == "length"
    assert not late.done.is_set()
    loop.scheduler.thaw()
    assert loop.finish(late).finish == "length"


def test_no_forward_pass_runs_while_weights_are_written(loop: Loop) -> None:
    request = loop.begin(400)
    wait_until(lambda: bool(request.output))
    with loop.scheduler.exclusive():
        before = len(request.output)
        threading.Event().wait(0.1)
        assert len(request.output) == before
        with pytest.raises(TimeoutError), loop.scheduler.exclusive(timeout=0.05):
            pass
    wait_until(lambda: len(request.output) > before)


def test_a_repeated_prompt_reuses_whole_blocks_of_kv(loop: Loop) -> None:
    first = loop.run(4, LONG_PROMPT)
    again = loop.run(4, LONG_PROMPT)
    assert (first.cached_tokens, again.cached_tokens) == (0, 2 * BLOCK)
    assert again.output == first.output
    torch.testing.assert_close(again.logprobs, first.logprobs, atol=1e-4, rtol=1e-4)


def test_without_a_flush_a_new_model_answers_from_the_old_model_s_kv(loop: Loop, folders: Folders) -> None:
    loop.run(4, LONG_PROMPT)
    loop.load(folders.qwen3_b)
    stale = loop.run(4, LONG_PROMPT)
    loop.scheduler.flush()
    fresh = loop.run(4, LONG_PROMPT)
    other = ServedModel(str(folders.qwen3_b), "auto", "cpu")
    assert fresh.output == greedy(other, LONG_PROMPT, 4)
    assert stale.logprobs != fresh.logprobs
    assert stale.cached_tokens == 2 * BLOCK
    assert fresh.cached_tokens == 0


def test_the_prefix_cache_forgets_the_oldest(loop: Loop) -> None:
    cache = PrefixCache(2)
    layers = [(torch.rand(1, 2, 48, 4), torch.rand(1, 2, 48, 4))]
    cache.insert(list(range(48)), layers)
    assert len(cache) == 2
    assert cache.match(list(range(48)), 48) == []
    cache.insert(list(range(16)), layers)
    assert len(cache.match(list(range(16)), 16)) == 1


def test_where_a_real_engine_would_die_every_request_fails(loop: Loop) -> None:
    request = loop.begin(500)
    wait_until(lambda: bool(request.output))
    loop.fatal = "weights on meta"
    assert loop.finish(request).error == "weights on meta"
    assert loop.run(1).error == "weights on meta"
    assert loop.deaths == ["weights on meta"]
