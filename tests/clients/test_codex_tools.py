"""The tool shapes that the Codex command line sends: namespaces, free text, tool search, web
search.
"""

from pathlib import Path
from typing import Any

import anyio
import httpx

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import scripted_backend
from tests.fakes.server import running_proxy

SCHEMA = {"type": "object", "properties": {"message": {"type": "string"}}}
SPAWN = {"type": "function", "name": "spawn_agent", "description": "Starts.", "parameters": SCHEMA}
CLOSE = {**SPAWN, "name": "close_agent", "description": "Ends."}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Agents of your own.",
    "tools": [SPAWN, CLOSE],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "***"'},
}
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "description": "Finds tools.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
WEB = {"type": "web_search", "external_web_access": True}
HEADERS = {"thread-id": "019a", "session-id": "019a", "originator": "codex_exec"}
BODY: dict[str, Any] = {
    "model": "fake-model",
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto"},
    "tool_choice": "auto",
    "client_metadata": {"thread_id": "019a"},
}
USER_MESSAGE = {
    "type": "message",
    "role": "user",
    "content": [{"type": "input_text", "text": "Hello."}],
}


async def converse(
    script: list[Any], inputs: list[Any], tmp_path: Path, **body: Any
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Send each input after all earlier items; return the responses and the backend requests."""
    responses: list[Any] = []
    items: list[Any] = [USER_MESSAGE]
    with anyio.fail_after(20):
        async with (
            scripted_backend(script) as backend,
            running_proxy(backend, "memory", tmp_path) as url,
            httpx.AsyncClient(base_url=url, timeout=None, headers=HEADERS) as http,
        ):
            for given in inputs:
                items += given(responses[-1]["output"][-1]) if responses else given
                answer = await http.post("/v1/responses", json={**BODY, **body, "input": items})
                assert answer.status_code == 200, answer.text
                responses.append(answer.json())
                items += responses[-1]["output"]
    return responses, [request.body for request in backend.requests]


def client_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Return the client's tools in a backend request, by name."""
    ours = ("execute_bash", "str_replace_editor", "submit")
    functions = (tool["function"] for tool in body["tools"])
    return {each["name"]: each for each in functions if each["name"] not in ours}


async def test_namespace_tool_is_offered_under_its_qualified_name(
    tmp_path: Path,
) -> None:
    script = [tool_reply(call("agents__spawn_agent", message="Hi.")), text_reply("Done.")]
    answers = [
        [],
        lambda made: [
            {"type": "function_call_output", "call_id": made["call_id"], "output": "It said 42."}
        ],
    ]
    (first, second), backend_requests = await converse(script, answers, tmp_path, tools=[AGENTS])
    assert client_tools(backend_requests[0]) == {
        "agents__spawn_agent": {
            "name": "agents__spawn_agent",
            "description": "Agents of your own.\n\nStarts.",
            "parameters": SCHEMA,
        },
        "agents__close_agent": {
            "name": "agents__close_agent",
            "description": "Ends.",
            "parameters": SCHEMA,
        },
    }
    made = first["output"][-1]
    assert (made["type"], made["namespace"], made["name"]) == (
        *("function_call", "agents", "spawn_agent"),
    )
    assert second["output"][-1]["content"][0]["text"] == "Done."
    assert backend_requests[1]["messages"][-1]["content"] == "It said 42."


async def test_namespace_call_without_a_suspended_run_keeps_its_qualified_name(
    tmp_path: Path,
) -> None:
    known = {"call_id": "call_elsewhere", "name": "spawn_agent", "namespace": "agents"}
    items = [
        {"type": "function_call", **known, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_elsewhere", "output": "Started."},
    ]
    _, backend_requests = await converse([text_reply("Done.")], [items], tmp_path, tools=[AGENTS])
    (made,) = backend_requests[0]["messages"][-2]["tool_calls"]
    assert made["function"] == {"name": "agents__spawn_agent", "arguments": "{}"}


async def test_tool_choice_accepts_a_namespace_tool_and_a_whole_namespace(tmp_path: Path) -> None:
    chosen = {"type": "function", "namespace": "agents", "name": "close_agent"}
    script = [text_reply("Done.")]
    _, backend_requests = await converse(
        script, [[]], tmp_path / "1", tools=[AGENTS], tool_choice=chosen
    )
    assert backend_requests[0]["tool_choice"]["function"] == {"name": "agents__close_agent"}
    allowed = {"type": "namespace", "name": "agents"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [allowed]}
    tools = [AGENTS, {**SPAWN, "name": "other"}]
    _, backend_requests = await converse(
        script, [[]], tmp_path / "2", tools=tools, tool_choice=choice
    )
    assert list(client_tools(backend_requests[0])) == ["agents__spawn_agent", "agents__close_agent"]


async def test_grammar_of_a_custom_tool_is_part_of_its_description(tmp_path: Path) -> None:
    script = [tool_reply(call("apply_patch", input="***"))]
    (response,), backend_requests = await converse(script, [[]], tmp_path, tools=[PATCH])
    assert client_tools(backend_requests[0])["apply_patch"]["description"] == (
        'Edits files.\n\nIts input must be as this grammar says (lark):\nstart: "***"'
    )
    made = response["output"][-1]
    assert (made["type"], made["name"], made["input"]) == ("custom_tool_call", "apply_patch", "***")


async def test_tools_found_by_a_client_tool_search_can_be_called(tmp_path: Path) -> None:
    script = [
        tool_reply(call("tool_search", query="agents")),
        tool_reply(call("agents__spawn_agent", message="Hi.")),
        text_reply("Done."),
    ]
    answers = [
        [],
        lambda made: [
            {
                "type": "tool_search_output",
                "call_id": made["call_id"],
                "execution": "client",
                "tools": [{**AGENTS, "tools": [{**SPAWN, "defer_loading": True}]}],
            }
        ],
        lambda made: [
            {"type": "function_call_output", "call_id": made["call_id"], "output": "Started."}
        ],
    ]
    (first, second, _), backend_requests = await converse(script, answers, tmp_path, tools=[SEARCH])
    sought = first["output"][-1]
    assert (sought["type"], sought["execution"], sought["arguments"]) == (
        *("tool_search_call", "client", {"query": "agents"}),
    )
    assert [list(client_tools(body)) for body in backend_requests] == [
        ["tool_search"],
        ["tool_search", "agents__spawn_agent"],
        ["tool_search", "agents__spawn_agent"],
    ]
    assert backend_requests[1]["messages"][-1]["content"] == (
        "These tools can be called from now on: agents__spawn_agent"
    )
    assert (second["output"][-1]["namespace"], second["output"][-1]["name"]) == (
        *("agents", "spawn_agent"),
    )


async def test_server_tool_search_is_dropped_and_deferred_tools_are_offered(
    tmp_path: Path,
) -> None:
    sought = [
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [CLOSE]},
    ]
    tools = [{"type": "tool_search"}, {**SPAWN, "defer_loading": True}]
    _, backend_requests = await converse([text_reply("Done.")], [sought], tmp_path, tools=tools)
    assert list(client_tools(backend_requests[0])) == ["spawn_agent", "close_agent"]
    assert [message["role"] for message in backend_requests[0]["messages"]] == ["system", "user"]


async def test_tools_of_an_additional_tools_item_are_offered_to_the_model(tmp_path: Path) -> None:
    more = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [AGENTS, WEB]}
    script = [tool_reply(call("agents__close_agent", message="Hi."))]
    (response,), backend_requests = await converse(script, [[more]], tmp_path)
    assert list(client_tools(backend_requests[0])) == ["agents__spawn_agent", "agents__close_agent"]
    assert response["output"][-1]["name"] == "close_agent"


async def test_unsupported_web_search_is_dropped_with_a_warning(
    tmp_path: Path,
) -> None:
    (response,), backend_requests = await converse(
        [text_reply("Done.")], [[]], tmp_path, tools=[WEB]
    )
    assert not client_tools(backend_requests[0])
    assert response["sandbox"]["warnings"] == [
        {
            "code": "tool_left_out",
            "message": "This server has no tool 'web_search', so the model lacked it.",
        }
    ]


async def test_thread_id_header_names_the_session(tmp_path: Path) -> None:
    script = [
        tool_reply(call("execute_bash", command="echo kept > file")),
        text_reply("Done."),
        tool_reply(call("execute_bash", command="cat file")),
        text_reply("Done."),
    ]
    _, backend_requests = await converse(script, [[], lambda _: [USER_MESSAGE]], tmp_path)
    assert "kept" in backend_requests[3]["messages"][-1]["content"]
