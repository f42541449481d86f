"""A run in progress and its subscribers."""

from collections.abc import Callable
from dataclasses import replace

import anyio
import pytest

from policies.limits import StopReason
from proxy.agent.events import Emit, Event, TurnStarted
from proxy.agent.result import Result
from proxy.errors import RunCancelledError
from proxy.runs.run import MAX_BEHIND, RequestIdentity, Run, RunMetadata, Subscriber
from tests.fakes.results import SUBMITTED

RESULT = replace(SUBMITTED, answer="42", stop_reason=StopReason.ANSWERED)


class CountingWork:
    """Work that counts its finished turns."""

    def __init__(self, turns: int) -> None:
        self.done = 0
        self._turns = turns

    async def __call__(self, run: Run, emit: Emit) -> Result:
        for turn in range(1, self._turns + 1):
            await emit(TurnStarted(turn))
            self.done = turn
        return RESULT


def started(work: CountingWork, on_unsubscribed: Callable[[Run], None] = lambda run: None) -> Run:
    metadata = RunMetadata(id="r1", model="m", container_id="cntr_test", created=0)
    return Run(metadata, RequestIdentity(owner="o", fingerprint="f"), work, on_unsubscribed)


async def read_all(subscriber: Subscriber) -> list[Event]:
    events: list[Event] = []
    while new := await subscriber.events():
        events += new
    return events


async def test_each_subscriber_gets_all_events_even_if_it_subscribes_late() -> None:
    run = started(CountingWork(3))
    with anyio.fail_after(5), run.subscribe() as first:
        await run.wait_until_ended()
        with run.subscribe() as late:
            turns = [TurnStarted(1), TurnStarted(2), TurnStarted(3)]
            assert await read_all(first) == await read_all(late) == turns
    assert run.result() is RESULT


async def test_run_waits_until_its_only_subscriber_has_read_its_events() -> None:
    work = CountingWork(10 * MAX_BEHIND)
    run = started(work)
    with anyio.fail_after(5), run.subscribe() as subscriber:
        await anyio.wait_all_tasks_blocked()
        assert work.done == MAX_BEHIND - 1
        assert len(await subscriber.events()) == MAX_BEHIND
        await anyio.wait_all_tasks_blocked()
        assert work.done == 2 * MAX_BEHIND - 1
        await read_all(subscriber)
    assert work.done == 10 * MAX_BEHIND


async def test_run_does_not_wait_for_a_slow_subscriber_beside_a_fast_one() -> None:
    work = CountingWork(10 * MAX_BEHIND)
    run = started(work)
    with anyio.fail_after(5), run.subscribe() as slow, run.subscribe() as fast:
        assert len(await read_all(fast)) == 10 * MAX_BEHIND
        assert len(await read_all(slow)) == 10 * MAX_BEHIND


async def test_run_continues_when_the_subscriber_that_it_waits_for_leaves() -> None:
    work = CountingWork(10 * MAX_BEHIND)
    unsubscribed: list[Run] = []
    run = started(work, unsubscribed.append)
    with anyio.fail_after(5):
        with run.subscribe():
            await anyio.wait_all_tasks_blocked()
        assert unsubscribed == [run]
        await run.wait_until_ended()
    assert (work.done, run.status) == (10 * MAX_BEHIND, "completed")


async def test_subscribers_of_a_cancelled_run_are_notified() -> None:
    run = started(CountingWork(10 * MAX_BEHIND))
    with anyio.fail_after(5), run.subscribe() as subscriber:
        await anyio.wait_all_tasks_blocked()
        run.cancel("by hand")
        await read_all(subscriber)
    assert run.status == "cancelled"
    with pytest.raises(RunCancelledError):
        run.result()
