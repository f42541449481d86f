"""OpenAI's own tools that the client runs, as the Agents SDK offers and answers them."""

from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy

SHELL = {"type": "shell", "environment": {"type": "local"}}
LOCAL_SHELL = {"type": "local_shell"}
PATCH = {"type": "apply_patch"}
OUTPUT = {"stdout": "x.py\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
LIMITS = {"timeout_ms": None, "max_output_length": None}


async def exchanged(
    script: list[Any], bodies: list[Any], tmp_path: Path
) -> tuple[list[Any], list[Any]]:
    """The responses to bodies, each made of the response before; and what the model was told."""
    responses: list[Any] = []
    with anyio.fail_after(20):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=None) as http,
        ):
            for body in bodies:
                sent = body(responses[-1]) if responses else body
                answer = await http.post("/v1/responses", json={"model": "fake-model", **sent})
                assert answer.status_code == 200, answer.text
                responses.append(answer.json())
    return responses, [request.body for request in backend.requests]


CALLS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any], str]] = {
    "shell": (
        SHELL,
        call("shell", commands=["ls"], timeout_ms=5000),
        {
            "type": "shell_call",
            "action": {"commands": ["ls"], **LIMITS, "timeout_ms": 5000},
            "environment": {"type": "local"},
        },
        {"type": "shell_call_output", "output": [OUTPUT]},
        '[{"stdout": "x.py\\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]',
    ),
    "shell that is called badly": (
        SHELL,
        call("shell", commands="ls", timeout_ms=True),
        {
            "type": "shell_call",
            "action": {"commands": ["ls"], **LIMITS},
            "environment": {"type": "local"},
        },
        {"type": "shell_call_output", "output": []},
        "[]",
    ),
    "local shell": (
        LOCAL_SHELL,
        call("local_shell", command=["ls", "-l"], working_directory="/home", env={"A": 1}),
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {"A": "1"},
                "working_directory": "/home",
            },
        },
        {"type": "local_shell_call_output", "output": "x.py"},
        "x.py",
    ),
    "patch": (
        PATCH,
        call("apply_patch", type="create_file", path="x.py", diff="+a = 1"),
        {
            "type": "apply_patch_call",
            "operation": {"type": "create_file", "path": "x.py", "diff": "+a = 1"},
        },
        {"type": "apply_patch_call_output", "status": "completed", "output": "Made."},
        "completed: Made.",
    ),
    "patch that deletes": (
        PATCH,
        call("apply_patch", type="delete_file", path="x.py", diff=""),
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "x.py"}},
        {"type": "apply_patch_call_output", "status": "failed"},
        "failed",
    ),
}


@pytest.mark.parametrize(("tool", "made", "shown", "result", "told"), CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("alone", [False, True], ids=["whole", "result alone"])
async def test_a_call_comes_to_the_client_and_its_result_to_the_model(
    tool: Any,
    made: Any,
    shown: dict[str, Any],
    result: dict[str, Any],
    told: str,
    *,
    alone: bool,
    tmp_path: Path,
) -> None:
    def answered(first: Any) -> dict[str, Any]:
        item = {**result, "call_id": first["output"][-1]["call_id"]}
        if alone:
            return {"previous_response_id": first["id"], "input": [item], "tools": [tool]}
        before = [{"role": "user", "content": "Look."}, *first["output"]]
        return {"input": [*before, item], "tools": [tool]}

    (first, second), heard = await exchanged(
        [tool_reply(made), text_reply("Done.")],
        [{"input": "Look.", "tools": [tool]}, answered],
        tmp_path,
    )
    item = first["output"][-1]
    assert {**shown, "status": "completed"} == {key: item[key] for key in (*shown, "status")}
    assert second["output"][-1]["content"][0]["text"] == "Done."
    assert heard[1]["messages"][-1]["content"] == told
    names = [each["function"]["name"] for each in heard[0]["tools"]]
    assert names == ["str_replace_editor", "execute_bash", "submit", made["name"]]


async def test_calls_that_no_run_waits_for_are_told_as_they_were(tmp_path: Path) -> None:
    items = [
        {"type": "shell_call", "call_id": "a", "action": {"commands": ["ls"], "timeout_ms": None}},
        {"type": "shell_call_output", "call_id": "a", "output": [OUTPUT]},
        {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "b", "output": "x.py"},
    ]
    _, heard = await exchanged([text_reply("Done.")], [{"input": items}], tmp_path)
    told = heard[0]["messages"][1:]
    assert [message["role"] for message in told] == ["assistant", "tool", "assistant", "tool"]
    assert told[0]["tool_calls"][0]["function"] == {
        "name": "shell",
        "arguments": '{"commands": ["ls"]}',
    }
    assert [told[1]["tool_call_id"], told[3]["tool_call_id"]] == ["a", "b"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "shell"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]},
    ],
)
async def test_a_shell_of_the_client_s_is_no_computer_of_ours(choice: Any, tmp_path: Path) -> None:
    body = {"input": "Look.", "tools": [SHELL, PATCH], "tool_choice": choice}
    script = [tool_reply(call("shell", commands=["ls"]))]
    (response,), heard = await exchanged(script, [body], tmp_path)
    assert response["output"][-1]["type"] == "shell_call"
    if choice["type"] == "shell":
        named = {"type": "function", "function": {"name": "shell"}}
        assert heard[0]["tool_choice"] == named
    else:
        assert heard[0]["tool_choice"] == "required"
        assert heard[0]["tools"][-1]["function"]["name"] == "shell"
