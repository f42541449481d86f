"""The tool runner for responses, which the SDK has since version 3."""

from typing import Any

import pytest
from blocking import Blocking
from model import EMPTY_OBSERVATION, NAME, Script, bash, calls, stdout_observation, submits
from openai.lib.responses_tool_runner import (
    AsyncRegisteredFunction,
    AsyncResponsesToolLedger,
    AsyncResponsesToolRunner,
    RegisteredFunction,
    ResponsesToolLedger,
    ResponsesToolRunner,
)
from responses import INTERPRETER, WARMTH

CITIES = {"Bonn": "21 degrees", "Rome": "30 degrees"}


def warmth(arguments: Any) -> str:
    return CITIES[arguments["city"]]


async def warmth_async(arguments: Any) -> str:
    return warmth(arguments)


def run(client: Any, script: Script, saved: list[Any], tools: list[Any], **how: Any) -> Any:
    """Run the tool runner with a ledger that appends to `saved`. Return the last response."""
    asked: Any = {"model": NAME, "input": script.prompt, "tools": tools}

    async def save(checkpoint: Any) -> None:
        saved.append(checkpoint)

    if isinstance(client, Blocking):
        their_own = AsyncRegisteredFunction(WARMTH, warmth_async, independent=True)
        loop = client.wrap(AsyncResponsesToolRunner(functions=[their_own]))
        return loop.run(client.it, asked, ledger=AsyncResponsesToolLedger("run", save), **how)
    own = RegisteredFunction(WARMTH, warmth, independent=True)
    ledger = ResponsesToolLedger("run", saved.append)
    return ResponsesToolRunner(functions=[own]).run(client, asked, ledger=ledger, **how)


@pytest.mark.parametrize("tools", [[], [INTERPRETER]], ids=["alone", "interpreter"])
@pytest.mark.parametrize("how", [{}, {"stream": True}, {"stream": True, "eager": True}])
def test_tool_runner_calls_functions_between_sandbox_steps(
    client: Any, tools: list[Any], how: Any
) -> None:
    script = Script(
        {**bash("echo one > f"), "reasoning": "First a file."},
        calls(("execute_bash", {"command": "echo two >> f"}), ("warmth", {"city": "Bonn"})),
        bash("cat f"),
        calls(("warmth", {"city": "Rome"})),
        submits("21 and 30."),
    )
    saved: list[Any] = []
    made = run(client, script, saved, tools, **how)
    assert made.output_text == "21 and 30."
    assert script.observations() == [
        *(EMPTY_OBSERVATION, EMPTY_OBSERVATION, "21 degrees"),
        *(stdout_observation("one\ntwo"), "30 degrees"),
    ]
    assert len(script.requests()) == 5
    assert saved
