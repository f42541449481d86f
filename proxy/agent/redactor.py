"""Redaction: takes the profile's secrets out of the events and the result of a run, before any
observer or subscriber receives them."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from policies.redaction import SecretFinder, StreamRedactor
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    ChoiceEvent,
    Event,
    ModelCallFinished,
    ModelRefused,
    ReasoningDelta,
    RuleMatched,
    RunFinished,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
    TurnStarted,
)
from proxy.agent.guard import redact_json
from proxy.agent.result import Result

TOO_DEEP = "[left out: the value has too many levels]"
"""The text in place of a value whose nesting exceeds Python's stack."""
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
"""Matches a character that is escaped in JSON."""
REASONING_END_EVENTS = TurnStarted | ToolCallStarted | AnswerDelta | ModelRefused | RunFinished


class Redactor:
    """Redacts one run with all its choices."""

    def __init__(self, secrets: SecretFinder) -> None:
        self._secrets = secrets
        self._first_redactor = _ChoiceRedactor(secrets)
        self._other_redactors: dict[int, _ChoiceRedactor] = {}
        """The redactors of further choices, by their index."""

    def redact_event(self, event: Event) -> Iterator[Event]:
        """Yield the redacted parts of an event. The last characters of a streamed text are held
        back until the next piece or the end of the text arrives, because a secret may continue
        there. Events of client tool calls are not redacted: a run whose profile redacts secrets
        does not emit them (see `client_call_stream`)."""
        if not isinstance(event, ChoiceEvent):
            yield from self._first_redactor.redact_event(event)
            return
        other = self._other_redactors.setdefault(event.index, _ChoiceRedactor(self._secrets))
        for each in other.redact_event(event.event):
            yield ChoiceEvent(event.index, each)

    def redact_result(self, result: Result) -> Result:
        """Return the result with its answer and refusal redacted. Lists and mappings in `choice`
        and `response`, such as `logprobs`, are dropped, because a secret may be spread over the
        entries of several tokens. The arguments of client tool calls are not redacted."""
        others = [
            self._other_redactors.get(index, _ChoiceRedactor(self._secrets)).redact_result(other)
            for index, other in enumerate(result.others, 1)
        ]
        return replace(self._first_redactor.redact_result(result), others=others)


class _ChoiceRedactor:
    """Redacts the events and the result of one choice."""

    def __init__(self, secrets: SecretFinder) -> None:
        self._secrets = secrets
        self._reasoning_redactor = StreamRedactor(secrets)
        self._last_reasoning = ReasoningDelta("")
        """The last piece of the model's reasoning or narration."""
        self._answer_redactor = StreamRedactor(secrets)
        self._output_redactors: dict[str, tuple[ToolOutput, StreamRedactor]] = {}
        """The last piece of the running command's output, and the redactor of this output, by
        stream."""
        self._sent_answer = ""
        self._narration_chars = 0
        """Number of characters that were sent as the answer and turned out to be narration."""

    def redact_event(self, event: Event) -> Iterator[Event]:
        if isinstance(event, REASONING_END_EVENTS):
            yield from self._remaining_reasoning_events()
        match event:
            case ReasoningDelta():
                if type(event) is not type(self._last_reasoning):
                    yield from self._remaining_reasoning_events()
                self._last_reasoning = event
                yield from _drop_if_empty(
                    replace(event, text=self._reasoning_redactor.feed(event.text))
                )
            case AnswerDelta(text):
                yield from self._answer_events(self._answer_redactor.feed(text))
            case AnswerRestarted() | RunFinished():
                yield from self._answer_events(self._answer_redactor.finish())
                yield event
            case ToolOutput():
                _, stream = self._output_redactors.get(
                    event.stream, (event, StreamRedactor(self._secrets))
                )
                self._output_redactors[event.stream] = (event, stream)
                yield from _drop_if_empty(replace(event, text=stream.feed(event.text)))
            case _:
                yield from self._redact_complete_event(event)
        if isinstance(event, AnswerRestarted):
            self._narration_chars += len(self._sent_answer)
            self._sent_answer = ""

    def _redact_complete_event(self, event: Event) -> Iterator[Event]:
        """Yield an event with complete texts, redacted. Before the end of a tool call, yield the
        rest of the command's output, which was held back."""
        match event:
            case ToolCallFinished():
                outputs, self._output_redactors = self._output_redactors, {}
                for last, stream in outputs.values():
                    yield from _drop_if_empty(replace(last, text=stream.finish()))
                yield replace(event, observation=self._secrets.redact(event.observation))
            case ToolCallStarted():
                yield replace(event, arguments=_redact_fields(event.arguments, self._secrets))
            case ModelCallFinished():
                yield self._redact_call(event)
            case ModelRefused(text):
                yield ModelRefused(self._secrets.redact(text))
            case RuleMatched():
                yield replace(event, subject=self._secrets.redact(event.subject))
            case _:
                yield event

    def _redact_call(self, call: ModelCallFinished) -> ModelCallFinished:
        return replace(
            call,
            messages=[_redact_message(message, self._secrets) for message in call.messages],
            settings=_redact_fields(call.settings, self._secrets),
            reply=_redact_message(call.reply, self._secrets) if call.reply else None,
            error=self._secrets.redact(call.error) if call.error else None,
        )

    def redact_result(self, result: Result) -> Result:
        return replace(
            result,
            answer=self._sent_answer,
            answer_offset=self._narration_chars,
            refusal=self._secrets.redact(result.refusal) if result.refusal else result.refusal,
            choice=self._without_token_fields(result.choice),
            response=self._without_token_fields(result.response),
        )

    def _answer_events(self, text: str) -> Iterator[Event]:
        self._sent_answer += text
        return _drop_if_empty(AnswerDelta(text))

    def _remaining_reasoning_events(self) -> Iterator[Event]:
        return _drop_if_empty(replace(self._last_reasoning, text=self._reasoning_redactor.finish()))

    def _without_token_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: redact_json(value, self._secrets)
            for key, value in fields.items()
            if not isinstance(value, list | Mapping)
        }


def _redact_fields(fields: Mapping[str, Any], secrets: SecretFinder) -> dict[str, Any]:
    """Return the fields of an object without secrets. A value with too many levels becomes a
    note."""
    return {secrets.redact(key): _redact_value(value, secrets) for key, value in fields.items()}


def _redact_value(value: Any, secrets: SecretFinder) -> Any:
    try:
        return redact_json(value, secrets)
    except RecursionError:
        return TOO_DEEP


def _redact_message(message: Mapping[str, Any], secrets: SecretFinder) -> dict[str, Any]:
    """Return a message without secrets. The arguments of tool calls are redacted as JSON, because a
    pattern may not match a secret whose characters are escaped."""
    redacted = _redact_fields(message, secrets)
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        redacted["tool_calls"] = [_redact_tool_call(call, secrets) for call in calls]
    return redacted


def _redact_tool_call(call: Any, secrets: SecretFinder) -> Any:
    redacted = _redact_value(call, secrets)
    try:
        text = call["function"]["arguments"]
        if isinstance(text, str):
            redacted["function"]["arguments"] = _redact_arguments(text, secrets)
    except (TypeError, KeyError):
        pass  # not a call of a function
    return redacted


def _redact_arguments(text: str, secrets: SecretFinder) -> str:
    """Return the arguments of a tool call without secrets. The arguments should be JSON, but the
    model may have written invalid JSON."""
    try:
        arguments = json.loads(text)
        clean = redact_json(arguments, secrets)
        return secrets.redact(text) if clean == arguments else json.dumps(clean)
    except RecursionError:
        return TOO_DEEP
    except ValueError:
        unescaped = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text)
        has_secret = secrets.redact(unescaped) != unescaped
        return secrets.redact(unescaped if has_secret else text)


def _drop_if_empty(piece: AnswerDelta | ReasoningDelta | ToolOutput) -> Iterator[Event]:
    if piece.text:
        yield piece
