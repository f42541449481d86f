"""Takes secrets out of what leaves a run: a filter between the run and all its listeners."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from policies.redaction import SecretFinder, StreamRedactor
from proxy.agent.events import (
    AnswerDelta,
    AnswerRestarted,
    Emit,
    Event,
    ReasoningDelta,
    Refused,
    RuleMatched,
    RunFinished,
    ToolCallFinished,
    ToolCallStarted,
    ToolOutput,
    TurnStarted,
)
from proxy.agent.guard import cleaned
from proxy.agent.result import Result

ENDS_THINKING = TurnStarted | ToolCallStarted | AnswerDelta | Refused | RunFinished


class Redactor:
    """The filter of one run. The end of a text that goes on is held back until more of it comes."""

    def __init__(self, secrets: SecretFinder, emit: Emit) -> None:
        self._secrets = secrets
        self._emit = emit
        self._thinking = StreamRedactor(secrets)
        self._thought = ReasoningDelta("")
        """The last piece of it: the model's thinking, or narration."""
        self._answer = StreamRedactor(secrets)
        self._outputs: dict[str, tuple[ToolOutput, StreamRedactor]] = {}
        """The output of the call that runs, by stream."""
        self._given = ""
        """The answer as it was sent."""
        self._given_before = 0
        """How many characters were sent before it."""

    async def emit(self, event: Event) -> None:
        """Pass on an event without secrets."""
        if isinstance(event, ENDS_THINKING):
            await self._end_thinking()
        match event:
            case ReasoningDelta():
                await self._hear_thinking(event)
            case AnswerDelta(text):
                await self._pass(AnswerDelta(self._answer.feed(text)))
            case AnswerRestarted():
                await self._pass(AnswerDelta(self._answer.finish()))
                self._given_before += len(self._given)
                self._given = ""
                await self._emit(event)
            case ToolOutput():
                await self._hear_output(event)
            case ToolCallFinished():
                await self._end_outputs()
                await self._emit(self._whole(event))
            case RunFinished():
                await self._pass(AnswerDelta(self._answer.finish()))
                await self._emit(event)
            case _:
                await self._emit(self._whole(event))

    def _whole(self, event: Event) -> Event:
        """Return an event whose texts are whole, without secrets."""
        match event:
            case ToolCallStarted():
                return replace(event, arguments=cleaned(event.arguments, self._secrets))
            case ToolCallFinished():
                return replace(event, observation=self._secrets.redact(event.observation))
            case Refused(text):
                return Refused(self._secrets.redact(text))
            case RuleMatched():
                return replace(event, subject=self._secrets.redact(event.subject))
        return event

    def result(self, result: Result) -> Result:
        """Return the result without secrets. Fields with an entry for each token of the answer are
        left out, for a secret is spread over several."""
        return replace(
            result,
            answer=self._given,
            streamed_before=self._given_before,
            refusal=self._secrets.redact(result.refusal) if result.refusal else result.refusal,
            choice=self._plain(result.choice),
            response=self._plain(result.response),
        )

    async def _hear_thinking(self, event: ReasoningDelta) -> None:
        if type(event) is not type(self._thought):
            await self._end_thinking()
        self._thought = event
        await self._pass(replace(event, text=self._thinking.feed(event.text)))

    async def _end_thinking(self) -> None:
        await self._pass(replace(self._thought, text=self._thinking.finish()))

    async def _hear_output(self, event: ToolOutput) -> None:
        _, stream = self._outputs.get(event.stream, (event, StreamRedactor(self._secrets)))
        self._outputs[event.stream] = (event, stream)
        await self._pass(replace(event, text=stream.feed(event.text)))

    async def _end_outputs(self) -> None:
        outputs, self._outputs = self._outputs, {}
        for last, stream in outputs.values():
            await self._pass(replace(last, text=stream.finish()))

    async def _pass(self, piece: AnswerDelta | ReasoningDelta | ToolOutput) -> None:
        if isinstance(piece, AnswerDelta):
            self._given += piece.text
        if piece.text:
            await self._emit(piece)

    def _plain(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: cleaned(value, self._secrets)
            for key, value in fields.items()
            if not isinstance(value, list | Mapping)
        }
