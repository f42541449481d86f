"""What stands before a run's acts: the rules that it is held to, and what it must not say."""

from collections.abc import Mapping, Sequence
from typing import Any

from policies.artifacts import Produced
from policies.hosts import Target
from policies.profile import Profile
from policies.redaction import Secrets
from policies.rules import MAX_SUBJECT_CHARS, Act, Rule, subject
from policies.workspace import ANSWER_FILES
from proxy.agent.events import Emit, RuleMet
from proxy.agent.task import Notice


class Guard:
    """One run's. Every verdict is told to the listeners before anything is done."""

    def __init__(self, profile: Profile, emit: Emit) -> None:
        self._watch = profile.watch
        self._secrets = Secrets(profile.redact)
        self._emit = emit

    async def refusal(self, tool: str, arguments: object) -> str | None:
        """Why a call is not made, in words for the model; None where it is."""
        does = subject(tool, arguments) if isinstance(arguments, Mapping) else None
        refused = await self._refusal(*does) if does else None
        return f"Nothing was done: {refused}." if refused else None

    async def egress_refusal(self, target: Target) -> str | None:
        """Why no connection is made."""
        return await self._refusal("egress", str(target))

    async def withhold(self, files: Sequence[Produced]) -> dict[str, Notice]:
        """Which files are not handed back, and what their reader is told."""
        notices = {}
        for file in files:
            if file.path in ANSWER_FILES:
                continue
            if refused := await self._refusal("file", file.path):
                words = f"The file {file.path} is not handed back: {refused}."
                notices[file.path] = Notice("file_withheld", words)
        return notices

    def without_secrets(self, text: str) -> str:
        """What the model may be told, for that leaves too."""
        return self._secrets.without(text)

    async def _refusal(self, over: Act, what: str) -> str | None:
        rule = self._watch.met(over, what)
        if rule is None:
            return None
        await self._emit(_verdict(rule, what))
        return rule.refusal


def _verdict(rule: Rule, what: str) -> RuleMet:
    return RuleMet(rule.name, rule.action, rule.over, what[:MAX_SUBJECT_CHARS], rule.reason)


def cleaned(value: Any, secrets: Secrets) -> Any:
    """A value of JSON without secrets in its strings."""
    if isinstance(value, str):
        return secrets.without(value)
    if isinstance(value, Mapping):
        return {key: cleaned(each, secrets) for key, each in value.items()}
    if isinstance(value, list):
        return [cleaned(each, secrets) for each in value]
    return value
