"""The rules of a run's profile, the redaction of secrets, and the log of the sandbox's network
connections."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from policies.artifacts import ProducedFile
from policies.hosts import Target
from policies.profile import Profile
from policies.redaction import SecretFinder
from policies.rules import MAX_SUBJECT_CHARS, RuleTarget, rule_subject
from policies.workspace import ANSWER_FILES
from proxy.agent.events import EgressDecided, Emit, Event, RuleMatched
from proxy.agent.result import RunWarning
from proxy.agent.task import AgentTask
from sandbox_runtime.egress.decision import Decision

log = logging.getLogger(__name__)
STILL_OPEN = "still open when the run ended"
MAX_EMITTED, PERIOD_S = 50, 60.0
"""Maximum number of events about failed connections, and about each rule, in each period of
PERIOD_S seconds."""


class Guard:
    """Applies the rules of the profile to one run. Each match is emitted as a RuleMatched before
    the run acts."""

    def __init__(self, profile: Profile, emit: Emit) -> None:
        self._rules = profile.watch
        self._secrets = SecretFinder(profile.redaction)
        self._emit = emit

    async def refusal(self, tool_name: str, arguments: object) -> str | None:
        """Return the observation for a call that a rule denies, or None if the call is allowed."""
        act = rule_subject(tool_name, arguments) if isinstance(arguments, Mapping) else None
        refused = await self._refusal(*act) if act else None
        return f"Nothing was done: {refused}." if refused else None

    async def egress_refusal(self, target: Target) -> str | None:
        """Return the reason for which a rule denies a connection, or None if the connection is
        allowed."""
        return await self._refusal("egress", str(target))

    async def withheld_files(self, files: Sequence[ProducedFile]) -> dict[str, RunWarning]:
        """Return a warning for each file that a rule withholds, by path. Answer files are never
        withheld."""
        warnings = {}
        for file in files:
            if file.path in ANSWER_FILES:
                continue
            if refused := await self._refusal("file", file.path):
                message = f"The file {file.path} is withheld: {refused}."
                warnings[file.path] = RunWarning("file_withheld", message)
        return warnings

    def redact(self, text: str) -> str:
        """Return a text without secrets."""
        return self._secrets.redact(text)

    async def _refusal(self, rule_target: RuleTarget, subject: str) -> str | None:
        rule = self._rules.first_match(rule_target, subject)
        if rule is None:
            return None
        shown = subject[:MAX_SUBJECT_CHARS]
        await self._emit(RuleMatched(rule.name, rule.action, rule.target, shown, rule.reason))
        return rule.refusal


def redact_json(value: Any, secrets: SecretFinder) -> Any:
    """Return a JSON value without secrets in its strings and in the keys of its objects. Raises
    RecursionError if the value has too many levels."""
    if isinstance(value, str):
        return secrets.redact(value)
    if isinstance(value, Mapping):
        return {
            redact_json(key, secrets): redact_json(item, secrets) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_json(item, secrets) for item in value]
    return value


class EgressWatch:
    """Emits and logs the network connections of one run's sandbox.

    Failed connections are cheap for a program, so only the first MAX_EMITTED in a period are
    emitted one by one. One event summarizes the others.
    """

    def __init__(
        self, task: AgentTask, emit: Emit, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_id = task.run_id
        self._guard = Guard(task.profile, self._on_rule_matched)
        self._emit: Emit | None = emit
        self._now = now
        self._open_connections = Counter[Target]()
        self._failure_throttle = Throttle(MAX_EMITTED, PERIOD_S)
        self._rule_throttles: dict[str, tuple[Throttle, RuleMatched]] = {}
        """Throttle and last event of each rule, by name."""

    async def check_target(self, target: Target) -> str | None:
        """Return the reason for which a rule denies a connection that the network policy allows, or
        None if no rule does."""
        refused = await self._guard.egress_refusal(target)
        if refused is None and self._emit is not None:
            self._open_connections[target] += 1
        return refused

    async def on_decision(self, decision: Decision) -> None:
        """Record a connection that is closed, or was refused."""
        target = Target(decision.host, decision.port)
        if self._open_connections[target] > 1:
            self._open_connections[target] -= 1
        else:
            self._open_connections.pop(target, None)
        if _is_failed_connection(decision):
            suppressed = self._failure_throttle.start_period_if_due(self._now())
            await self._emit_failure_summary(suppressed)
            if not self._failure_throttle.try_acquire():
                return
        await self._emit_decision(decision)

    async def flush(self) -> None:
        """Emit the connections that are still open, and summaries of the failed connections and of
        the rule matches that were suppressed."""
        await self._emit_failure_summary(self._failure_throttle.take_suppressed_count())
        for throttle, event in self._rule_throttles.values():
            await self._emit_rule_summary(event, throttle.take_suppressed_count())
        for target in list(self._open_connections.elements()):
            decision = Decision(target.host, target.port, "allowed", STILL_OPEN, 0, 0, 0.0)
            await self._emit_event(EgressDecided(decision))

    def close(self) -> None:
        """Stop emitting, because the run is over. Later connections are only logged."""
        self._emit = None
        self._open_connections.clear()
        if count := self._failure_throttle.take_suppressed_count():
            self._log(_failure_summary(count))
        for name, (throttle, _) in self._rule_throttles.items():
            if count := throttle.take_suppressed_count():
                log.info("run %s egress rule %s matched %d more times", self._run_id, name, count)

    async def _on_rule_matched(self, event: Event) -> None:
        """Emit a rule that a connection matched, unless the rule has matched too often in the
        period."""
        assert isinstance(event, RuleMatched)
        throttle, _ = self._rule_throttles.get(event.rule) or (
            Throttle(MAX_EMITTED, PERIOD_S),
            event,
        )
        self._rule_throttles[event.rule] = (throttle, event)
        await self._emit_rule_summary(event, throttle.start_period_if_due(self._now()))
        if throttle.try_acquire():
            await self._emit_event(event)

    async def _emit_rule_summary(self, event: RuleMatched, count: int) -> None:
        if count:
            await self._emit_event(replace(event, subject=f"and {count} more"))

    async def _emit_failure_summary(self, count: int) -> None:
        if count:
            await self._emit_decision(_failure_summary(count))

    async def _emit_decision(self, decision: Decision) -> None:
        self._log(decision)
        await self._emit_event(EgressDecided(decision))

    def _log(self, decision: Decision) -> None:
        log.info(
            "run %s egress %s %s:%d, %d bytes up, %d down %s",
            self._run_id,
            decision.verdict,
            decision.host or "?",
            decision.port,
            decision.bytes_up,
            decision.bytes_down,
            decision.reason,
        )

    async def _emit_event(self, event: Event) -> None:
        if self._emit is not None:
            await self._emit(event)


def _is_failed_connection(decision: Decision) -> bool:
    is_empty = not decision.bytes_up and not decision.bytes_down
    return decision.verdict == "denied" or bool(decision.reason and is_empty)


def _failure_summary(count: int) -> Decision:
    """Return the decision that summarizes connections that were not emitted one by one."""
    return Decision("", 0, "denied", f"and {count} more connections that failed", 0, 0, 0.0)


class Throttle:
    """Allows `max_events` log lines or events in each period. Counts the others, which are
    suppressed."""

    def __init__(self, max_events: int, period_s: float) -> None:
        self._max_events = max_events
        self._period_s = period_s
        self._ends_at = float("-inf")
        self._event_count = 0

    def start_period_if_due(self, now: float) -> int:
        """Begin a new period if the last period is over. Return the number of events that the last
        period suppressed, or 0 if it is not over."""
        if now < self._ends_at:
            return 0
        suppressed = self.take_suppressed_count()
        self._ends_at, self._event_count = now + self._period_s, 0
        return suppressed

    def try_acquire(self) -> bool:
        """Count an event. Return True if the event is within the limit of the period."""
        self._event_count += 1
        return self._event_count <= self._max_events

    def take_suppressed_count(self) -> int:
        """Return the number of events that the period has suppressed so far, and reset that
        number."""
        suppressed = max(0, self._event_count - self._max_events)
        self._event_count -= suppressed
        return suppressed
