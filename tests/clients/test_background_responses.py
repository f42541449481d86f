"""Responses that are made while nobody waits: polled, heard again, cancelled, cut off."""

import asyncio
from contextlib import closing
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import openai
import pytest
from openai.types.responses import Response

from proxy.api.dependencies import owner_of
from proxy.models.scripted import text_reply
from proxy.store.records import StoredResponse
from proxy.store.store import Store
from tests.clients.responses import (
    MODEL,
    ask,
    bash,
    client,
    frames,
    other,
    over,
    refused,
    streamed,
    told_again,
)
from tests.fakes.backend import Held, Refusal, scripted_backend

NEVER = "Never said."


async def test_a_response_in_the_background_is_told_of_at_once_and_made(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [bash("echo 42"), Held(text_reply("42."), release)]
    async with scripted_backend(script) as backend, client(backend, tmp_path) as mine:
        made = await ask(mine, "How many?", background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        await backend.arrived(2)
        found = await mine.responses.retrieve(made.id)
        assert (found.status, found.created_at) == ("in_progress", made.created_at)
        error = await refused(ask(mine, "Why?", previous_response_id=made.id))
        assert error.code == "previous_response_in_progress"
        release.set()
        ended = await over(mine, made.id)
        assert (ended.status, ended.output_text) == ("completed", "42.")
        assert ended.created_at == made.created_at
        assert await mine.responses.cancel(made.id) == ended


async def test_a_response_in_the_background_can_be_cancelled(tmp_path: Path) -> None:
    script = [Held(text_reply(NEVER), asyncio.Event())]
    async with scripted_backend(script) as backend, client(backend, tmp_path) as mine:
        made = await ask(mine, "How many?", background=True)
        seen = await backend.arrived(1)
        with anyio.fail_after(30):
            cancelled = await mine.responses.cancel(made.id)
            await seen.gone.wait()
        assert (cancelled.status, cancelled.error) == ("cancelled", None)
        assert await mine.responses.cancel(made.id) == cancelled
        assert await mine.responses.retrieve(made.id) == cancelled


async def test_only_a_response_in_the_background_can_be_cancelled(tmp_path: Path) -> None:
    async with scripted_backend([text_reply("42.")]) as backend, client(backend, tmp_path) as mine:
        made = await ask(mine, "How many?")
        error = await refused(mine.responses.cancel(made.id))
    assert (error.status_code, error.message.count("Cannot cancel a synchronous response.")) == (
        400,
        1,
    )


async def test_a_response_that_is_deleted_while_it_is_made_is_made_no_more(tmp_path: Path) -> None:
    script = [Held(text_reply(NEVER), asyncio.Event())]
    async with scripted_backend(script) as backend, client(backend, tmp_path) as mine:
        made = await ask(mine, "How many?", background=True)
        seen = await backend.arrived(1)
        with anyio.fail_after(30):
            assert (await refused(other(mine).responses.delete(made.id))).status_code == 404
            await mine.responses.delete(made.id)
            await seen.gone.wait()
        assert (await refused(mine.responses.retrieve(made.id))).status_code == 404


async def left_half_way(client: openai.AsyncOpenAI) -> str:
    """A response whose answer has begun; its id."""
    with anyio.fail_after(30):
        stream = await client.responses.create(
            model=MODEL, input="How many?", tool_choice="none", background=True, stream=True
        )
        async for event in stream:
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                break
        await stream.close()
    return response_id


async def test_who_comes_back_hears_on_from_where_it_left(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [bash("echo 42"), Held(text_reply("It is 42, I think."), release, after_pieces=3)]
    async with scripted_backend(script) as backend, client(backend, tmp_path) as mine:
        with anyio.fail_after(30):
            stream = await mine.responses.create(
                model=MODEL, input="How many?", background=True, stream=True
            )
            heard = [await anext(aiter(stream)) for _ in range(4)]
            await stream.close()
            assert heard[0].type == "response.created"
            response_id = heard[0].response.id
            await backend.arrived(2)
            release.set()
            again = await mine.responses.retrieve(
                response_id, stream=True, starting_after=heard[-1].sequence_number
            )
            rest = [event async for event in again]
            whole = [e async for e in await mine.responses.retrieve(response_id, stream=True)]
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert [event.to_dict() for event in whole] == [event.to_dict() for event in [*heard, *rest]]
    assert whole[-1].type == "response.completed"
    assert whole[-1].response.output_text == "It is 42, I think."


async def test_two_hear_the_same_of_one_that_failed(tmp_path: Path) -> None:
    async with scripted_backend([]) as backend, client(backend, tmp_path) as mine:
        made = await ask(mine, "How many?", background=True)
        ended = await over(mine, made.id)
        assert ended.status == "failed"
        assert ended.error
        assert ended.error.message == "the script has no more"
        headers = {"Authorization": "Bearer mine"}
        async with httpx.AsyncClient(headers=headers) as http:
            path = f"{mine.base_url}responses/{made.id}?stream=true"
            events = frames((await http.get(path)).text)
            later = frames((await http.get(f"{path}&starting_after=1")).text)
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.failed")
    assert events[2:] == later


async def test_what_was_not_made_in_the_background_cannot_be_heard_again(tmp_path: Path) -> None:
    async with scripted_backend([text_reply("42.")]) as backend, client(backend, tmp_path) as mine:
        made = await ask(mine, "How many?")
        error = await refused(mine.responses.retrieve(made.id, stream=True))
    assert (error.status_code, error.param) == (400, "stream")


async def test_a_response_that_the_server_did_not_live_to_end_has_failed(tmp_path: Path) -> None:
    script = [Held(text_reply(NEVER), asyncio.Event()), text_reply("Better.")]
    async with scripted_backend(script) as backend:
        async with client(backend, tmp_path) as mine:
            made = await ask(mine, "How many?", background=True)
            await backend.arrived(1)
        async with client(backend, tmp_path) as mine:
            found = await mine.responses.retrieve(made.id)
            assert (found.status, found.output) == ("failed", [])
            assert found.error
            assert "server ended before the run had a result" in found.error.message
            assert await mine.responses.cancel(made.id) == found
            second = await ask(mine, "Again.", previous_response_id=made.id)
    assert second.output_text == "Better."


async def left_at_work(store: Store, like: Response) -> str:
    """A response that another process has begun; its id."""
    record = {**like.to_dict(), "id": "resp_other", "status": "in_progress", "background": True}
    stored = StoredResponse("resp_other", "cntr_1", "1", record, worker=store.worker.id)
    await store.responses.begin(owner_of("mine"), stored, [], [])
    return stored.id


async def test_a_response_of_a_process_that_was_killed_has_failed(tmp_path: Path) -> None:
    async with scripted_backend([text_reply("42.")]) as backend, client(backend, tmp_path) as mine:
        made = await ask(mine, "How many?")
        with closing(Store(tmp_path)) as store:
            elsewhere = await left_at_work(store, made)
            assert (await mine.responses.retrieve(elsewhere)).status == "in_progress"
            error = await refused(mine.responses.cancel(elsewhere))
            assert (error.status_code, error.code) == (409, "run_elsewhere")
        found = await mine.responses.retrieve(elsewhere)
    assert found.status == "failed"
    assert found.error
    assert found.error.code == "server_error"


async def test_a_stream_is_told_again_after_a_restart_from_any_event_on(tmp_path: Path) -> None:
    cut_off = Held(text_reply("It is, I think."), asyncio.Event(), after_pieces=3)
    never = Held(text_reply(NEVER), asyncio.Event())
    script = [bash("echo 42"), text_reply("It is 42."), Refusal(400, "no"), cut_off, never]
    async with scripted_backend(script) as backend:
        async with client(backend, tmp_path) as mine:
            whole = await streamed(mine, "How many?", {})
            failed = await ask(mine, "How many?", background=True)
            await over(mine, failed.id)
            cancelled = await mine.responses.cancel(await left_half_way(mine))
            stopped = await ask(mine, "How many?", background=True)
        made = whole[-1]["response"]["id"]
        async with client(backend, tmp_path) as mine:
            assert await told_again(mine, made) == whole
            assert await told_again(mine, made, starting_after=3) == whole[4:]
            assert await told_again(mine, made, starting_after=len(whole)) == []
            error = await refused(other(mine).responses.retrieve(made, stream=True))
            assert error.status_code == 404
            ends = [await told_again(mine, each.id) for each in (failed, cancelled, stopped)]
            stands = [
                await mine.responses.retrieve(each.id) for each in (failed, cancelled, stopped)
            ]
    assert [events[-1]["type"] for events in ends] == ["response.failed"] * 3
    told = [events[-1]["response"] for events in ends]
    assert [each["status"] for each in told] == ["failed", "cancelled", "failed"]
    assert told == [each.to_dict() for each in stands]
    (message,) = told[1]["output"]
    assert message["status"] == "incomplete"
    assert "It is, I think.".startswith(message["content"][0]["text"])


@pytest.mark.parametrize("number", ["x", "-1"])
async def test_a_place_in_the_stream_is_a_number(number: str, tmp_path: Path) -> None:
    async with scripted_backend([text_reply("42.")]) as backend, client(backend, tmp_path) as mine:
        made = await ask(mine, "How many?", background=True)
        await over(mine, made.id)
        query = {"stream": "true", "starting_after": number}
        error = await refused(mine.responses.retrieve(made.id, extra_query=query))
    assert (error.status_code, error.param) == (400, "starting_after")
