"""Client tools beside the sandbox tools in one run."""

from typing import Any

import openai
import pytest
from chat import answer, ask, chat_request, result, sandbox_of
from model import EMPTY_OBSERVATION, NAME, Script, bash, calls, says, stdout_observation, submits
from pydantic import BaseModel

WARMTH: Any = {
    "type": "function",
    "function": {
        "name": "warmth",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
BASH: Any = {"type": "function", "function": {"name": "execute_bash", "parameters": {}}}
MIXED = calls(("execute_bash", {"command": "echo one > f"}), ("warmth", {"city": "Bonn"}))
TOOLS: Any = {"tools": [WARMTH]}


def called(completion: Any) -> Any:
    (choice,) = completion.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    return call


def offered(script: Script, number: int = 0) -> list[str]:
    """Return the names of the tools in a model request."""
    return [tool["function"]["name"] for tool in script.requests()[number].get("tools", [])]


@pytest.mark.parametrize("remembers", ["all", "its own part", "nothing"])
def test_turn_with_client_and_sandbox_calls_returns_the_client_call_and_resumes(
    client: Any, remembers: str
) -> None:
    script = Script(MIXED, bash("cat f"), submits("21 degrees."))
    first = ask(client, script, **TOOLS)
    call = called(first)
    assert (call.function.name, call.function.arguments) == ("warmth", '{"city": "Bonn"}')
    sent = {
        "all": [*chat_request(script)["messages"], first.choices[0].message.to_dict()],
        "its own part": [first.choices[0].message.to_dict()],
        "nothing": [],
    }[remembers]
    second = client.chat.completions.create(
        model=NAME, messages=[*sent, result(call, "21")], **TOOLS
    )
    assert (answer(second), second.choices[0].finish_reason) == ("21 degrees.", "stop")
    assert script.observations() == [EMPTY_OBSERVATION, "21", stdout_observation("one")]
    assert sandbox_of(second)["container_id"] == sandbox_of(first)["container_id"]
    begun, resumed, _ = [body["messages"] for body in script.requests()]
    assert resumed[: len(begun)] == begun


def test_two_client_calls_are_answered_together(client: Any) -> None:
    two = calls(("warmth", {"city": "Bonn"}), ("warmth", {"city": "Rome"}))
    script = Script(two, submits("21 and 30."))
    first = ask(client, script, **TOOLS).choices[0].message
    cities = [call.function.arguments for call in first.tool_calls]
    assert cities == ['{"city": "Bonn"}', '{"city": "Rome"}']
    results = [result(call, f"{number}") for number, call in enumerate(first.tool_calls)]
    second = client.chat.completions.create(model=NAME, messages=results[::-1], **TOOLS)
    assert (answer(second), script.observations()) == ("21 and 30.", ["0", "1"])


def test_run_suspended_by_a_streamed_client_call_resumes_as_a_stream(client: Any) -> None:
    script = Script(MIXED, bash("cat f"), submits("21 degrees."))
    name, arguments, ids = "", "", []
    for chunk in ask(client, script, stream=True, **TOOLS):
        (choice,) = chunk.choices
        for call in choice.delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
            ids += [call.id] if call.id else []
    assert (name, arguments, len(ids)) == ("warmth", '{"city": "Bonn"}', 1)
    assert choice.finish_reason == "tool_calls"
    messages: Any = [{"role": "tool", "tool_call_id": ids[0], "content": "21"}]
    stream = client.chat.completions.create(model=NAME, messages=messages, stream=True, **TOOLS)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "21 degrees."
    assert script.observations() == [EMPTY_OBSERVATION, "21", stdout_observation("one")]


def test_stream_helper_parses_client_tool_arguments(client: Any) -> None:
    class Warmth(BaseModel):
        city: str

    script = Script(calls(("Warmth", {"city": "Bonn"})))
    tools = [openai.pydantic_function_tool(Warmth)]
    with client.chat.completions.stream(**chat_request(script), tools=tools) as stream:
        kinds = [event.type for event in stream]
        call = called(stream.get_final_completion())
    assert "tool_calls.function.arguments.done" in kinds
    assert call.function.parsed_arguments == Warmth(city="Bonn")


def test_tool_choice_none_is_answered_without_a_sandbox(client: Any) -> None:
    script = Script(says("Hello."))
    done = ask(client, script, tool_choice="none", **TOOLS)
    assert answer(done) == "Hello."
    assert "sandbox" not in done.model_extra
    (body,) = script.requests()
    assert (body["tool_choice"], offered(script)) == ("none", ["warmth"])


def test_tool_choice_required_withholds_the_submit_tool(client: Any) -> None:
    script = Script(bash("true"), calls(("warmth", {"city": "Bonn"})), submits("21 degrees."))
    call = called(ask(client, script, tool_choice="required", **TOOLS))
    assert script.requests()[0]["tool_choice"] == "required"
    assert "submit" not in offered(script)
    done = client.chat.completions.create(
        model=NAME, messages=[result(call, "21")], tool_choice="auto", **TOOLS
    )
    assert answer(done) == "21 degrees."
    assert "submit" in offered(script, 2)


def test_tool_named_by_tool_choice_is_called(client: Any) -> None:
    named: Any = {"type": "function", "function": {"name": "warmth"}}
    script = Script(calls(("warmth", {"city": "Bonn"})))
    call = called(ask(client, script, tool_choice=named, **TOOLS))
    assert call.function.name == "warmth"
    assert script.requests()[0]["tool_choice"] == named


def test_unknown_tool_choice_is_refused(client: Any) -> None:
    named: Any = {"type": "function", "function": {"name": "coldness"}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, Script(says("Hello.")), tool_choice=named, **TOOLS)
    assert caught.value.param == "tool_choice.function.name"


def test_client_tool_keeps_a_name_that_the_sandbox_also_uses(client: Any) -> None:
    script = Script(
        calls(("sandbox_execute_bash", {"command": "echo ours"})),
        calls(("execute_bash", {"command": "theirs"})),
        submits("Both."),
    )
    call = called(ask(client, script, tools=[BASH]))
    assert (call.function.name, call.function.arguments) == (
        "execute_bash",
        '{"command": "theirs"}',
    )
    done = client.chat.completions.create(model=NAME, messages=[result(call, "done")], tools=[BASH])
    assert (answer(done), script.observations()) == ("Both.", [stdout_observation("ours"), "done"])


def test_legacy_functions_are_called_and_answered(client: Any) -> None:
    script = Script(MIXED, bash("cat f"), submits("21 degrees."))
    functions = [WARMTH["function"]]
    first = ask(client, script, functions=functions)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "function_call"
    assert message.function_call.name == "warmth"
    second = client.chat.completions.create(
        model=NAME,
        messages=[
            *chat_request(script)["messages"],
            message.to_dict(),
            {"role": "function", "name": "warmth", "content": "21"},
        ],
        functions=functions,
    )
    assert answer(second) == "21 degrees."
    assert script.observations() == [EMPTY_OBSERVATION, "21", stdout_observation("one")]
