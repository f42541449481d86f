"""Stored responses: retrieved, continued, branched and deleted, also after a restart."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import openai
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.responses_sdk import (
    MODEL,
    api_error,
    bash,
    container_of,
    create_response,
    responses_client,
    sent_messages,
    tool_results,
    with_other_key,
)
from tests.fakes.backend import Held, Item, Refusal, scripted_backend
from tests.fakes.server import Kind

KINDS = ("memory", "bubblewrap")
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object"},
    "strict": False,
}


async def test_response_can_be_retrieved(tmp_path: Path) -> None:
    script = [bash("echo 42"), text_reply("42.")]
    async with scripted_backend(script) as backend:
        async with responses_client(backend, tmp_path) as mine:
            made = await create_response(mine, "How many?", metadata={"a": "b"})
            assert await mine.responses.retrieve(made.id) == made
        async with responses_client(backend, tmp_path) as mine:
            again = await mine.responses.retrieve(made.id, include=["reasoning.encrypted_content"])
    assert again == made
    assert (again.status, again.output_text, again.metadata) == ("completed", "42.", {"a": "b"})


async def test_streamed_response_is_stored_before_its_last_event(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42.")]) as backend,
        responses_client(backend, tmp_path) as mine,
        mine.responses.stream(model=MODEL, input="How many?") as stream,
    ):
        async for event in stream:
            if event.type == "response.completed":
                kept = await mine.responses.retrieve(event.response.id)
                assert (kept.status, kept.output_text) == ("completed", "42.")


async def test_response_with_store_false_is_not_stored(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42.")]) as backend,
        responses_client(backend, tmp_path) as mine,
    ):
        made = await create_response(mine, "How many?", store=False)
        assert made.store is False
        assert (await api_error(mine.responses.retrieve(made.id))).status_code == 404
        error = await api_error(create_response(mine, "Why?", previous_response_id=made.id))
    assert (error.status_code, error.code, error.param) == (
        400,
        "previous_response_not_found",
        "previous_response_id",
    )


async def test_continued_response_keeps_messages_but_not_instructions(
    tmp_path: Path,
) -> None:
    script = [text_reply("I am."), text_reply("Again."), text_reply("And again.")]
    async with scripted_backend(script) as backend:
        async with responses_client(backend, tmp_path) as mine:
            first = await create_response(mine, "Who?", instructions="Be brief.")
            second = await create_response(mine, "What?", previous_response_id=first.id)
        async with responses_client(backend, tmp_path) as mine:
            third = await create_response(mine, "Why?", previous_response_id=second.id)
        assert "Be brief." in str(backend.requests[0].body["messages"])
        assert "Be brief." not in str(backend.requests[1].body["messages"])
        assert sent_messages(backend, 2) == [
            ("user", "Who?"),
            ("assistant", "I am."),
            ("user", "What?"),
            ("assistant", "Again."),
            ("user", "Why?"),
        ]
    assert (third.previous_response_id, third.output_text) == (second.id, "And again.")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("restart", [False, True])
async def test_continued_response_uses_the_previous_container(
    kind: Kind, restart: bool, tmp_path: Path
) -> None:
    script = [bash("echo one > file"), text_reply("Done."), bash("cat file"), text_reply("One.")]
    async with scripted_backend(script) as backend:
        async with responses_client(backend, tmp_path, kind) as mine:
            first = await create_response(mine, "Begin.")
            if not restart:
                second = await create_response(mine, "Go on.", previous_response_id=first.id)
        if restart:
            async with responses_client(backend, tmp_path, kind) as mine:
                second = await create_response(mine, "Go on.", previous_response_id=first.id)
        assert "one" in tool_results(backend, 3)[0]
    assert container_of(second) == container_of(first)
    assert ("restored" in (second.model_extra or {})["sandbox"]) == restart


async def test_two_branches_of_a_response_have_separate_files(tmp_path: Path) -> None:
    release, arrived = {"left": asyncio.Event(), "right": asyncio.Event()}, set[str]()
    words: dict[str, str] = {}

    def choose(body: dict[str, Any]) -> Item:
        messages = body["messages"]
        last = max(n for n, message in enumerate(messages) if message["role"] == "user")
        word, turn = messages[last]["content"], len(messages) - last
        if turn == 1:
            arrived.add(word)
            if arrived >= set(release):
                for each in release.values():
                    each.set()
            adds = bash(f"echo {word} >> file")
            return Held(adds, release[word]) if word in release else adds
        if turn == 3:
            return bash("cat file")
        words[word] = messages[-1]["content"].split("[stdout]\n")[1]
        return text_reply("Done.")

    async with scripted_backend(choose) as backend, responses_client(backend, tmp_path) as mine:
        root = await create_response(mine, "root")
        made: dict[str, str] = {}

        async def branch(word: str) -> None:
            made[word] = (await create_response(mine, word, previous_response_id=root.id)).id

        async with anyio.create_task_group() as group:
            group.start_soon(branch, "left")
            group.start_soon(branch, "right")
        await create_response(mine, "leaf", previous_response_id=made["left"])
        await create_response(mine, "late", previous_response_id=root.id)
    assert words == {
        "root": "root",
        "left": "root\nleft",
        "right": "root\nright",
        "leaf": "root\nleft\nleaf",
        "late": "root\nlate",
    }


@pytest.mark.parametrize("restart", [False, True])
async def test_function_result_resumes_the_suspended_run(restart: bool, tmp_path: Path) -> None:
    both = tool_reply(
        call("execute_bash", command="echo kept > file"), call("weather", city="Bonn")
    )
    script = [both, bash("cat file"), text_reply("It rains.")]
    async with scripted_backend(script) as backend:
        async with responses_client(backend, tmp_path) as mine:
            first = await create_response(mine, "Weather?", tools=[WEATHER])
            (called,) = (item for item in first.output if item.type == "function_call")
            answer = {"type": "function_call_output", "call_id": called.call_id, "output": "Rain."}
            before = {"previous_response_id": first.id, "tools": [WEATHER]}
            if not restart:
                second = await create_response(mine, [answer], **before)
        if restart:
            async with responses_client(backend, tmp_path) as mine:
                second = await create_response(mine, [answer], **before)
        asked, resumed = (request.body["messages"] for request in backend.requests[:2])
        assert resumed[: len(asked)] == asked
        assert "Rain." in tool_results(backend, 1)
        assert "kept" in tool_results(backend, 2)[-1]
    assert second.output_text == "It rains."
    assert container_of(second) == container_of(first)


async def test_response_without_a_sandbox_keeps_the_files_for_the_next_response(
    tmp_path: Path,
) -> None:
    script = [
        *(bash("echo one > file"), text_reply("Done.")),
        text_reply("Nothing."),
        *(bash("cat file"), text_reply("One.")),
    ]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        first = await create_response(mine, "Begin.")
        second = await create_response(
            mine, "Wait.", previous_response_id=first.id, tool_choice="none"
        )
        third = await create_response(mine, "Go on.", previous_response_id=second.id)
        assert "tools" not in backend.requests[2].body
        assert "one" in tool_results(backend, 4)[0]
    assert container_of(third) == container_of(first)


async def test_runs_resumed_by_two_results_of_one_call_have_separate_files(tmp_path: Path) -> None:
    script = [
        tool_reply(call("weather", city="Bonn")),
        *(bash("echo one > file"), text_reply("One.")),
        *(bash("ls"), text_reply("Two.")),
    ]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        first = await create_response(mine, "Weather?", tools=[WEATHER])
        (called,) = (item for item in first.output if item.type == "function_call")
        for answer in ("Rain.", "Sun."):
            result = {
                "type": "function_call_output",
                "call_id": called.call_id,
                "output": answer,
            }
            await create_response(mine, [result], previous_response_id=first.id, tools=[WEATHER])
        assert tool_results(backend, 3)[0] == "Sun."
        assert "documents" in tool_results(backend, 4)[-1]
        assert "file" not in tool_results(backend, 4)[-1]


async def test_item_reference_is_replaced_by_the_stored_item(tmp_path: Path) -> None:
    script = [text_reply("I am.")] * 2
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        first = await create_response(mine, "Who?")
        items = await mine.responses.input_items.list(first.id)
        said = [{"type": "item_reference", "id": items.data[0].id}, {"id": first.output[-1].id}]
        await create_response(mine, [*said, {"role": "user", "content": "Why?"}])
        assert sent_messages(backend, 1) == [
            ("user", "Who?"),
            ("assistant", "I am."),
            ("user", "Why?"),
        ]
        for asking, named in ((mine, "msg_nowhere"), (with_other_key(mine), first.output[-1].id)):
            error = await api_error(
                create_response(asking, [{"type": "item_reference", "id": named}])
            )
            assert error.status_code == 404
            assert named in error.message


async def test_input_items_are_listed_in_pages(tmp_path: Path) -> None:
    script = [text_reply("I am."), text_reply("Again.")]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        first = await create_response(mine, "Who?")
        said = [{"role": "user", "content": f"What {n}?"} for n in range(3)]
        second = await create_response(mine, said, previous_response_id=first.id)
        listed = mine.responses.input_items.list(second.id, order="asc", limit=2)
        texts = [item.to_dict()["content"][0]["text"] async for item in listed]
        assert texts == ["Who?", "I am.", "What 0?", "What 1?", "What 2?"]
        page = await mine.responses.input_items.list(second.id, limit=1)
        assert page.has_more
        newest = page.data[0]
        rest = await mine.responses.input_items.list(second.id, after=newest.id)
        assert (len(rest.data), rest.has_more) == (4, False)
        own = await mine.responses.input_items.list(first.id)
        assert [item.id for item in own.data] == [rest.data[-1].id]
        error = await api_error(mine.responses.input_items.list(second.id, after="msg_nowhere"))
        assert (error.status_code, error.param) == (400, "after")


async def test_response_of_another_key_is_not_found(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42.")]) as backend,
        responses_client(backend, tmp_path) as mine,
    ):
        made = await create_response(mine, "How many?")
        yours = with_other_key(mine)
        for asking in (
            yours.responses.retrieve(made.id),
            yours.responses.delete(made.id),
            yours.responses.cancel(made.id),
            yours.responses.input_items.list(made.id),
        ):
            error = await api_error(asking)
            assert (error.status_code, error.param) == (404, "response_id")
        error = await api_error(create_response(yours, "Why?", previous_response_id=made.id))
        assert error.code == "previous_response_not_found"
        assert (await mine.responses.retrieve(made.id)).id == made.id


async def test_deleted_response_is_not_found(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42.")]) as backend,
        responses_client(backend, tmp_path) as mine,
    ):
        made = await create_response(mine, "How many?")
        deleted = await mine.responses.with_raw_response.delete(made.id)
        assert deleted.http_response.json() == {
            "id": made.id,
            "object": "response",
            "deleted": True,
        }
        for asking in (mine.responses.retrieve(made.id), mine.responses.delete(made.id)):
            assert (await api_error(asking)).status_code == 404
        error = await api_error(create_response(mine, "Why?", previous_response_id=made.id))
        assert error.code == "previous_response_not_found"


async def test_failed_response_is_stored_as_failed(tmp_path: Path) -> None:
    script = [bash("echo one > file"), Refusal(400, "no such thing"), text_reply("Better.")]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        with anyio.fail_after(30):
            stream = await mine.responses.create(model=MODEL, input="Begin.", stream=True)
            begun = await anext(aiter(stream))
            assert begun.type == "response.created"
            with pytest.raises(openai.APIError, match="no such thing"):
                [event async for event in stream]
        kept = await mine.responses.retrieve(begun.response.id)
        assert kept.status == "failed"
        assert kept.error
        assert "no such thing" in kept.error.message
        second = await create_response(mine, "Again.", previous_response_id=kept.id)
    assert second.output_text == "Better."


async def test_response_of_a_disconnected_client_is_stored_as_cancelled(tmp_path: Path) -> None:
    script = [Held(text_reply("Never said."), asyncio.Event())]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        with anyio.fail_after(30):
            stream = await mine.responses.create(model=MODEL, input="Begin.", stream=True)
            begun = await anext(aiter(stream))
            assert begun.type == "response.created"
            at_work = await mine.responses.retrieve(begun.response.id)
            assert at_work.status == "in_progress"
            seen = await backend.arrived(1)
            await stream.close()
            await seen.gone.wait()
            while (kept := await mine.responses.retrieve(at_work.id)).status == "in_progress":
                await anyio.lowlevel.checkpoint()
    assert (kept.status, kept.error) == ("cancelled", None)


async def test_truncated_response_is_stored_as_incomplete(tmp_path: Path) -> None:
    script = [{"content": "4", "finish_reason": "length"}] * 3
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        made = await create_response(mine, "How many?")
        kept = await mine.responses.retrieve(made.id)
    assert kept == made
    assert kept.status == "incomplete"
    assert kept.incomplete_details
    assert kept.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        (
            {"previous_response_id": "resp_1", "conversation": "conv_1"},
            "previous_response_id",
            "mutually_exclusive_parameters",
        ),
        ({"previous_response_id": 1}, "previous_response_id", "invalid_type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
        ({"conversation": {}}, "conversation.id", "missing_required_parameter"),
        ({"conversation": 1}, "conversation", "invalid_type"),
        ({"background": True, "store": False}, "background", "invalid_value"),
    ],
)
async def test_invalid_continuation_is_refused(
    body: dict[str, Any], param: str, code: str, tmp_path: Path
) -> None:
    async with scripted_backend([]) as backend, responses_client(backend, tmp_path) as mine:
        error = await api_error(create_response(mine, "Hello.", extra_body=body))
    assert (error.status_code, error.param, error.code) == (400, param, code)


async def test_unknown_include_value_is_refused(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42.")]) as backend,
        responses_client(backend, tmp_path) as mine,
    ):
        made = await create_response(mine, "How many?")
        wrong: Any = ["everything"]
        for asking in (
            mine.responses.retrieve(made.id, include=wrong),
            mine.responses.input_items.list(made.id, include=wrong),
        ):
            error = await api_error(asking)
            assert (error.status_code, error.param) == (400, "include[0]")


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
async def test_unsupported_response_methods_are_refused(method: str, tmp_path: Path) -> None:
    async with (
        scripted_backend([]) as backend,
        responses_client(backend, tmp_path) as mine,
        httpx.AsyncClient() as http,
    ):
        answer = await http.request(method, f"{mine.base_url}responses/resp_1", json={})
    assert answer.status_code == 405
    assert answer.json()["error"]["type"] == "invalid_request_error"
