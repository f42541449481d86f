"""Watches what a run does: the rules that its acts are held to, the secrets that it must not tell,
and the connections that programs in its sandbox make."""

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
MAX_TOLD, PERIOD_S = 50, 60.0
"""How many connections that came to nothing are emitted in a period, and how many times a rule."""


class Guard:
    """Holds the acts of one run to the rules of its profile. Every rule that is met is emitted
    before anything is done."""

    def __init__(self, profile: Profile, emit: Emit) -> None:
        self._watch = profile.watch
        self._secrets = SecretFinder(profile.redact)
        self._emit = emit

    async def refusal(self, tool: str, arguments: object) -> str | None:
        """Return why a call is not made, in words for the model; None if it is."""
        does = rule_subject(tool, arguments) if isinstance(arguments, Mapping) else None
        refused = await self._refusal(*does) if does else None
        return f"Nothing was done: {refused}." if refused else None

    async def egress_refusal(self, target: Target) -> str | None:
        """Return why no connection is made; None if it is."""
        return await self._refusal("egress", str(target))

    async def withhold(self, files: Sequence[ProducedFile]) -> dict[str, RunWarning]:
        """Return a notice for each file that a rule withholds, by path."""
        warnings = {}
        for file in files:
            if file.path in ANSWER_FILES:
                continue
            if refused := await self._refusal("file", file.path):
                words = f"The file {file.path} is not handed back: {refused}."
                warnings[file.path] = RunWarning("file_withheld", words)
        return warnings

    def without_secrets(self, text: str) -> str:
        """Return a text as the model may be told it: what goes to the model leaves the server."""
        return self._secrets.redact(text)

    async def _refusal(self, over: RuleTarget, what: str) -> str | None:
        rule = self._watch.first_match(over, what)
        if rule is None:
            return None
        shown = what[:MAX_SUBJECT_CHARS]
        await self._emit(RuleMatched(rule.name, rule.action, rule.over, shown, rule.reason))
        return rule.refusal


def cleaned(value: Any, secrets: SecretFinder) -> Any:
    """Return a value of JSON without secrets in its strings."""
    if isinstance(value, str):
        return secrets.redact(value)
    if isinstance(value, Mapping):
        return {key: cleaned(each, secrets) for key, each in value.items()}
    if isinstance(value, list):
        return [cleaned(each, secrets) for each in value]
    return value


class EgressWatch:
    """Emits and logs the connections of programs in one run's sandbox.

    Connections that come to nothing cost a program next to nothing: after a few in a period they
    are counted, and one event stands for the others.
    """

    def __init__(
        self, task: AgentTask, emit: Emit, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_id = task.run_id
        self._guard = Guard(task.profile, self._met)
        self._emit: Emit | None = emit
        self._now = now
        self._open = Counter[Target]()
        self._failed = Throttle(MAX_TOLD, PERIOD_S)
        self._rules: dict[str, tuple[Throttle, RuleMatched]] = {}
        """By name of a rule: its throttle, and the last event about it."""

    async def asked(self, target: Target) -> str | None:
        """Return why a connection that the sandbox's own rules allow is not made; None if it is."""
        refused = await self._guard.egress_refusal(target)
        if refused is None and self._emit is not None:
            self._open[target] += 1
        return refused

    async def decided(self, decision: Decision) -> None:
        """Note a connection that is over, or was refused."""
        target = Target(decision.host, decision.port)
        if self._open[target] > 1:
            self._open[target] -= 1
        else:
            self._open.pop(target, None)
        if _came_to_nothing(decision):
            await self._tell_failed(self._failed.start_period(self._now()))
            if not self._failed.allows():
                return
        await self._tell_decision(decision)

    async def tell_open(self) -> None:
        """Emit the connections that outlive the run, and those that were only counted so far."""
        await self._tell_failed(self._failed.take_held_back())
        for throttle, met in self._rules.values():
            await self._tell_met(met, throttle.take_held_back())
        for target in list(self._open.elements()):
            decision = Decision(target.host, target.port, "allowed", STILL_OPEN, 0, 0, 0.0)
            await self._tell(EgressDecided(decision))

    def close(self) -> None:
        """Emit no more events, for the run is over: later connections are logged only."""
        self._emit = None
        self._open.clear()
        if more := self._failed.take_held_back():
            self._log(_summary(more))

    async def _met(self, event: Event) -> None:
        """Emit that a connection has met a rule."""
        assert isinstance(event, RuleMatched)
        throttle, _ = self._rules.get(event.rule) or (Throttle(MAX_TOLD, PERIOD_S), event)
        self._rules[event.rule] = (throttle, event)
        await self._tell_met(event, throttle.start_period(self._now()))
        if throttle.allows():
            await self._tell(event)

    async def _tell_met(self, event: RuleMatched, more: int) -> None:
        if more:
            await self._tell(replace(event, subject=f"and {more} more"))

    async def _tell_failed(self, more: int) -> None:
        if more:
            await self._tell_decision(_summary(more))

    async def _tell_decision(self, decision: Decision) -> None:
        self._log(decision)
        await self._tell(EgressDecided(decision))

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

    async def _tell(self, event: Event) -> None:
        if self._emit is not None:
            await self._emit(event)


def _came_to_nothing(decision: Decision) -> bool:
    is_empty = not decision.bytes_up and not decision.bytes_down
    return decision.verdict == "denied" or bool(decision.reason and is_empty)


def _summary(more: int) -> Decision:
    """Return the decision that stands for connections that are not emitted one by one."""
    return Decision("", 0, "denied", f"and {more} more connections that failed", 0, 0, 0.0)


class Throttle:
    """Lets `most` log lines or events through in each period and counts the others."""

    def __init__(self, most: int, period_s: float) -> None:
        self._most = most
        self._period_s = period_s
        self._ends_at = float("-inf")
        self._seen = 0

    def start_period(self, now: float) -> int:
        """Begin a new period if the last one is over. Return how many that one held back."""
        if now < self._ends_at:
            return 0
        held_back = self.take_held_back()
        self._ends_at, self._seen = now + self._period_s, 0
        return held_back

    def allows(self) -> bool:
        """Count one more. Return whether it may be told by itself."""
        self._seen += 1
        return self._seen <= self._most

    def take_held_back(self) -> int:
        """Return how many the period has held back so far, and count them no more."""
        held_back = max(0, self._seen - self._most)
        self._seen -= held_back
        return held_back
