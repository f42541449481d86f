"""Mistakes of the model become observations, and the run continues."""

from typing import Any

import pytest

from policies.limits import StopReason
from proxy.models.scripted import ScriptedModel, call, text_reply, tool_reply
from tests.proxy.agent.runs import SUBMIT, Run, bash, valid


def malformed_entry(
    arguments: object, name: object = "execute_bash", id: object = "c1"
) -> dict[str, Any]:
    """Return an entry of `tool_calls` that may violate the schema."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def reply_with(*entries: object) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": None, "tool_calls": list(entries)}}


async def observations_of(reply: dict[str, Any]) -> list[str]:
    """Return the observations after a reply, in a run that then continues to its end."""
    model = ScriptedModel([reply, SUBMIT])
    run = Run(model)
    result = await run.go()
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)
    assert valid(model.requests[1])
    return [m["content"] for m in model.requests[1]["messages"] if m["role"] == "tool"]


@pytest.mark.parametrize("arguments", ['{"command": "ls', "ls -l", "{'command': 'ls'}", "[1", "{]"])
async def test_call_with_malformed_arguments_is_not_run_and_its_observation_quotes_them(
    arguments: str,
) -> None:
    [observation] = await observations_of(reply_with(malformed_entry(arguments)))
    assert observation.startswith("The arguments are not valid JSON")
    assert repr(arguments) in observation


async def test_arguments_nested_too_deeply_to_parse_are_malformed() -> None:
    [observation] = await observations_of(reply_with(malformed_entry("[" * 100_000)))
    assert observation.startswith("The arguments are not valid JSON")
    assert len(observation) < 1000


@pytest.mark.parametrize("arguments", ['"ls"', "[1]", "42", "null", "true", [1], 42, True])
async def test_arguments_that_are_no_object_get_an_error_observation(arguments: object) -> None:
    [observation] = await observations_of(reply_with(malformed_entry(arguments)))
    assert observation.startswith("The arguments must be a JSON object, got")


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
async def test_missing_arguments_are_treated_as_an_empty_object(arguments: object) -> None:
    [observation] = await observations_of(reply_with(malformed_entry(arguments)))
    assert "'command' is missing" in observation


async def test_arguments_given_as_an_object_instead_of_a_json_string_are_accepted() -> None:
    [observation] = await observations_of(reply_with(malformed_entry({"command": "echo hello"})))
    assert observation == "Exit code: 0\n[stdout]\nhello"


@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("execute_bash", {"command": ["ls"]}, "'command' must be a string"),
        ("execute_bash", {"cmd": "ls"}, "'cmd' is unknown"),
        ("str_replace_editor", {"command": "fly", "path": "/x"}, "must be one of view, create"),
        (
            "str_replace_editor",
            {"command": "insert", "path": "/x", "insert_line": "top", "new_str": ""},
            "'insert_line' must be an integer",
        ),
    ],
)
async def test_observation_for_an_invalid_argument_names_the_argument(
    name: str, arguments: dict[str, Any], complaint: str
) -> None:
    [observation] = await observations_of(tool_reply(call(name, **arguments)))
    assert complaint in observation


async def test_line_number_in_quotes_is_accepted() -> None:
    path = "/testbed/a.txt"
    model = ScriptedModel(
        [
            tool_reply(
                call("str_replace_editor", command="create", path=path, file_text="b\n"),
                call(
                    "str_replace_editor", command="insert", path=path, insert_line="0", new_str="a"
                ),
                bash(f"cat {path}"),
            ),
            SUBMIT,
        ]
    )
    run = Run(model)
    await run.go()
    assert run.events.observations[2] == "Exit code: 0\n[stdout]\na\nb"


@pytest.mark.parametrize("name", ["python", "EXECUTE_BASH", "functions.execute_bash"])
async def test_observation_for_an_unknown_tool_lists_the_tools(name: str) -> None:
    assert await observations_of(tool_reply(call(name))) == [
        f"There is no tool {name!r}. The tools are: str_replace_editor, execute_bash, submit."
    ]


@pytest.mark.parametrize("name", [None, "", 7])
async def test_call_without_a_name_gets_an_observation(name: object) -> None:
    [observation] = await observations_of(reply_with(malformed_entry("{}", name=name)))
    assert "There is no tool 'unknown'" in observation


@pytest.mark.parametrize("id", [None, "", 7])
async def test_call_without_an_id_gets_an_id(id: object) -> None:
    assert await observations_of(reply_with(malformed_entry('{"command": "echo a"}', id=id))) == [
        "Exit code: 0\n[stdout]\na"
    ]


async def test_calls_with_the_same_id_get_separate_observations() -> None:
    first, second = (
        malformed_entry('{"command": "echo a"}'),
        malformed_entry('{"command": "echo b"}'),
    )
    assert await observations_of(reply_with(first, second)) == [
        "Exit code: 0\n[stdout]\na",
        "Exit code: 0\n[stdout]\nb",
    ]


@pytest.mark.parametrize("entry", [None, "ls", {}, {"function": None}, {"function": "ls"}])
async def test_malformed_entry_of_tool_calls_gets_an_observation(entry: object) -> None:
    [observation] = await observations_of(reply_with(entry))
    assert "There is no tool 'unknown'" in observation


async def test_valid_and_malformed_calls_of_one_turn_both_get_observations() -> None:
    observations = await observations_of(
        reply_with(malformed_entry("{", id="a"), malformed_entry('{"command": "echo b"}', id="b"))
    )
    assert observations[0].startswith("The arguments are not valid JSON")
    assert observations[1] == "Exit code: 0\n[stdout]\nb"


# Calls written as text


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "execute_bash", "arguments": {"command": "echo a"}}</tool_call>',
        'I will look.\n<tool_call>\n{"name":"execute_bash","command":"echo a"}\n</tool_call>',
        '<tool_call>{"name": "execute_bash", "arguments": "{\\"command\\": \\"echo a\\"}"}',
        '```json\n{"name": "execute_bash", "arguments": {"command": "echo a"}}\n```',
        'Look:\n```\n{"tool": "execute_bash", "input": {"command": "echo a"}}\n```\nThen more.',
        '```json\n[{"name": "execute_bash", "parameters": {"command": "echo a"}}]\n```',
        '{"function": {"name": "execute_bash", "arguments": {"command": "echo a"}}}',
        ' {"name": "execute_bash", "command": "echo a"} ',
        '{"function": "execute_bash", "args": {"command": "echo a"}}',
    ],
)
async def test_call_written_as_text_is_run(text: str) -> None:
    model = ScriptedModel([text_reply(text), SUBMIT])
    result = await Run(model).go()
    assert result.answer == "42"
    assert model.requests[1]["messages"][-2:] == [
        {"role": "assistant", "content": text},
        {"role": "user", "content": "Result of execute_bash:\nExit code: 0\n[stdout]\na"},
    ]


async def test_several_calls_written_as_text_are_answered_in_one_message() -> None:
    def tagged(command: str) -> str:
        return f'<tool_call>{{"name": "execute_bash", "command": "{command}"}}</tool_call>\n'

    model = ScriptedModel([text_reply(tagged("echo a") + tagged("echo b")), SUBMIT])
    await Run(model).go()
    assert model.requests[1]["messages"][-1] == {
        "role": "user",
        "content": (
            "Result of execute_bash:\nExit code: 0\n[stdout]\na\n\n"
            "Result of execute_bash:\nExit code: 0\n[stdout]\nb"
        ),
    }


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "execute_bash", "arguments": {"comm</tool_call>',
        "<tool_call>execute_bash(ls)</tool_call>",
        '<tool_call>{"command": "ls"}</tool_call>',
        "<tool_call>",
    ],
)
async def test_malformed_call_in_tool_call_tags_is_no_answer(text: str) -> None:
    model = ScriptedModel([text_reply(text), SUBMIT])
    assert (await Run(model).go()).answer == "42"
    observation = model.requests[1]["messages"][-1]
    assert observation["role"] == "user"
    assert "This is no tool call" in observation["content"]


async def test_call_of_an_unknown_tool_in_tool_call_tags_is_no_answer() -> None:
    text = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    model = ScriptedModel([text_reply(text), SUBMIT])
    assert (await Run(model).go()).answer == "42"
    assert "There is no tool 'python'" in model.requests[1]["messages"][-1]["content"]


async def test_submit_written_as_text_ends_the_run() -> None:
    text = '<tool_call>{"name": "submit", "arguments": {"answer": "42"}}</tool_call>'
    model = ScriptedModel([text_reply(text)])
    result = await Run(model).go()
    assert (result.answer, result.stop_reason) == ("42", StopReason.SUBMITTED)


async def test_tool_call_written_as_text_is_never_the_answer() -> None:
    text = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
    model = ScriptedModel([text_reply(text), text_reply("There are 42.")])
    assert (await Run(model).go()).answer == "There are 42."


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "arguments": {"command": "ls"}}',
        '{"n": 42}',
        '```json\n{"name": "Ada", "age": 36}\n```',
        '```json\n{"name": ["execute_bash"], "arguments": {}}\n```',
        "```python\nexecute_bash('ls')\n```",
        'Run `execute_bash` with {"command": "ls"} to see.',
        "[1, 2]",
        "42",
    ],
)
async def test_json_and_code_in_an_answer_are_not_taken_for_a_tool_call(text: str) -> None:
    model = ScriptedModel([text_reply(text)])
    result = await Run(model).go()
    assert (result.answer, result.stop_reason) == (text, StopReason.ANSWERED)


# submit with malformed JSON


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (r'{"answer": "so \(x\) is \[y\]"}', r"so \(x\) is \[y\]"),
        (r'{"answer": "C:\users\me"}', r"C:\users\me"),
        ('{"answer": "two\nlines"}', "two\nlines"),
        ('{"answer": "whole", "more', "whole"),
    ],
)
async def test_wrongly_escaped_answer_is_recovered(
    arguments: str, answer: str, stream: bool
) -> None:
    model = ScriptedModel([tool_reply({"name": "submit", "arguments": arguments})])
    run = Run(model)
    result = await run.go(stream=stream)
    assert (result.answer, run.events.answer) == (answer, answer)
    assert (result.stop_reason, result.finish_reason) == (StopReason.SUBMITTED, "stop")
    assert result.stats.tool_calls == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_truncated_submit_has_finish_reason_length(stream: bool) -> None:
    truncated = tool_reply({"name": "submit", "arguments": '{"answer": "It is 42 bec\\u00'})
    result = await Run(ScriptedModel([{**truncated, "finish_reason": "length"}])).go(stream=stream)
    assert (result.answer, result.stop_reason, result.finish_reason) == (
        "It is 42 bec",
        StopReason.SUBMITTED,
        "length",
    )


async def test_answer_with_an_unescaped_quote_is_not_recovered() -> None:
    malformed = tool_reply({"name": "submit", "arguments": '{"answer": "He said "hi" to me."}'})
    corrected = tool_reply(call("submit", answer='He said "hi" to me.'))
    assert (await Run(ScriptedModel([malformed, corrected])).go()).answer == 'He said "hi" to me.'


@pytest.mark.parametrize("arguments", ['{"answer": ', '{"answer": ""', "{", '{"result": "4'])
async def test_submit_without_a_recoverable_answer_can_be_corrected(arguments: str) -> None:
    malformed = tool_reply({"name": "submit", "arguments": arguments})
    assert (await Run(ScriptedModel([malformed, SUBMIT])).go()).answer == "42"
