"""Stored responses and conversations, and their expiry."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from policies.sessions import ResponseSettings
from proxy.errors import BadRequestError
from proxy.store.conversations import EMPTY_CONVERSATION_BYTES
from proxy.store.records import PageRequest, StoredConversation, StoredResponse
from proxy.store.responses import MAX_CHAIN_LENGTH
from proxy.store.store import Store
from tests.fakes.manual_clock import ManualClock
from tests.stores import open_store

MINE, YOURS = "somebody", "somebody else"
HOUR_S = 3600
KIB = 1 << 10
MORE_THAN_SQLITE_ALLOWS = 250_001
"""Above the largest usual limit of parameters in SQLite."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with opened(tmp_path, clock) as found:
        yield found


@contextmanager
def opened(directory: Path, clock: ManualClock) -> Iterator[Store]:
    """Open a store whose responses expire after an hour and whose quota is 1 MiB."""
    settings = ResponseSettings(retention_hours=1, quota_mib=1)
    store = open_store(directory, responses=settings, now=clock.time)
    try:
        yield store
    finally:
        store.close()


def message_item(id: str, text: str = "Hello.") -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "user", "content": text}


async def begin(
    store: Store, id: str, *, previous: str | None = None, conversation: str | None = None
) -> None:
    """Store a response that begins with one input message."""
    chain = await store.responses.chain(MINE, previous) if previous else None
    found = await store.conversations.all_items(MINE, conversation) if conversation else None
    response = StoredResponse(
        id=id,
        session="cntr_2" if id == "resp_2" else "cntr_1",
        state=f"state_{id}",
        record={"id": id, "status": "in_progress", "output": []},
        previous_id=previous,
        conversation_id=conversation,
        seen_seq=found[1] if found else None,
        worker=store.process.id,
    )
    await store.responses.begin(
        MINE, response, [message_item(f"in_{id}")], chain.ids if chain else ()
    )


async def end(store: Store, id: str, text: str = "Hi.", status: str = "completed") -> None:
    record = {"id": id, "status": status, "output": [message_item(f"out_{id}", text)]}
    await store.responses.end(MINE, id, record)


async def create(store: Store, id: str, **before: str) -> None:
    await begin(store, id, **before)
    await end(store, id)


async def inputs(store: Store, id: str) -> list[str] | None:
    """Return the ids of all input items of a response."""
    chain = await store.responses.chain(MINE, id)
    return [item["id"] for item in chain.inputs] if chain else None


async def items(store: Store, conversation: StoredConversation) -> list[str]:
    page = await store.conversations.page(
        MINE, conversation.id, PageRequest(100, newest_first=False)
    )
    return [item["id"] for item in page.items]


async def test_running_and_ended_response_is_found_by_its_owner_only(store: Store) -> None:
    await begin(store, "resp_1")
    running = await store.responses.get(MINE, "resp_1")
    assert running
    assert (running.record["status"], running.worker) == ("in_progress", store.process.id)
    assert await store.responses.get(YOURS, "resp_1") is None
    await end(store, "resp_1")
    ended = await store.responses.get(MINE, "resp_1")
    assert ended
    assert (ended.record["output"], ended.worker) == ([message_item("out_resp_1", "Hi.")], None)
    assert await store.responses.get(YOURS, "resp_1") is None
    assert await store.responses.chain(YOURS, "resp_1") is None
    assert await store.responses.items(YOURS, ["in_resp_1"]) == {}
    assert not await store.responses.delete(YOURS, "resp_1")
    found = await store.responses.items(MINE, ["in_resp_1", "out_resp_1", "in_resp_2"])
    assert list(found) == ["in_resp_1", "out_resp_1"]


async def test_recorded_stream_is_readable_by_its_owner_only_and_deleted_with_its_response(
    store: Store, clock: ManualClock
) -> None:
    for id in ("resp_1", "resp_2"):
        await begin(store, id)
        await store.responses.end(MINE, id, {"status": "completed", "output": []}, f"of {id}")
        assert await store.responses.frames(MINE, id) == f"of {id}"
        assert await store.responses.frames(YOURS, id) is None
    await store.responses.delete(MINE, "resp_1")
    assert await store.responses.frames(MINE, "resp_1") is None
    clock.advance(HOUR_S)
    assert await store.responses.frames(MINE, "resp_2") is None
    await store.sweep()
    for id in ("resp_1", "resp_2"):  # rows of the deleted responses do not conflict
        await begin(store, id)
        await store.responses.end(MINE, id, {"status": "completed", "output": []}, "anew")
        assert await store.responses.frames(MINE, id) == "anew"


async def test_recorded_stream_of_a_response_counts_toward_the_quota(
    store: Store, clock: ManualClock
) -> None:
    for id in ("resp_1", "resp_2"):
        await begin(store, id)
        done = {"status": "completed", "output": []}
        await store.responses.end(MINE, id, done, "x" * 600 * KIB)
        clock.advance(1)
    assert not await exists(store, "resp_1")
    assert await exists(store, "resp_2")


async def test_any_number_of_items_can_be_looked_up(store: Store) -> None:
    await create(store, "resp_1")
    names = [*map(str, range(MORE_THAN_SQLITE_ALLOWS)), "in_resp_1"]
    assert list(await store.responses.items(MINE, names)) == ["in_resp_1"]


async def test_chain_of_a_response_contains_only_its_own_branch(store: Store) -> None:
    await create(store, "resp_1")
    await create(store, "resp_2", previous="resp_1")
    await create(store, "resp_3", previous="resp_1")
    await create(store, "resp_4", previous="resp_3")
    expected = ["in_resp_1", "out_resp_1", "in_resp_3", "out_resp_3", "in_resp_4"]
    assert await inputs(store, "resp_4") == expected
    chain = await store.responses.chain(MINE, "resp_4")
    assert chain
    assert chain.ids == ("resp_4", "resp_3", "resp_1")
    assert chain.states == ("state_resp_4", "state_resp_3", "state_resp_1")


async def test_response_chain_has_only_the_snapshots_of_its_last_container(store: Store) -> None:
    await create(store, "resp_1")
    await create(store, "resp_2", previous="resp_1")
    chain = await store.responses.chain(MINE, "resp_2")
    assert chain
    assert (chain.latest.session, chain.states) == ("cntr_2", ("state_resp_2",))


async def test_chain_ends_at_a_deleted_response(store: Store) -> None:
    await create(store, "resp_1")
    await create(store, "resp_2", previous="resp_1")
    await begin(store, "resp_3", previous="resp_2")
    assert await store.responses.delete(MINE, "resp_2")
    assert not await store.responses.delete(MINE, "resp_2")
    assert await inputs(store, "resp_3") == ["in_resp_3"]
    assert await store.responses.items(MINE, ["in_resp_2", "out_resp_2"]) == {}


async def test_response_deleted_while_running_stays_deleted(store: Store) -> None:
    conversation = await store.conversations.create(MINE, {}, [])
    await begin(store, "resp_1", conversation=conversation.id)
    assert await store.responses.delete(MINE, "resp_1")
    await end(store, "resp_1")
    assert await store.responses.get(MINE, "resp_1") is None
    assert await items(store, conversation) == []


async def test_continued_response_has_its_expiry_postponed(
    store: Store, clock: ManualClock
) -> None:
    await create(store, "resp_1")
    clock.advance(HOUR_S - 1)
    await create(store, "resp_2", previous="resp_1")
    clock.advance(HOUR_S - 1)
    await store.sweep()
    assert await inputs(store, "resp_2") == ["in_resp_1", "out_resp_1", "in_resp_2"]
    clock.advance(1)
    assert await store.responses.get(MINE, "resp_2") is None
    await store.sweep()
    clock.advance(-1)
    assert await store.responses.get(MINE, "resp_2") is None


async def test_completed_response_adds_its_items_to_its_conversation(store: Store) -> None:
    conversation = await store.conversations.create(MINE, {}, [message_item("item_1")])
    await begin(store, "resp_1", conversation=conversation.id)
    assert await items(store, conversation) == ["item_1"]
    await end(store, "resp_1")
    await begin(store, "resp_2", conversation=conversation.id)
    await end(store, "resp_2", status="failed")
    assert await items(store, conversation) == ["item_1", "in_resp_1", "out_resp_1"]
    assert await inputs(store, "resp_1") == ["item_1", "in_resp_1"]
    assert await store.responses.delete(MINE, "resp_1")
    assert await items(store, conversation) == ["item_1", "in_resp_1", "out_resp_1"]


async def test_conversation_deleted_while_a_response_runs_stays_deleted(
    store: Store,
) -> None:
    conversation = await store.conversations.create(MINE, {}, [message_item("item_1")])
    await begin(store, "resp_1", conversation=conversation.id)
    assert await store.conversations.delete(MINE, conversation.id)
    await end(store, "resp_1")
    assert await store.conversations.all_items(MINE, conversation.id) is None
    assert await inputs(store, "resp_1") == ["in_resp_1"]
    assert await store.responses.items(MINE, ["item_1"]) == {}


async def test_chain_beyond_the_maximum_length_loses_the_oldest_responses(
    tmp_path: Path, clock: ManualClock
) -> None:
    with opened(tmp_path, clock) as store:
        previous = None
        for n in range(MAX_CHAIN_LENGTH + 3):
            response = StoredResponse(f"resp_{n}", "cntr_1", "1", {"output": []}, previous)
            await store.responses.begin(MINE, response, [message_item(f"in_{n}")], ())
            previous = response.id
        assert previous
        found = await inputs(store, previous)
    assert found == [f"in_{n}" for n in range(2, MAX_CHAIN_LENGTH + 3)]


async def test_item_that_a_conversation_already_has_is_not_added_again(store: Store) -> None:
    conversation = await store.conversations.create(MINE, {}, [message_item("item_1")])
    assert await store.conversations.add(
        MINE, conversation.id, [message_item("item_1"), message_item("item_2")]
    )
    assert await items(store, conversation) == ["item_1", "item_2"]


async def test_item_list_continues_after_a_deleted_item(store: Store) -> None:
    three = [message_item(f"item_{n}") for n in range(3)]
    conversation = await store.conversations.create(MINE, {}, three)
    assert await store.conversations.delete_item(MINE, conversation.id, "item_1")
    assert not await store.conversations.delete_item(MINE, conversation.id, "item_1")
    page = PageRequest(10, newest_first=False, after_id="item_1")
    found = await store.conversations.page(MINE, conversation.id, page)
    assert [item["id"] for item in found.items] == ["item_2"]
    with pytest.raises(BadRequestError, match="there is no 'item_9' in this list"):
        await store.conversations.page(MINE, conversation.id, PageRequest(after_id="item_9"))


async def test_conversation_belongs_to_its_owner(store: Store) -> None:
    one = (await store.conversations.create(MINE, {"a": "b"}, [message_item("item_1")])).id
    assert await store.conversations.get(YOURS, one) is None
    assert await store.conversations.update(YOURS, one, {}) is None
    assert await store.conversations.all_items(YOURS, one) is None
    assert await store.conversations.item(YOURS, one, "item_1") is None
    assert not await store.conversations.add(YOURS, one, [message_item("item_2")])
    assert not await store.conversations.delete_item(YOURS, one, "item_1")
    assert not await store.conversations.delete(YOURS, one)
    found = await store.conversations.update(MINE, one, {"c": "d"})
    assert found
    assert found.metadata == {"c": "d"}
    assert await store.conversations.delete(MINE, one)
    assert await store.conversations.item(MINE, one, "item_1") is None


@pytest.fixture(params=["response", "conversation"])
async def oldest(request: pytest.FixtureRequest, store: Store) -> AsyncIterator[str]:
    """Yield the id of the least recently used response or conversation, of 600 KiB."""
    if request.param == "response":
        await begin(store, "resp_1")
        await end(store, "resp_1", "x" * 600 * KIB)
        yield "resp_1"
        return
    long = message_item("item_1", "x" * 600 * KIB)
    yield (await store.conversations.create(MINE, {}, [long])).id


async def test_oldest_responses_and_conversations_beyond_the_quota_are_deleted(
    store: Store, clock: ManualClock, oldest: str
) -> None:
    clock.advance(1)
    await begin(store, "resp_2")
    await end(store, "resp_2", "x" * 300 * KIB)
    assert await exists(store, oldest)
    clock.advance(1)
    await begin(store, "resp_3")
    await end(store, "resp_3", "x" * 300 * KIB)
    assert not await exists(store, oldest)
    assert await store.responses.get(MINE, "resp_2")
    clock.advance(1)
    await begin(store, "resp_4")
    await end(store, "resp_4", "x" * 3000 * KIB)
    assert await store.responses.get(MINE, "resp_3") is None
    assert await store.responses.get(MINE, "resp_4")


async def test_empty_conversations_count_toward_the_quota(store: Store, clock: ManualClock) -> None:
    first = await store.conversations.create(MINE, {}, [])
    for _ in range(2 * KIB * KIB // EMPTY_CONVERSATION_BYTES):
        clock.advance(1)
        last = await store.conversations.create(MINE, {}, [])
    assert not await exists(store, first.id)
    assert await exists(store, last.id)


async def exists(store: Store, id: str) -> bool:
    found = await store.responses.get(MINE, id) or await store.conversations.get(MINE, id)
    return found is not None


async def test_worker_of_a_closed_store_counts_as_dead(tmp_path: Path, clock: ManualClock) -> None:
    with opened(tmp_path, clock) as store:
        with opened(tmp_path, clock) as other:
            await begin(other, "resp_1")
            running = await store.responses.get(MINE, "resp_1")
            assert running
            assert running.worker
            assert not store.process.is_dead(running.worker)
        assert store.process.is_dead(running.worker)
