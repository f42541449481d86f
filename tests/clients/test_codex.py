"""What the Codex command line sends: its tools in all the shapes it has for them."""

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
ASKED = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]}


async def said(
    script: list[Any], inputs: list[Any], tmp_path: Path, **body: Any
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The responses to inputs, each with all that was said before; and what the model was told."""
    responses: list[Any] = []
    items: list[Any] = [ASKED]
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


def told_tools(body: dict[str, Any]) -> dict[str, Any]:
    """The client's tools as the model is told of them."""
    ours = ("execute_bash", "str_replace_editor", "submit")
    functions = (tool["function"] for tool in body["tools"])
    return {each["name"]: each for each in functions if each["name"] not in ours}


async def test_a_tool_of_a_namespace_is_called_by_its_whole_name_and_answered(
    tmp_path: Path,
) -> None:
    script = [tool_reply(call("agents__spawn_agent", message="Hi.")), text_reply("Done.")]
    answers = [
        [],
        lambda made: [
            {"type": "function_call_output", "call_id": made["call_id"], "output": "It said 42."}
        ],
    ]
    (first, second), heard = await said(script, answers, tmp_path, tools=[AGENTS])
    assert told_tools(heard[0]) == {
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
    assert heard[1]["messages"][-1]["content"] == "It said 42."


async def test_a_call_of_a_namespace_that_no_run_waits_for_is_told_under_the_same_name(
    tmp_path: Path,
) -> None:
    known = {"call_id": "call_elsewhere", "name": "spawn_agent", "namespace": "agents"}
    items = [
        {"type": "function_call", **known, "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_elsewhere", "output": "Started."},
    ]
    _, heard = await said([text_reply("Done.")], [items], tmp_path, tools=[AGENTS])
    (made,) = heard[0]["messages"][-2]["tool_calls"]
    assert made["function"] == {"name": "agents__spawn_agent", "arguments": "{}"}


async def test_one_of_a_namespace_can_be_chosen_and_all_of_it_allowed(tmp_path: Path) -> None:
    chosen = {"type": "function", "namespace": "agents", "name": "close_agent"}
    script = [text_reply("Done.")]
    _, heard = await said(script, [[]], tmp_path / "1", tools=[AGENTS], tool_choice=chosen)
    assert heard[0]["tool_choice"]["function"] == {"name": "agents__close_agent"}
    allowed = {"type": "namespace", "name": "agents"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [allowed]}
    tools = [AGENTS, {**SPAWN, "name": "other"}]
    _, heard = await said(script, [[]], tmp_path / "2", tools=tools, tool_choice=choice)
    assert list(told_tools(heard[0])) == ["agents__spawn_agent", "agents__close_agent"]


async def test_the_model_is_told_the_grammar_of_a_tool_that_takes_free_text(tmp_path: Path) -> None:
    script = [tool_reply(call("apply_patch", input="***"))]
    (response,), heard = await said(script, [[]], tmp_path, tools=[PATCH])
    assert told_tools(heard[0])["apply_patch"]["description"] == (
        'Edits files.\n\nIts input must be as this grammar says (lark):\nstart: "***"'
    )
    made = response["output"][-1]
    assert (made["type"], made["name"], made["input"]) == ("custom_tool_call", "apply_patch", "***")


async def test_what_the_client_s_search_finds_can_be_called(tmp_path: Path) -> None:
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
    (first, second, _), heard = await said(script, answers, tmp_path, tools=[SEARCH])
    sought = first["output"][-1]
    assert (sought["type"], sought["execution"], sought["arguments"]) == (
        *("tool_search_call", "client", {"query": "agents"}),
    )
    assert [list(told_tools(body)) for body in heard] == [
        ["tool_search"],
        ["tool_search", "agents__spawn_agent"],
        ["tool_search", "agents__spawn_agent"],
    ]
    assert heard[1]["messages"][-1]["content"] == (
        "These tools can be called from now on: agents__spawn_agent"
    )
    assert (second["output"][-1]["namespace"], second["output"][-1]["name"]) == (
        *("agents", "spawn_agent"),
    )


async def test_a_server_s_search_is_not_needed_for_the_model_is_told_of_every_tool(
    tmp_path: Path,
) -> None:
    sought = [
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": [CLOSE]},
    ]
    tools = [{"type": "tool_search"}, {**SPAWN, "defer_loading": True}]
    _, heard = await said([text_reply("Done.")], [sought], tmp_path, tools=tools)
    assert list(told_tools(heard[0])) == ["spawn_agent", "close_agent"]
    assert [message["role"] for message in heard[0]["messages"]] == ["system", "user"]


async def test_tools_come_with_the_input_too(tmp_path: Path) -> None:
    more = {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [AGENTS, WEB]}
    script = [tool_reply(call("agents__close_agent", message="Hi."))]
    (response,), heard = await said(script, [[more]], tmp_path)
    assert list(told_tools(heard[0])) == ["agents__spawn_agent", "agents__close_agent"]
    assert response["output"][-1]["name"] == "close_agent"


async def test_no_request_is_refused_for_a_web_search_and_the_answer_tells_there_was_none(
    tmp_path: Path,
) -> None:
    (response,), heard = await said([text_reply("Done.")], [[]], tmp_path, tools=[WEB])
    assert not told_tools(heard[0])
    assert response["sandbox"]["warnings"] == [
        {
            "code": "tool_left_out",
            "message": "There is no tool 'web_search' here; the model had none.",
        }
    ]


async def test_a_thread_finds_its_files_again(tmp_path: Path) -> None:
    script = [
        tool_reply(call("execute_bash", command="echo kept > file")),
        text_reply("Done."),
        tool_reply(call("execute_bash", command="cat file")),
        text_reply("Done."),
    ]
    _, heard = await said(script, [[], lambda _: [ASKED]], tmp_path)
    assert "kept" in heard[3]["messages"][-1]["content"]
