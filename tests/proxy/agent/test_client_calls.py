"""Client tool calls that are streamed while the model writes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import pytest

from policies.limits import StopReason
from proxy.agent.events import (
    ClientCallDelta,
    ClientCallFinished,
    ClientCallStarted,
    Event,
    ModelDelta,
    OnDelta,
    ReasoningDelta,
    ToolCallDelta,
)
from proxy.agent.model import Completion
from proxy.errors import ContextOverflowError
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.proxy.agent.runs import LOOKUP, Run, SequentialModel

LOOKUP_CALL = call("lookup", key="x")
ARGUMENTS = '{"key": "x"}'
FREE_TEXT: dict[str, Any] = {"text_tools": frozenset({"lookup"})}


class Piecewise(ScriptedModel):
    """A model that streams these pieces of its reply, and then raises `error` if it is set."""

    def __init__(
        self,
        replies: Sequence[Mapping[str, Any]],
        pieces: Sequence[ModelDelta],
        error: Exception | None = None,
    ) -> None:
        super().__init__(replies)
        self._pieces = pieces
        self._error = error

    async def complete(self, body: Mapping[str, Any], on_delta: OnDelta | None) -> Completion:
        reply = await super().complete(body, None)
        for piece in self._pieces if on_delta else ():
            assert on_delta is not None
            await on_delta(piece)
        if self._error is not None:
            raise self._error
        return reply


def client_call_events(run: Run) -> list[Event]:
    """Return the events of client tool calls."""
    kinds = ClientCallStarted | ClientCallDelta | ClientCallFinished
    return [event for event in run.events if isinstance(event, kinds)]


def lookup_events(*pieces: str) -> list[Event]:
    """Return the events of one call of `lookup`."""
    deltas = [ClientCallDelta(0, piece) for piece in pieces]
    return [ClientCallStarted(0, "call_r1_1", "lookup"), *deltas, ClientCallFinished(0)]


async def test_client_call_is_not_emitted_before_its_name_is_complete() -> None:
    pieces = [
        *(ToolCallDelta(0, "look", ""), ToolCallDelta(0, "lookup", "")),
        *(ToolCallDelta(0, "lookup", '{"key":'), ToolCallDelta(0, "lookup", ' "x"}')),
    ]
    run = Run(Piecewise([tool_reply(LOOKUP_CALL)], pieces))
    result = await run.go(client_tools=[LOOKUP], stream=True)
    assert client_call_events(run) == lookup_events('{"key":', ' "x"}')
    assert [tool_call["id"] for tool_call in result.client_calls] == ["call_r1_1"]


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ("select 1", {}),
        ("", {}),
        (ARGUMENTS, {"stream": False}),
        (ARGUMENTS, {"legacy_state": "s1"}),
        ("select 1", FREE_TEXT),
        ('{"input": ["a"]}', FREE_TEXT),
        ('{"input": ""}', FREE_TEXT),
    ],
    ids=[
        *("no object", "no arguments", "not streamed", "functions"),
        *("a bare text", "no text", "an empty text"),
    ],
)
async def test_client_calls_that_cannot_be_streamed_are_in_the_result_and_emit_no_events(
    arguments: str, fields: dict[str, Any]
) -> None:
    run = Run(ScriptedModel([tool_reply({"name": "lookup", "arguments": arguments})]))
    result = await run.go(**{"client_tools": [LOOKUP], "stream": True, **fields})
    assert client_call_events(run) == []
    assert result.stop_reason is StopReason.CLIENT_TOOL_CALLS
    assert len(result.client_calls) == 1


async def test_text_of_a_custom_tool_call_is_streamed() -> None:
    arguments = ['{"in', 'put":', ' "select', " \\", "n\\u00", 'e9"', "}"]
    model = Piecewise(
        [tool_reply({"name": "lookup", "arguments": "".join(arguments)})],
        [ToolCallDelta(0, "lookup", piece) for piece in arguments],
    )
    run = Run(model)
    result = await run.go(client_tools=[LOOKUP], stream=True, **FREE_TEXT)
    first, *pieces, last = client_call_events(run)
    assert first == ClientCallStarted(0, "call_r1_1", "lookup", takes_text=True)
    assert pieces == [ClientCallDelta(0, text) for text in ("select", " ", "\n", "é")]
    assert last == ClientCallFinished(0)
    assert result.client_calls == [
        {"id": "call_r1_1", "type": "custom", "custom": {"name": "lookup", "input": "select \né"}}
    ]


async def test_call_after_a_custom_tool_call_is_streamed() -> None:
    calls = [call("sql", input="select 1"), LOOKUP_CALL]
    pieces = [
        ToolCallDelta(0, "sql", '{"input": "select 1"}'),
        ToolCallDelta(1, "lookup", ARGUMENTS),
    ]
    run = Run(Piecewise([tool_reply(*calls)], pieces))
    sql = {"type": "function", "function": {"name": "sql"}}
    await run.go(client_tools=[sql, LOOKUP], stream=True, text_tools=frozenset({"sql"}))
    assert client_call_events(run) == [
        ClientCallStarted(0, "call_r1_1", "sql", takes_text=True),
        ClientCallDelta(0, "select 1"),
        ClientCallFinished(0),
        ClientCallStarted(1, "call_r1_2", "lookup"),
        ClientCallDelta(1, ARGUMENTS),
        ClientCallFinished(1),
    ]


async def test_client_call_written_as_text_is_in_the_result_and_emits_no_events() -> None:
    text = '<tool_call>{"name": "lookup", "arguments": {"key": "x"}}</tool_call>'
    run = Run(ScriptedModel([text_reply(text)]))
    result = await run.go(client_tools=[LOOKUP], stream=True)
    assert (client_call_events(run), len(result.client_calls)) == ([], 1)


async def test_client_call_is_streamed_in_the_turn_without_proxy_prompt_and_tools() -> None:
    unknown_call = tool_reply(call("unknown"))
    run = Run(SequentialModel([unknown_call, unknown_call, tool_reply(LOOKUP_CALL)]))
    with anyio.fail_after(5):
        result = await run.go(client_tools=[LOOKUP], stream=True)
    assert [tool_call["function"]["arguments"] for tool_call in result.client_calls] == [ARGUMENTS]
    first, *_, last = client_call_events(run)
    assert isinstance(first, ClientCallStarted)
    assert (first.call_id, last) == (result.client_calls[0]["id"], ClientCallFinished(0))


async def test_runaway_reasoning_does_not_withdraw_a_streamed_call() -> None:
    thinking = [ReasoningDelta("And on it goes. ") for _ in range(2000)]
    run = Run(
        Piecewise([tool_reply(LOOKUP_CALL)], [ToolCallDelta(0, "lookup", ARGUMENTS), *thinking])
    )
    result = await run.go(client_tools=[LOOKUP], stream=True)
    assert client_call_events(run) == lookup_events(ARGUMENTS)
    assert result.stop_reason is StopReason.CLIENT_TOOL_CALLS


async def test_model_call_is_not_retried_if_a_client_tool_call_was_partly_streamed() -> None:
    overflow = ContextOverflowError("too long")
    model = Piecewise([tool_reply(LOOKUP_CALL)], [ToolCallDelta(0, "lookup", '{"key":')], overflow)
    run = Run(model)
    with pytest.raises(ContextOverflowError):
        await run.go(client_tools=[LOOKUP], stream=True)
    assert client_call_events(run) == lookup_events('{"key":')[:2]
    assert len(model.requests) == 1
