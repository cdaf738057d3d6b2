"""How ranks agree: values, errors, absence. Two real processes; whole updates over ranks are in tests/faults."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from support.processes import Outcome, Pool

from stages.comm import Comm
from stages.errors import RemoteRankError, WaitTimeout


def meet_values(rank: int) -> list[Any]:
    comm = Comm.from_torch(20.0)
    comm.begin(1)
    values = [{"rank": rank}, [rank, None], "", 0, False, "ä\n", rank / 3]
    return [comm.meet("a value", v) for v in values] + [comm.meet("nothing")]


def test_every_rank_gets_every_value(pair: Pool) -> None:
    zero, one = (o.value for o in pair.each(meet_values))
    assert zero == one
    assert zero[0] == [{"rank": 0}, {"rank": 1}]
    assert zero[1] == [[0, None], [1, None]]
    assert zero[2:6] == [["", ""], [0, 0], [False, False], ["ä\n", "ä\n"]]
    assert zero[7] == [None, None]


def meet_often(rank: int) -> int:
    import torch.distributed as dist

    comm = Comm.from_torch(10.0)
    shared = dist.distributed_c10d._get_default_store()
    comm.begin(1)
    for i in range(3):
        comm.meet("warm up", i)
    before = shared.num_keys()
    for i in range(60):
        assert comm.meet("again", [i, rank]) == [[i, 0], [i, 1]]
    return shared.num_keys() - before


def test_meetings_leave_no_keys_behind(pair: Pool) -> None:
    outcomes = pair.each(meet_often)
    assert all(o.value <= 4 for o in outcomes), outcomes


def fail_on(rank: int, *failing: int) -> None:
    comm = Comm.from_torch(20.0)
    comm.begin(1)
    comm.meet("before")
    with comm.together("work"):
        if rank in failing:
            raise LookupError(f"the cause on rank {rank}")


@pytest.mark.parametrize("failing", [0, 1])
def test_one_ranks_error_is_everyones(pair: Pool, failing: int) -> None:
    outcomes = pair.each(fail_on, failing)
    assert outcomes[failing].error == "LookupError"
    other = outcomes[1 - failing]
    assert other.error == "RemoteRankError"
    assert other.text == f"trainer rank {failing} failed: LookupError: the cause on rank {failing}"


def test_of_several_errors_the_lowest_ranks_counts(pair: Pool) -> None:
    zero, one = pair.each(fail_on, 0, 1)
    assert str(zero) == "LookupError: the cause on rank 0"
    assert one.error == "RemoteRankError"
    assert "the cause on rank 0" in one.text


def interrupted(rank: int) -> float:
    comm = Comm.from_torch(20.0)
    comm.begin(1)
    started = time.monotonic()
    try:
        with comm.together("work"):
            if rank == 1:
                raise KeyboardInterrupt
    except (KeyboardInterrupt, RemoteRankError):
        return time.monotonic() - started
    raise AssertionError("nothing was raised")


def test_an_interrupt_is_told_and_waits_for_nobody(pair: Pool) -> None:
    assert all(o.value < 10.0 for o in pair.each(interrupted))


def miss_a_meeting(rank: int) -> str:
    comm = Comm.from_torch(0.7)
    comm.begin(1)
    comm.meet("before")
    words = ""
    if rank == 0:
        with pytest.raises(WaitTimeout) as caught:
            comm.meet("the meeting")
        words = str(caught.value)
    else:
        time.sleep(1.5)
    comm.timeout = 30.0
    comm.begin(2)  # the next update: both are back
    assert comm.meet("after", rank) == [0, 1]
    return words


def test_who_did_not_come_is_named_and_the_next_update_meets_again(pair: Pool) -> None:
    words = pair.each(miss_a_meeting)[0].value
    assert words.startswith("trainer ranks [1] did not reach 'the meeting' within 0.7 s (session.timeouts.agree)")


def come_late(rank: int) -> str:
    """Rank 1 arrives when rank 0 has given up: it must not think that they met."""
    comm = Comm.from_torch(0.5)
    comm.begin(1)
    if rank == 1:
        time.sleep(1.3)
    words = []
    for what in ("first", "second"):
        try:
            comm.meet(what)
            words.append("met")
        except WaitTimeout:
            words.append("timeout")
            break
    comm.timeout = 30.0
    comm.begin(2)
    comm.meet("after")
    return " ".join(words)


def test_a_late_rank_meets_nobody(pair: Pool) -> None:
    zero, one = (o.value for o in pair.each(come_late))
    assert zero == "timeout"
    assert one.endswith("timeout")


def part_ways(rank: int) -> None:
    """Rank 0 waits at one place while rank 1 fails at another."""
    comm = Comm.from_torch(20.0)
    comm.begin(1)
    if rank == 0:
        comm.meet("bucket ready")
    else:
        comm.meet("finish", error=LookupError("elsewhere"))


def test_ranks_that_parted_ways_hear_of_errors(pair: Pool) -> None:
    zero, one = pair.each(part_ways)
    assert (zero.error, one.error) == ("RemoteRankError", "LookupError")
    assert "elsewhere" in zero.text


def agreed_once(rank: int) -> list[str]:
    """An error that every rank has heard of passes the outer brackets as it is, without another meeting."""
    comm = Comm.from_torch(20.0)
    comm.begin(1)
    seen = []
    try:
        with comm.together("outer"), comm.together("middle"), comm.together("inner"):
            if rank == 1:
                raise LookupError("root")
    except Exception as error:
        seen.append(f"{type(error).__name__}: {error}")
    return [*seen, str(comm._meetings)]


def test_an_agreed_error_is_not_met_again(pair: Pool) -> None:
    zero, one = (o.value for o in pair.each(agreed_once))
    assert zero == ["RemoteRankError: trainer rank 1 failed: LookupError: root", "1"]
    assert one == ["LookupError: root", "1"]


def several_comms(rank: int) -> list[Any]:
    """A second updater in one job, after one that failed and was thrown away."""
    first = Comm.from_torch(20.0)
    first.begin(1)
    first.meet("a")
    try:
        with first.together("b"):
            if rank == 0:
                raise LookupError
    except Exception:
        pass
    second, third = Comm.from_torch(20.0), Comm.from_torch(2.0)
    for comm in (second, third):
        comm.begin(1)
    got = []
    for i in range(3):
        got.append(third.meet("x", [i, rank]))
        got.append(second.meet("y", i))
    return got


def test_two_updaters_in_one_job_do_not_hear_each_other(pair: Pool) -> None:
    zero, one = pair.each(several_comms)
    assert zero.error is None, zero.trace
    assert zero.value == one.value
    assert zero.value[0] == [[0, 0], [0, 1]]


# -- alone --------------------------------------------------------------------------------------------------------


def test_one_rank_meets_itself_at_once() -> None:
    comm = Comm()
    assert comm.is_head
    assert comm.meet("x", {"a": 1}) == [{"a": 1}]
    with pytest.raises(LookupError), comm.together("x"):
        raise LookupError
    with pytest.raises(KeyboardInterrupt), comm.together("x"):
        raise KeyboardInterrupt


def test_several_ranks_need_a_store() -> None:
    with pytest.raises(ValueError, match="needs a store"):
        Comm(0, 2)


def test_without_a_process_group_a_process_is_alone() -> None:
    assert Comm.from_torch().world_size == 1


class Gone:
    """A store whose process has died."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def gone(*args: Any) -> Any:
            raise RuntimeError("Broken pipe")

        return gone


def test_a_lost_store_is_an_error_of_ours_and_hides_no_cause() -> None:
    comm = Comm(1, 2, Gone())  # type: ignore[arg-type]
    with pytest.raises(WaitTimeout, match=r"holds torch\.distributed's store, usually rank 0, does not answer"):
        comm.meet("x")
    with pytest.raises(LookupError):
        comm.meet("x", error=LookupError())


def test_outcomes_print_themselves() -> None:
    assert str(Outcome(value=3)) == "returned 3"
