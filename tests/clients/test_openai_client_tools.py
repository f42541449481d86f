"""OpenAI's client-side tools (shell, local_shell, apply_patch), as the Agents SDK offers and
answers them.
"""

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


async def exchange(
    script: list[Any], bodies: list[Any], tmp_path: Path
) -> tuple[list[Any], list[Any]]:
    """Send each body, built from the previous response; return the responses and the backend
    requests.
    """
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
    "shell with invalid arguments": (
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
    "patch that deletes a file": (
        PATCH,
        call("apply_patch", type="delete_file", path="x.py", diff=""),
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "x.py"}},
        {"type": "apply_patch_call_output", "status": "failed"},
        "failed",
    ),
}


@pytest.mark.parametrize(
    ("tool", "made", "shown", "result", "expected_result"), CALLS.values(), ids=CALLS
)
@pytest.mark.parametrize("result_only", [False, True], ids=["full input", "result only"])
async def test_client_tool_call_reaches_the_client_and_its_result_reaches_the_model(
    tool: Any,
    made: Any,
    shown: dict[str, Any],
    result: dict[str, Any],
    expected_result: str,
    *,
    result_only: bool,
    tmp_path: Path,
) -> None:
    def answer_call(first: Any) -> dict[str, Any]:
        item = {**result, "call_id": first["output"][-1]["call_id"]}
        if result_only:
            return {"previous_response_id": first["id"], "input": [item], "tools": [tool]}
        before = [{"role": "user", "content": "Look."}, *first["output"]]
        return {"input": [*before, item], "tools": [tool]}

    (first, second), backend_requests = await exchange(
        [tool_reply(made), text_reply("Done.")],
        [{"input": "Look.", "tools": [tool]}, answer_call],
        tmp_path,
    )
    item = first["output"][-1]
    assert {**shown, "status": "completed"} == {key: item[key] for key in (*shown, "status")}
    assert second["output"][-1]["content"][0]["text"] == "Done."
    assert backend_requests[1]["messages"][-1]["content"] == expected_result
    names = [each["function"]["name"] for each in backend_requests[0]["tools"]]
    assert names == ["str_replace_editor", "execute_bash", "submit", made["name"]]


async def test_shell_calls_without_a_suspended_run_are_sent_to_the_model_with_their_ids(
    tmp_path: Path,
) -> None:
    items = [
        {"type": "shell_call", "call_id": "a", "action": {"commands": ["ls"], "timeout_ms": None}},
        {"type": "shell_call_output", "call_id": "a", "output": [OUTPUT]},
        {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "b", "output": "x.py"},
    ]
    _, backend_requests = await exchange([text_reply("Done.")], [{"input": items}], tmp_path)
    sent = backend_requests[0]["messages"][1:]
    assert [message["role"] for message in sent] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
    ]
    assert sent[0]["tool_calls"][0]["function"] == {
        "name": "shell",
        "arguments": '{"commands": ["ls"]}',
    }
    assert [sent[1]["tool_call_id"], sent[3]["tool_call_id"]] == ["a", "b"]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "shell"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]},
    ],
)
async def test_client_shell_tool_is_not_taken_for_a_sandbox_tool(
    choice: Any, tmp_path: Path
) -> None:
    body = {"input": "Look.", "tools": [SHELL, PATCH], "tool_choice": choice}
    script = [tool_reply(call("shell", commands=["ls"]))]
    (response,), backend_requests = await exchange(script, [body], tmp_path)
    assert response["output"][-1]["type"] == "shell_call"
    if choice["type"] == "shell":
        named = {"type": "function", "function": {"name": "shell"}}
        assert backend_requests[0]["tool_choice"] == named
    else:
        assert backend_requests[0]["tool_choice"] == "required"
        assert backend_requests[0]["tools"][-1]["function"]["name"] == "shell"
