"""Events of a sandbox's connections: emitted when they close, or at the end of the run."""

import logging
from dataclasses import replace

import pytest

from policies.hosts import Target
from policies.profile import Profile
from policies.rules import Rule, RuleSet
from proxy.agent.events import EgressDecided, RuleMatched
from proxy.agent.guard import MAX_EMITTED, PERIOD_S, STILL_OPEN, EgressWatch
from sandbox_runtime.egress.decision import Decision
from tests.fakes.tasks import make_task
from tests.proxy.agent.runs import USER, Events, MemoryArtifactStore

ORDERS, DATA = Target("orders.example.com", 443), Target("data.example.com", 443)
RULE = Rule("orders", "egress", "^orders", "deny", "no orders")


def decision(target: Target, reason: str = "") -> Decision:
    return Decision(target.host, target.port, "allowed", reason, 0, 0, 0.0)


async def test_event_of_an_open_connection_is_emitted_at_the_end_of_the_run() -> None:
    events = Events()
    watch = EgressWatch(make_task("r", MemoryArtifactStore(), "m", [USER]), events)
    assert [await watch.check_target(target) for target in (DATA, DATA, ORDERS)] == [None] * 3
    await watch.on_decision(decision(DATA))
    await watch.flush()
    assert events == [
        EgressDecided(decision(DATA)),
        EgressDecided(decision(DATA, STILL_OPEN)),
        EgressDecided(decision(ORDERS, STILL_OPEN)),
    ]


async def test_egress_rule_still_applies_but_emits_no_event_after_the_end_of_the_run() -> None:
    events = Events()
    profile = Profile(watch=RuleSet((RULE,)))
    watch = EgressWatch(make_task("r", MemoryArtifactStore(), "m", [USER], profile=profile), events)
    refusal = "rule orders forbids this: no orders"
    assert await watch.check_target(ORDERS) == refusal
    watch.close()
    assert await watch.check_target(ORDERS) == refusal
    assert events == [RuleMatched("orders", "deny", "egress", str(ORDERS), "no orders")]


async def test_connections_that_are_refused_or_made_after_the_run_do_not_count_as_open() -> None:
    events = Events()
    watch = EgressWatch(
        make_task("r", MemoryArtifactStore(), "m", [USER], profile=Profile(watch=RuleSet((RULE,)))),
        events,
    )
    await watch.check_target(ORDERS)
    await watch.on_decision(replace(decision(ORDERS), verdict="denied"))
    before = list(events)
    await watch.flush()
    assert events == before
    watch.close()
    assert await watch.check_target(DATA) is None
    await watch.on_decision(decision(DATA))
    await watch.flush()
    assert events == before


MANY = 100_000


@pytest.mark.parametrize(
    "failed",
    [
        Decision(
            "evil.example.com", 443, "denied", "host evil.example.com is not allowed", 0, 0, 0
        ),
        Decision("evil.example.com", 443, "allowed", "cannot connect to evil.example.com", 0, 0, 0),
    ],
    ids=["refused", "unreachable"],
)
async def test_frequent_failed_connections_are_summarized(
    failed: Decision, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    events = Events()
    watch = EgressWatch(make_task("r", MemoryArtifactStore(), "m", [USER]), events, lambda: now)
    with caplog.at_level(logging.INFO):
        for _ in range(MANY):
            await watch.on_decision(failed)
        await watch.on_decision(decision(DATA))  # successful connections are always emitted
        now = PERIOD_S
        await watch.on_decision(failed)
        for _ in range(MANY):
            await watch.on_decision(failed)
        await watch.flush()
        await watch.on_decision(failed)
        watch.close()
    decisions = [event.decision for event in events if isinstance(event, EgressDecided)]
    first, second = (
        Decision("", 0, "denied", f"and {count} more connections that failed", 0, 0, 0.0)
        for count in (MANY - MAX_EMITTED, MANY + 1 - MAX_EMITTED)
    )
    emitted = [failed] * MAX_EMITTED
    assert decisions == [*emitted, decision(DATA), first, *emitted, second]
    assert len(caplog.records) == len(decisions) + 1
    assert "and 1 more connections" in caplog.messages[-1]


async def test_frequent_rule_matches_are_summarized() -> None:
    events = Events()
    profile = Profile(watch=RuleSet((RULE,)))
    watch = EgressWatch(make_task("r", MemoryArtifactStore(), "m", [USER], profile=profile), events)
    refusals = {await watch.check_target(ORDERS) for _ in range(MANY)}
    await watch.flush()
    match = RuleMatched("orders", "deny", "egress", str(ORDERS), "no orders")
    assert refusals == {"rule orders forbids this: no orders"}
    assert events == [
        *[match] * MAX_EMITTED,
        replace(match, subject=f"and {MANY - MAX_EMITTED} more"),
    ]


async def test_rule_matches_beyond_the_event_limit_are_logged_if_no_summary_event_was_emitted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    profile = Profile(watch=RuleSet((RULE,)))
    task = make_task("r", MemoryArtifactStore(), "m", [USER], profile=profile)
    watch = EgressWatch(task, Events())
    for _ in range(MAX_EMITTED + 3):
        await watch.check_target(ORDERS)
    with caplog.at_level(logging.INFO):
        watch.close()
    assert caplog.messages == ["run r egress rule orders matched 3 more times"]
