"""The `paper` profile end to end: backend requests compared byte by byte with a hand-written
history.
"""

import json
from pathlib import Path
from typing import Any

import anyio
import httpx

from policies.paper_prompts import ReferencePrompts
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from sandbox_runtime.tools import make_tools
from tests.fakes.backend import scripted_backend
from tests.fakes.paper import paper, undescribed, unstreamed
from tests.fakes.server import running_proxy

WORDS = ReferencePrompts(
    system="Work.", instance="<problem>{problem_statement}</problem>", no_call="\nC\n"
)
PROFILE = paper(WORDS)
EDITOR = "str_replace_editor"
BASH = "Execution output of \\[execute_bash]:\n\\[STDOUT]\n"
RULE = "-" * 50
FIRST, LAST = "\n".join(map(str, range(1, 41))), "\n".join(map(str, range(61, 101)))

STEPS: list[tuple[dict[str, Any], str]] = [
    (
        {"reasoning": "First I look.", **tool_reply(call("execute_bash", command="echo hi"))},
        f"Exit code: 0\n{BASH}hi\n",
    ),
    (
        tool_reply(
            call("execute_bash", command="cd /; export X=1; echo bad >&2; exit 3"),
            call("execute_bash", command="touch second"),
            content="Two at once.",
        ),
        f"Exit code: Error: Exit code 3\n{BASH}\n\\[STDERR]\nbad\n",
    ),
    (
        tool_reply(call("execute_bash", command="pwd; echo [$X]; ls")),
        f"Exit code: 0\n{BASH}/testbed\n[]\ndocuments\noutput\n",
    ),
    (
        tool_reply(call("execute_bash", command="seq 100; nosuch")),
        f"Exit code: Error: Exit code 127\n{BASH}{FIRST}\n{RULE}\n"
        f"<Observation truncated in middle for saving context>\n{RULE}\n{LAST}\n"
        "\\[STDERR]\nbash: line 1: nosuch: command not found\n",
    ),
    (
        tool_reply(call(EDITOR, command="create", path="/testbed/a.py", file_text="a = 1\n")),
        "Execution output of \\[str_replace_editor]:\nFile created at /testbed/a.py. Here's the"
        " result of running `cat -n` on /testbed/a.py:\n     1\ta = 1\n     2\t\nReview the file"
        " and make sure that it is as expected. Edit the file if necessary.",
    ),
    (
        tool_reply(
            call(EDITOR, command="str_replace", path="/testbed/a.py", old_str="1", new_str="2")
        ),
        "Execution output of \\[str_replace_editor]:\nThe file /testbed/a.py has been edited."
        " Here's the result of running `cat -n` on a snippet of /testbed/a.py:\n     1\ta = 2\n"
        "     2\t\n     3\t\nReview the changes and make sure they are as expected. Edit the"
        " file again if necessary.",
    ),
    (
        tool_reply(call(EDITOR, command="view", path="/testbed/a.py", view_range=[1, 9])),
        "Execution output of \\[str_replace_editor]:\nError: Invalid view_range [1, 9]: end must be"
        " >= start and <= 4, or -1 to view until end.",
    ),
    (tool_reply(call("frobnicate")), "Unknown action: frobnicate"),
    (
        tool_reply(call("execute_bash", command="printf 42 > output/answer.txt")),
        f"Exit code: 0\n{BASH}",
    ),
]
"""Each reply and the observation that follows it."""


def expected_messages() -> list[dict[str, Any]]:
    """Return the complete history, without the last reply."""
    user = {"role": "user", "content": "<problem>What is 6*7?</problem>\nSteps Remaining: 100"}
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Work."}, user]
    for number, (reply, observation) in enumerate(STEPS):
        calls = [
            {
                "id": f"call_{number}_{index}",
                "type": "function",
                "function": {"name": made["name"], "arguments": json.dumps(made["arguments"])},
            }
            for index, made in enumerate(reply["tool_calls"])
        ]
        said: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
        if reply.get("content"):
            said["content"] = reply["content"]
        if reply.get("reasoning"):
            said["reasoning_content"] = reply["reasoning"]
        content = f"{observation}\nSteps Remaining: {99 - number}"
        messages += [said, {"role": "tool", "tool_call_id": f"call_{number}_0", "content": content}]
    return messages


async def test_backend_gets_the_messages_that_the_reference_would_send(tmp_path: Path) -> None:
    replies = [reply for reply, _ in STEPS] + [tool_reply(call("submit"))]
    async with (
        scripted_backend(replies) as backend,
        running_proxy(backend, "bubblewrap", tmp_path, profiles=Profiles.only(PROFILE)) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        with anyio.fail_after(60):
            asked = {"model": "m", "messages": [{"role": "user", "content": "What is 6*7?"}]}
            response = await client.post(f"{url}/v1/chat/completions", json=asked)
    messages = expected_messages()
    tools = [tool.schema for tool in make_tools(PROFILE)]
    assert [unstreamed(request.body) for request in backend.requests] == [
        {
            "model": "m",
            "messages": messages[: 2 + 2 * turn],
            "tools": tools,
            "temperature": 1.0,
            "max_tokens": 65_536,
        }
        for turn in range(len(replies))
    ]
    body = response.json()
    assert body["choices"][0]["message"]["content"] == "42"
    assert body["sandbox"]["stop_reason"] == "submitted"


def test_paper_tools_match_the_reference_in_names_and_types_and_order() -> None:
    text, number = {"type": "string"}, {"type": "integer"}
    commands = {"enum": ["view", "create", "str_replace", "insert"], "type": "string"}
    editor = {
        "command": commands,
        "path": text,
        "file_text": text,
        "old_str": text,
        "new_str": text,
        "insert_line": number,
        "view_range": {"type": "array", "items": number},
    }
    tools = [undescribed(tool.schema) for tool in make_tools(PROFILE)]
    assert tools == [
        function(EDITOR, editor, ["command", "path"]),
        function("execute_bash", {"command": text}, ["command"]),
        function("submit", {}, []),
    ]
    assert list(tools[0]["function"]["parameters"]["properties"]) == list(editor)


def test_limits_of_the_paper_profile_equal_those_of_the_reference() -> None:
    limits = PROFILE.limits
    assert (limits.max_turns, limits.command_timeout_s) == (100, 120)
    assert PROFILE.observation.max_lines == 2 * 40
    assert PROFILE.inputs.offload_text_over_tokens is None


def function(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


async def test_model_without_tool_calls_is_reminded_each_turn_and_gets_no_final_answer_request(
    tmp_path: Path,
) -> None:
    replies = [text_reply("It is 42."), {"message": {"role": "assistant", "content": ""}}]
    async with (
        scripted_backend(replies * 50) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(PROFILE)) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        with anyio.fail_after(60):
            asked = {"model": "m", "messages": [{"role": "user", "content": "6*7?"}]}
            response = await client.post(f"{url}/v1/chat/completions", json=asked)
    first, second, *_, last = [request.body["messages"] for request in backend.requests]
    assert first[-1]["content"] == "<problem>6*7?</problem>\nSteps Remaining: 100"
    assert second[-2:] == [
        {"role": "assistant", "content": "It is 42."},
        {"role": "user", "content": "\nC\n\nSteps Remaining: 99"},
    ]
    assert last[-1] == {"role": "user", "content": "\nC\n\nSteps Remaining: 1"}
    assert len(backend.requests) == 100
    body = response.json()
    assert body["choices"][0]["message"]["content"] == ""
    assert body["sandbox"]["stop_reason"] == "max_turns"
