"""Background responses: polling, resumed streams, cancellation, deletion and restarts of the
server.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing
from pathlib import Path

import anyio
import anyio.lowlevel
import httpx
import openai
import pytest

from proxy.api.dependencies import owner_of
from proxy.models.scripted import text_reply
from proxy.store.records import StoredResponse
from tests.clients.responses_sdk import (
    MODEL,
    api_error,
    bash,
    create_response,
    replay_events,
    responses_client,
    sse_data,
    stream_events,
    wait_until_finished,
    with_other_key,
)
from tests.fakes.backend import Held, Refusal, scripted_backend
from tests.stores import open_store

NEVER = "Never said."


async def test_background_response_is_returned_at_once_and_completed_later(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [bash("echo 42"), Held(text_reply("42."), release)]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        made = await create_response(mine, "How many?", background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        await backend.arrived(2)
        found = await mine.responses.retrieve(made.id)
        assert (found.status, found.created_at) == ("in_progress", made.created_at)
        error = await api_error(create_response(mine, "Why?", previous_response_id=made.id))
        assert error.code == "previous_response_in_progress"
        release.set()
        ended = await wait_until_finished(mine, made.id)
        assert (ended.status, ended.output_text) == ("completed", "42.")
        assert ended.created_at == made.created_at
        assert await mine.responses.cancel(made.id) == ended


async def test_background_response_can_be_cancelled(tmp_path: Path) -> None:
    script = [Held(text_reply(NEVER), asyncio.Event())]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        made = await create_response(mine, "How many?", background=True)
        seen = await backend.arrived(1)
        with anyio.fail_after(30):
            cancelled = await mine.responses.cancel(made.id)
            await seen.gone.wait()
        assert (cancelled.status, cancelled.error) == ("cancelled", None)
        assert await mine.responses.cancel(made.id) == cancelled
        assert await mine.responses.retrieve(made.id) == cancelled


async def test_foreground_response_cannot_be_cancelled(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42.")]) as backend,
        responses_client(backend, tmp_path) as mine,
    ):
        made = await create_response(mine, "How many?")
        error = await api_error(mine.responses.cancel(made.id))
    assert (error.status_code, error.message.count("Cannot cancel a synchronous response.")) == (
        400,
        1,
    )


async def test_deleting_a_response_in_progress_stops_its_run(tmp_path: Path) -> None:
    script = [Held(text_reply(NEVER), asyncio.Event())]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
        made = await create_response(mine, "How many?", background=True)
        seen = await backend.arrived(1)
        with anyio.fail_after(30):
            assert (
                await api_error(with_other_key(mine).responses.delete(made.id))
            ).status_code == 404
            await mine.responses.delete(made.id)
            await seen.gone.wait()
        assert (await api_error(mine.responses.retrieve(made.id))).status_code == 404


async def disconnect_during_answer(responses_client: openai.AsyncOpenAI) -> str:
    """Start a response, disconnect after its first text, and return its id."""
    with anyio.fail_after(30):
        stream = await responses_client.responses.create(
            model=MODEL, input="How many?", tool_choice="none", background=True, stream=True
        )
        async for event in stream:
            if event.type == "response.created":
                response_id = event.response.id
            if event.type == "response.output_text.delta":
                break
        await stream.close()
    return response_id


async def test_stream_resumes_after_the_last_received_event(tmp_path: Path) -> None:
    release = asyncio.Event()
    script = [bash("echo 42"), Held(text_reply("It is 42, I think."), release, after_pieces=3)]
    async with scripted_backend(script) as backend, responses_client(backend, tmp_path) as mine:
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


async def test_failed_response_replays_the_same_events_to_each_reader(tmp_path: Path) -> None:
    async with scripted_backend([]) as backend, responses_client(backend, tmp_path) as mine:
        made = await create_response(mine, "How many?", background=True)
        ended = await wait_until_finished(mine, made.id)
        assert ended.status == "failed"
        assert ended.error
        assert ended.error.message == "the script has no more"
        headers = {"Authorization": "Bearer mine"}
        async with httpx.AsyncClient(headers=headers) as http:
            path = f"{mine.base_url}responses/{made.id}?stream=true"
            events = sse_data((await http.get(path)).text)
            later = sse_data((await http.get(f"{path}&starting_after=1")).text)
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.failed")
    assert events[2:] == later


async def test_foreground_response_cannot_be_streamed_again(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42.")]) as backend,
        responses_client(backend, tmp_path) as mine,
    ):
        made = await create_response(mine, "How many?")
        error = await api_error(mine.responses.retrieve(made.id, stream=True))
    assert (error.status_code, error.param) == (400, "stream")


async def test_response_in_progress_at_shutdown_has_failed_after_restart(tmp_path: Path) -> None:
    script = [Held(text_reply(NEVER), asyncio.Event()), text_reply("Better.")]
    async with scripted_backend(script) as backend:
        async with responses_client(backend, tmp_path) as mine:
            made = await create_response(mine, "How many?", background=True)
            await backend.arrived(1)
        async with responses_client(backend, tmp_path) as mine:
            found = await mine.responses.retrieve(made.id)
            assert (found.status, found.output) == ("failed", [])
            assert found.error
            assert "server ended before the run had a result" in found.error.message
            assert await mine.responses.cancel(made.id) == found
            second = await create_response(mine, "Again.", previous_response_id=made.id)
    assert second.output_text == "Better."


@asynccontextmanager
async def response_elsewhere(
    tmp_path: Path,
) -> AsyncIterator[tuple[openai.AsyncOpenAI, str, ExitStack]]:
    """Yield a client, the id of a response that is stored as in progress at another process, and
    that process, which ends when it is closed."""
    async with (
        scripted_backend([text_reply("42.")]) as backend,
        responses_client(backend, tmp_path) as mine,
    ):
        made = await create_response(mine, "How many?")
        with ExitStack() as process:
            store = process.enter_context(closing(open_store(tmp_path)))
            record = {**made.to_dict(), "id": "resp_other", "status": "in_progress"}
            record["background"] = True
            stored = StoredResponse("resp_other", "cntr_1", "1", record, worker=store.process.id)
            await store.responses.begin(owner_of("mine"), stored, [], [])
            yield mine, stored.id, process


async def test_response_of_a_killed_process_has_failed(tmp_path: Path) -> None:
    async with response_elsewhere(tmp_path) as (mine, elsewhere, process):
        assert (await mine.responses.retrieve(elsewhere)).status == "in_progress"
        error = await api_error(mine.responses.cancel(elsewhere))
        assert (error.status_code, error.code) == (409, "run_elsewhere")
        process.close()
        found = await mine.responses.retrieve(elsewhere)
    assert found.status == "failed"
    assert found.error
    assert found.error.code == "server_error"


async def test_response_in_progress_at_another_process_is_not_deleted(tmp_path: Path) -> None:
    async with response_elsewhere(tmp_path) as (mine, elsewhere, process):
        error = await api_error(mine.responses.delete(elsewhere))
        assert (error.status_code, error.code) == (409, "run_elsewhere")
        assert (await mine.responses.retrieve(elsewhere)).status == "in_progress"
        process.close()
        await mine.responses.delete(elsewhere)
        assert (await api_error(mine.responses.retrieve(elsewhere))).status_code == 404


async def test_events_replay_from_any_position_after_a_restart(tmp_path: Path) -> None:
    cut_off = Held(text_reply("It is, I think."), asyncio.Event(), after_pieces=3)
    never = Held(text_reply(NEVER), asyncio.Event())
    script = [bash("echo 42"), text_reply("It is 42."), Refusal(400, "no"), cut_off, never]
    async with scripted_backend(script) as backend:
        async with responses_client(backend, tmp_path) as mine:
            whole = await stream_events(mine, "How many?", {})
            failed = await create_response(mine, "How many?", background=True)
            await wait_until_finished(mine, failed.id)
            cancelled = await mine.responses.cancel(await disconnect_during_answer(mine))
            stopped = await create_response(mine, "How many?", background=True)
        made = whole[-1]["response"]["id"]
        async with responses_client(backend, tmp_path) as mine:
            assert await replay_events(mine, made) == whole
            assert await replay_events(mine, made, starting_after=3) == whole[4:]
            assert await replay_events(mine, made, starting_after=len(whole)) == []
            error = await api_error(with_other_key(mine).responses.retrieve(made, stream=True))
            assert error.status_code == 404
            ends = [await replay_events(mine, each.id) for each in (failed, cancelled, stopped)]
            retrieved = [
                await mine.responses.retrieve(each.id) for each in (failed, cancelled, stopped)
            ]
    assert [events[-1]["type"] for events in ends] == ["response.failed"] * 3
    streamed = [events[-1]["response"] for events in ends]
    assert [each["status"] for each in streamed] == ["failed", "cancelled", "failed"]
    assert streamed == [each.to_dict() for each in retrieved]
    (message,) = streamed[1]["output"]
    assert message["status"] == "incomplete"
    assert "It is, I think.".startswith(message["content"][0]["text"])


@pytest.mark.parametrize("number", ["x", "-1"])
async def test_invalid_stream_position_is_refused(number: str, tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("42.")]) as backend,
        responses_client(backend, tmp_path) as mine,
    ):
        made = await create_response(mine, "How many?", background=True)
        await wait_until_finished(mine, made.id)
        query = {"stream": "true", "starting_after": number}
        error = await api_error(mine.responses.retrieve(made.id, extra_query=query))
    assert (error.status_code, error.param) == (400, "starting_after")
