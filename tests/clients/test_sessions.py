"""Sessions over several chat requests: files that persist, and suspended runs that wait for client
tools.
"""

import base64
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from policies.artifacts import ArtifactLimits
from policies.sessions import SessionSettings
from proxy.files import FileStore
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.store.runs import SUSPENDED_KEEP_S
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.server import EachKey, Kind, running_proxy
from tests.stores import open_store

PATH = "/v1/chat/completions"
KINDS = ("memory", "bubblewrap")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
FIRST = {"role": "user", "content": "Begin."}
FOLLOW_UP = {"role": "user", "content": "Go on."}


@asynccontextmanager
async def session_client(
    backend: ScriptedBackend, kind: Kind, state_dir: Path, **changes: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Serve `backend` with the given data directory and yield an HTTP client."""
    async with (
        running_proxy(backend, kind, state_dir, **{"keyring": EachKey(), **changes}) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as client,
    ):
        yield client


async def complete(
    client: httpx.AsyncClient, *messages: dict[str, Any], headers: Any = None, **body: Any
) -> dict[str, Any]:
    """Send a request that must succeed and return its completion."""
    sent = {"model": "fake-model", "messages": list(messages), **body}
    response = await client.post(PATH, json=sent, headers=headers)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def message(completion: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = completion["choices"][0]["message"]
    return made


def tool_results(backend: ScriptedBackend, number: int) -> list[str]:
    """Return the tool results in a backend request."""
    messages = backend.requests[number].body["messages"]
    return [each["content"] for each in messages if each["role"] == "tool"]


def bash(command: str) -> dict[str, Any]:
    return tool_reply(call("execute_bash", command=command))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restart", [False, True])
async def test_chat_id_header_restores_the_files(kind: Kind, restart: bool, tmp_path: Path) -> None:
    script = [bash("echo one > file"), text_reply("Done."), bash("cat file"), text_reply("One.")]
    chat = {"X-OpenWebUI-Chat-Id": "chat 1"}
    async with scripted_backend(script) as backend:
        async with session_client(backend, kind, tmp_path) as client:
            first = await complete(client, FIRST, headers=chat)
            if not restart:
                second = await complete(client, FIRST, message(first), FOLLOW_UP, headers=chat)
        if restart:
            async with session_client(backend, kind, tmp_path) as client:
                second = await complete(client, FIRST, message(first), FOLLOW_UP, headers=chat)
        assert "one" in tool_results(backend, 3)[0]
    assert second["sandbox"]["container_id"] == first["sandbox"]["container_id"]
    assert ("restored" in second["sandbox"]) == restart


async def test_run_of_an_edited_question_has_the_files_from_before_the_question(
    tmp_path: Path,
) -> None:
    script = [
        *(bash("echo one > file"), text_reply("Done.")),
        *(bash("echo two > file"), text_reply("Done.")),
        *(bash("cat file"), text_reply("One.")),
    ]
    chat = {"ChatUI-Conversation-ID": "chat 1"}
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        first = message(await complete(client, FIRST, headers=chat))
        await complete(client, FIRST, first, FOLLOW_UP, headers=chat)
        edited = {"role": "user", "content": "Go on otherwise."}
        await complete(client, FIRST, first, edited, headers=chat)
        assert "one" in tool_results(backend, 5)[0]


@pytest.mark.parametrize("kind", KINDS)
async def test_request_without_a_session_leaves_its_artifacts_in_its_container(
    kind: Kind, tmp_path: Path
) -> None:
    script = [
        *(
            bash("echo one > output/a.csv; echo one > output/b.csv; touch file"),
            text_reply("Done."),
        ),
        *(bash("cat output/a.csv output/b.csv; ls; echo two > output/b.csv"), text_reply("Done.")),
        *(bash("cat output/a.csv output/b.csv"), text_reply("Seen.")),
    ]
    async with (
        scripted_backend(script) as backend,
        session_client(backend, kind, tmp_path) as client,
    ):
        first = await complete(client, FIRST)
        named = {"container_id": first["sandbox"]["container_id"]}
        second = await complete(client, FOLLOW_UP, sandbox=named)
        third = await complete(client, FOLLOW_UP, sandbox=named)
        seen = [tool_results(backend, number)[0] for number in (3, 5)]
    filenames = [
        [file["filename"] for file in each["sandbox"]["files"]] for each in (first, second, third)
    ]
    assert filenames == [["a.csv", "b.csv"], ["b.csv"], []]
    assert "one\none\ndocuments\noutput" in seen[0]
    assert "one\ntwo" in seen[1]


async def test_session_is_found_only_with_its_key_and_until_its_container_is_deleted(
    tmp_path: Path,
) -> None:
    script = [bash("echo one > output/file"), text_reply("Done.")]
    script += [bash("ls output"), text_reply("Seen.")] * 3
    named = {"session": "mine"}
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        first = await complete(client, FIRST, sandbox=named)
        container = first["sandbox"]["container_id"]
        await complete(client, FOLLOW_UP, sandbox={"container_id": container})
        other = {"Authorization": "Bearer somebody-else"}
        await complete(client, FOLLOW_UP, sandbox={"container_id": container}, headers=other)
        assert (await client.get(f"/v1/containers/{container}")).json()["id"] == container
        assert (await client.delete(f"/v1/containers/{container}")).json()["deleted"] is True
        assert (await client.delete(f"/v1/containers/{container}")).status_code == 404
        await complete(client, FOLLOW_UP, sandbox=named)
        seen = ["file" in tool_results(backend, number)[0] for number in (3, 5, 7)]
    assert seen == [True, False, False]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restart", [False, True])
async def test_suspended_run_resumes_after_the_client_tool_result(
    kind: Kind, restart: bool, tmp_path: Path
) -> None:
    both = tool_reply(
        call("execute_bash", command="echo kept > file"), call("weather", city="Bonn")
    )
    script = [both, bash("cat file"), text_reply("It rains.")]
    async with scripted_backend(script) as backend:
        async with session_client(backend, kind, tmp_path) as client:
            first = await complete(client, FIRST, tools=[WEATHER])
            calls = message(first)["tool_calls"]
            result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "Rain."}
            if not restart:
                second = await complete(client, FIRST, message(first), result, tools=[WEATHER])
        if restart:
            async with session_client(backend, kind, tmp_path) as client:
                # The client sends only the last messages.
                second = await complete(client, result, tools=[WEATHER])
        before, after = (request.body["messages"] for request in backend.requests[:2])
        assert after[: len(before)] == before
        assert tool_results(backend, 1)[1] == "Rain."
        assert "kept" in tool_results(backend, 2)[2]
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert [each["function"]["name"] for each in calls] == ["weather"]
    assert message(second)["content"] == "It rains."
    assert second["sandbox"]["container_id"] == first["sandbox"]["container_id"]


async def test_expired_suspended_run_is_rebuilt_from_messages_and_files(
    tmp_path: Path,
) -> None:
    both = tool_reply(
        call("execute_bash", command="echo kept > file"), call("weather", city="Bonn")
    )
    script = [both, bash("cat file"), text_reply("It rains.")]
    async with scripted_backend(script) as backend:
        sessions = SessionSettings(retention_hours=1e6)
        now = FileStore(open_store(tmp_path, sessions), limits=ArtifactLimits())
        async with session_client(backend, "memory", tmp_path, files=now) as client:
            first = await complete(client, FIRST, tools=[WEATHER])
        store = open_store(tmp_path, sessions, now=lambda: time.time() + SUSPENDED_KEEP_S + 1)
        later = FileStore(store, limits=ArtifactLimits())
        async with session_client(backend, "memory", tmp_path, files=later) as client:
            (made,) = message(first)["tool_calls"]
            result = {"role": "tool", "tool_call_id": made["id"], "content": "Rain."}
            second = await complete(client, FIRST, message(first), result, tools=[WEATHER])
        assert tool_results(backend, 1) == ["Rain."]
        assert "kept" in tool_results(backend, 2)[1]
    assert message(second)["content"] == "It rains."
    assert second["sandbox"]["container_id"] == first["sandbox"]["container_id"]
    assert second["sandbox"]["restored"] is True


async def test_suspended_run_is_not_resumed_with_another_key(tmp_path: Path) -> None:
    script = [tool_reply(call("weather", city="Bonn")), text_reply("It rains.")]
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        first = message(await complete(client, FIRST, tools=[WEATHER]))
        result = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": "Rain."}
        theirs = {"Authorization": "Bearer somebody-else"}
        await complete(client, FOLLOW_UP, first, result, tools=[WEATHER], headers=theirs)
        messages = backend.requests[1].body["messages"]
    assert [each["content"] for each in messages if each["role"] == "user"] == [
        FOLLOW_UP["content"]
    ]


async def test_two_branches_of_a_chat_have_separate_files(tmp_path: Path) -> None:
    chat = {"X-Chat-Id": "chat 1"}

    def reply(body: dict[str, Any]) -> Any:
        said = [each["content"] for each in body["messages"] if each["role"] == "user"]
        if body["messages"][-1]["role"] == "tool":
            return text_reply("Done.")
        command = "echo begun > file" if len(said) == 1 else f"echo {said[-1]} >> file; cat file"
        return bash(command)

    async with (
        scripted_backend(reply) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        first = message(await complete(client, FIRST, headers=chat))
        async with anyio.create_task_group() as group:
            for word in ("left", "right"):
                asked = {"role": "user", "content": word}

                async def go_on(asked: dict[str, Any] = asked) -> None:
                    await complete(client, FIRST, first, asked, headers=chat)

                group.start_soon(go_on)
        outputs = [
            request.body["messages"][-1]["content"]
            for request in backend.requests[2:]
            if request.body["messages"][-1]["role"] == "tool"
        ]
    shown = sorted(output.partition("[stdout]\n")[2] for output in outputs)
    assert shown == ["begun\nleft", "begun\nright"]


async def test_repeated_first_message_of_a_chat_starts_without_the_files_of_the_first_run(
    tmp_path: Path,
) -> None:
    script = [bash("echo one > output/file"), text_reply("Done.")]
    chat = {"X-Chat-Id": "chat 1"}
    async with (
        scripted_backend(script * 2) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        first = await complete(client, FIRST, headers=chat)
        again = await complete(client, FIRST, headers=chat)
    names = [file["filename"] for each in (first, again) for file in each["sandbox"]["files"]]
    assert names == ["file", "file"]


async def test_input_file_replaces_an_earlier_file_of_the_same_name(tmp_path: Path) -> None:
    script = [bash("cat documents/data.csv"), text_reply("Done.")]
    script += [bash("cat documents/data.csv; echo mine > documents/data.csv"), text_reply("Done.")]
    script += [bash("cat documents/data.csv"), text_reply("Done.")]

    def given(data: str) -> dict[str, Any]:
        part = {"filename": "data.csv", "file_data": base64.b64encode(data.encode()).decode()}
        return {"role": "user", "content": [{"type": "file", "file": part}]}

    named = {"session": "mine"}
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        for data in ("old", "new", "new"):
            await complete(client, given(data), sandbox=named)
        shown = [
            tool_results(backend, number)[0].partition("[stdout]\n")[2] for number in (1, 3, 5)
        ]
    assert shown == ["old", "new", "mine"]


async def test_resumed_run_ignores_an_older_answer_file(
    tmp_path: Path,
) -> None:
    script = [bash("echo OLD > output/answer.txt"), text_reply("Done.")]
    script += [tool_reply(call("weather", city="Bonn")), bash("true"), text_reply("It rains.")]
    named = {"session": "mine"}
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        assert message(await complete(client, FIRST, sandbox=named))["content"] == "OLD"
        calling = message(await complete(client, FOLLOW_UP, sandbox=named, tools=[WEATHER]))
        result = {"role": "tool", "tool_call_id": calling["tool_calls"][0]["id"], "content": "Rain"}
        last = await complete(client, FOLLOW_UP, calling, result, sandbox=named, tools=[WEATHER])
    assert message(last)["content"] == "It rains."


async def test_tool_result_with_an_unknown_call_id_is_accepted(tmp_path: Path) -> None:
    script = [tool_reply(call("weather", city="Bonn")), text_reply("It rains.")]
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        first = message(await complete(client, FIRST, tools=[WEATHER]))
        wrong = first["tool_calls"][0]["id"].removesuffix("1") + "99"
        result = {"role": "tool", "tool_call_id": wrong, "content": "Rain."}
        await complete(client, FIRST, first, result, tools=[WEATHER])


async def test_idempotency_key_reused_in_another_session_is_refused(tmp_path: Path) -> None:
    script = [text_reply("One."), text_reply("Two.")]
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        keyed = {"Idempotency-Key": "1"}
        one = await complete(client, FIRST, headers={**keyed, "X-Sandbox-Session": "alice"})
        body = {"model": "fake-model", "messages": [FIRST]}
        headers = {**keyed, "X-Sandbox-Session": "bob"}
        two = await client.post(PATH, json=body, headers=headers)
    assert message(one)["content"] == "One."
    assert two.status_code == 422


async def test_container_files_of_the_client_are_visible_to_its_runs(tmp_path: Path) -> None:
    script = [bash("cat documents/data.csv; echo more >> documents/data.csv"), text_reply("Done.")]
    script += [bash("cat documents/data.csv"), text_reply("Done.")]
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        container = (await client.post("/v1/containers", json={"name": "mine"})).json()["id"]
        upload = {"file": ("data.csv", b"one\n")}
        await client.post(f"/v1/containers/{container}/files", files=upload)
        for _ in range(2):
            made = await complete(client, FIRST, sandbox={"container_id": container})
        shown = [tool_results(backend, number)[0].partition("[stdout]\n")[2] for number in (1, 3)]
    assert shown == ["one", "one\nmore"]
    assert made["sandbox"]["container_id"] == container


@pytest.mark.parametrize("changed", [False, True])
async def test_legacy_function_result_resumes_the_run_only_if_the_call_and_the_history_match(
    changed: bool, tmp_path: Path
) -> None:
    both = tool_reply(
        call("execute_bash", command="echo kept > file"), call("weather", city="Bonn")
    )
    script = [both, both, bash("cat file"), text_reply("It rains.")]
    functions = [WEATHER["function"]]
    result = {"role": "function", "name": "weather", "content": "Rain."}
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        said: list[dict[str, Any]] = [FOLLOW_UP if changed else FIRST]
        first = message(await complete(client, FIRST, functions=functions))
        said += [{"role": "assistant", **_called(first)}, result]
        second = message(await complete(client, *said, functions=functions))
        if not changed:
            said += [{"role": "assistant", **_called(second)}, {**result, "content": "Snow."}]
            last = message(await complete(client, *said, functions=functions))
            assert last["content"] == "It rains."
            assert tool_results(backend, 2)[1::2] == ["Rain.", "Snow."]
            assert "[stdout]\nkept" in tool_results(backend, 3)[-1]
        before, after = (request.body["messages"] for request in backend.requests[:2])
    assert (after[: len(before)] == before) is not changed
    assert "tool_calls" not in first


def _called(made: dict[str, Any]) -> dict[str, Any]:
    return {"content": None, "function_call": made["function_call"]}


async def test_answer_with_files_can_be_sent_back_unchanged(tmp_path: Path) -> None:
    drawn = bash("printf '\\x89PNG' > output/plot.png")
    script = [drawn, text_reply("Drawn."), text_reply("A plot.")]
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        first = message(await complete(client, FIRST))
        await complete(client, FIRST, first, FOLLOW_UP)
    assert first["images"]
    assert first["annotations"]
    sent = backend.requests[2].body["messages"]
    assert sent[2] == {"role": "assistant", "content": "Drawn.", "refusal": None}


async def test_large_input_file_is_written_once(tmp_path: Path) -> None:
    data = base64.b64encode(bytes(2 << 20)).decode()
    part = {"type": "file", "file": {"filename": "big.txt", "file_data": data}}
    asked = {"role": "user", "content": [part]}
    script = [bash("echo changed > documents/big.txt"), text_reply("Done.")]
    script += [bash("cat documents/big.txt documents/.given"), text_reply("Seen.")]
    chat = {"X-Chat-Id": "1"}
    async with (
        scripted_backend(script) as backend,
        session_client(backend, "memory", tmp_path) as client,
    ):
        first = message(await complete(client, asked, headers=chat))
        await complete(client, asked, first, FOLLOW_UP, headers=chat)
        _, seen = tool_results(backend, 3)[-1].split("[stdout]\n")
    assert seen.startswith("changed\n")
    assert len(seen) < 1000
