"""What is kept of responses and conversations, and for how long."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from policies.sessions import ResponseSettings
from proxy.errors import BadRequestError
from proxy.store.conversations import OWN_BYTES
from proxy.store.records import Conversation, PageRequest, StoredResponse
from proxy.store.responses import MAX_CHAIN
from proxy.store.store import Store
from tests.fakes.manual_clock import ManualClock

MINE, YOURS = "somebody", "somebody else"
HOUR_S = 3600
KIB = 1 << 10
MORE_THAN_ONE_STATEMENT_TAKES = 250_001
"""By the widest of SQLite's usual bounds."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock) -> Iterator[Store]:
    with opened(tmp_path, clock) as found:
        yield found


@contextmanager
def opened(directory: Path, clock: ManualClock) -> Iterator[Store]:
    """A store whose responses live for an hour, and fill a MiB."""
    settings = ResponseSettings(keep_hours=1, quota_mib=1)
    store = Store(directory, responses=settings, now=clock.time)
    try:
        yield store
    finally:
        store.close()


def said(id: str, text: str = "Hello.") -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "user", "content": text}


async def begin(
    store: Store, id: str, *, previous: str | None = None, conversation: str | None = None
) -> None:
    """A response to one message of its own."""
    chain = await store.responses.chain(MINE, previous) if previous else None
    stands = await store.conversations.all_items(MINE, conversation) if conversation else None
    response = StoredResponse(
        id=id,
        session="cntr_2" if id == "resp_2" else "cntr_1",
        state=f"state_{id}",
        record={"id": id, "status": "in_progress", "output": []},
        previous_id=previous,
        conversation_id=conversation,
        seen_seq=stands[1] if stands else None,
        worker=store.worker.id,
    )
    await store.responses.begin(MINE, response, [said(f"in_{id}")], chain.ids if chain else ())


async def end(store: Store, id: str, text: str = "Hi.", status: str = "completed") -> None:
    record = {"id": id, "status": status, "output": [said(f"out_{id}", text)]}
    await store.responses.end(MINE, id, record)


async def made(store: Store, id: str, **before: str) -> None:
    await begin(store, id, **before)
    await end(store, id)


async def inputs(store: Store, id: str) -> list[str] | None:
    """The names of all that had been said when it began."""
    chain = await store.responses.chain(MINE, id)
    return [item["id"] for item in chain.inputs] if chain else None


async def items(store: Store, conversation: Conversation) -> list[str]:
    page = await store.conversations.page(
        MINE, conversation.id, PageRequest(100, newest_first=False)
    )
    return [item["id"] for item in page.items]


async def test_a_response_is_its_owner_s_from_its_beginning_on(store: Store) -> None:
    await begin(store, "resp_1")
    at_work = await store.responses.get(MINE, "resp_1")
    assert at_work
    assert (at_work.record["status"], at_work.worker) == ("in_progress", store.worker.id)
    await end(store, "resp_1")
    ended = await store.responses.get(MINE, "resp_1")
    assert ended
    assert (ended.record["output"], ended.worker) == ([said("out_resp_1", "Hi.")], None)
    assert await store.responses.get(YOURS, "resp_1") is None
    assert await store.responses.chain(YOURS, "resp_1") is None
    assert await store.responses.items(YOURS, ["in_resp_1"]) == {}
    assert not await store.responses.delete(YOURS, "resp_1")
    found = await store.responses.items(MINE, ["in_resp_1", "out_resp_1", "in_resp_2"])
    assert list(found) == ["in_resp_1", "out_resp_1"]


async def test_a_stream_is_its_owner_s_and_goes_with_its_response(
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
    for id in ("resp_1", "resp_2"):  # nothing of the old ones is in the way
        await begin(store, id)
        await store.responses.end(MINE, id, {"status": "completed", "output": []}, "anew")
        assert await store.responses.frames(MINE, id) == "anew"


async def test_a_stream_counts_for_the_quota(store: Store, clock: ManualClock) -> None:
    for id in ("resp_1", "resp_2"):
        await begin(store, id)
        done = {"status": "completed", "output": []}
        await store.responses.end(MINE, id, done, "x" * 600 * KIB)
        clock.advance(1)
    assert not await there(store, "resp_1")
    assert await there(store, "resp_2")


async def test_items_can_be_looked_for_in_any_number(store: Store) -> None:
    await made(store, "resp_1")
    names = [*map(str, range(MORE_THAN_ONE_STATEMENT_TAKES)), "in_resp_1"]
    assert list(await store.responses.items(MINE, names)) == ["in_resp_1"]


async def test_responses_branch_and_each_branch_sees_its_own_line(store: Store) -> None:
    await made(store, "resp_1")
    await made(store, "resp_2", previous="resp_1")
    await made(store, "resp_3", previous="resp_1")
    await made(store, "resp_4", previous="resp_3")
    line = ["in_resp_1", "out_resp_1", "in_resp_3", "out_resp_3", "in_resp_4"]
    assert await inputs(store, "resp_4") == line
    chain = await store.responses.chain(MINE, "resp_4")
    assert chain
    assert chain.ids == ("resp_4", "resp_3", "resp_1")
    assert chain.states == ("state_resp_4", "state_resp_3", "state_resp_1")


async def test_the_states_of_a_line_are_those_of_its_last_container(store: Store) -> None:
    await made(store, "resp_1")
    await made(store, "resp_2", previous="resp_1")
    chain = await store.responses.chain(MINE, "resp_2")
    assert chain
    assert (chain.latest.session, chain.states) == ("cntr_2", ("state_resp_2",))


async def test_what_was_deleted_is_in_no_line_any_more(store: Store) -> None:
    await made(store, "resp_1")
    await made(store, "resp_2", previous="resp_1")
    await begin(store, "resp_3", previous="resp_2")
    assert await store.responses.delete(MINE, "resp_2")
    assert not await store.responses.delete(MINE, "resp_2")
    assert await inputs(store, "resp_3") == ["in_resp_3"]
    assert await store.responses.items(MINE, ["in_resp_2", "out_resp_2"]) == {}


async def test_one_that_is_deleted_while_it_is_made_stays_so(store: Store) -> None:
    conversation = await store.conversations.create(MINE, {}, [])
    await begin(store, "resp_1", conversation=conversation.id)
    assert await store.responses.delete(MINE, "resp_1")
    await end(store, "resp_1")
    assert await store.responses.get(MINE, "resp_1") is None
    assert await items(store, conversation) == []


async def test_what_is_gone_on_from_lives_its_whole_time_again(
    store: Store, clock: ManualClock
) -> None:
    await made(store, "resp_1")
    clock.advance(HOUR_S - 1)
    await made(store, "resp_2", previous="resp_1")
    clock.advance(HOUR_S - 1)
    await store.sweep()
    assert await inputs(store, "resp_2") == ["in_resp_1", "out_resp_1", "in_resp_2"]
    clock.advance(1)
    assert await store.responses.get(MINE, "resp_2") is None
    await store.sweep()
    clock.advance(-1)
    assert await store.responses.get(MINE, "resp_2") is None


async def test_a_response_adds_to_its_conversation_once_it_is_complete(store: Store) -> None:
    conversation = await store.conversations.create(MINE, {}, [said("item_1")])
    await begin(store, "resp_1", conversation=conversation.id)
    assert await items(store, conversation) == ["item_1"]
    await end(store, "resp_1")
    await begin(store, "resp_2", conversation=conversation.id)
    await end(store, "resp_2", status="failed")
    assert await items(store, conversation) == ["item_1", "in_resp_1", "out_resp_1"]
    assert await inputs(store, "resp_1") == ["item_1", "in_resp_1"]
    assert await store.responses.delete(MINE, "resp_1")
    assert await items(store, conversation) == ["item_1", "in_resp_1", "out_resp_1"]


async def test_a_conversation_that_is_deleted_while_a_response_is_made_stays_so(
    store: Store,
) -> None:
    conversation = await store.conversations.create(MINE, {}, [said("item_1")])
    await begin(store, "resp_1", conversation=conversation.id)
    assert await store.conversations.delete(MINE, conversation.id)
    await end(store, "resp_1")
    assert await store.conversations.all_items(MINE, conversation.id) is None
    assert await inputs(store, "resp_1") == ["in_resp_1"]
    assert await store.responses.items(MINE, ["item_1"]) == {}


async def test_a_line_that_is_too_long_is_cut_off_at_the_oldest(
    tmp_path: Path, clock: ManualClock
) -> None:
    with opened(tmp_path, clock) as store:
        previous = None
        for n in range(MAX_CHAIN + 3):
            response = StoredResponse(f"resp_{n}", "cntr_1", "1", {"output": []}, previous)
            await store.responses.begin(MINE, response, [said(f"in_{n}")], ())
            previous = response.id
        assert previous
        found = await inputs(store, previous)
    assert found == [f"in_{n}" for n in range(2, MAX_CHAIN + 3)]


async def test_an_item_that_a_conversation_has_is_not_added_again(store: Store) -> None:
    conversation = await store.conversations.create(MINE, {}, [said("item_1")])
    assert await store.conversations.add(MINE, conversation.id, [said("item_1"), said("item_2")])
    assert await items(store, conversation) == ["item_1", "item_2"]


async def test_a_list_of_items_goes_on_after_one_that_was_deleted(store: Store) -> None:
    three = [said(f"item_{n}") for n in range(3)]
    conversation = await store.conversations.create(MINE, {}, three)
    assert await store.conversations.delete_item(MINE, conversation.id, "item_1")
    assert not await store.conversations.delete_item(MINE, conversation.id, "item_1")
    page = PageRequest(10, newest_first=False, after="item_1")
    found = await store.conversations.page(MINE, conversation.id, page)
    assert [item["id"] for item in found.items] == ["item_2"]
    with pytest.raises(BadRequestError, match="there is no 'item_9' in this list"):
        await store.conversations.page(MINE, conversation.id, PageRequest(after="item_9"))


async def test_a_conversation_is_its_owner_s(store: Store) -> None:
    one = (await store.conversations.create(MINE, {"a": "b"}, [said("item_1")])).id
    assert await store.conversations.get(YOURS, one) is None
    assert await store.conversations.update(YOURS, one, {}) is None
    assert await store.conversations.all_items(YOURS, one) is None
    assert await store.conversations.item(YOURS, one, "item_1") is None
    assert not await store.conversations.add(YOURS, one, [said("item_2")])
    assert not await store.conversations.delete_item(YOURS, one, "item_1")
    assert not await store.conversations.delete(YOURS, one)
    found = await store.conversations.update(MINE, one, {"c": "d"})
    assert found
    assert found.metadata == {"c": "d"}
    assert await store.conversations.delete(MINE, one)
    assert await store.conversations.item(MINE, one, "item_1") is None


@pytest.fixture(params=["response", "conversation"])
async def oldest(request: pytest.FixtureRequest, store: Store) -> AsyncIterator[str]:
    """Something of 600 KiB that was used the longest ago."""
    if request.param == "response":
        await begin(store, "resp_1")
        await end(store, "resp_1", "x" * 600 * KIB)
        yield "resp_1"
        return
    long = said("item_1", "x" * 600 * KIB)
    yield (await store.conversations.create(MINE, {}, [long])).id


async def test_beyond_the_quota_the_oldest_go_and_the_newest_stays(
    store: Store, clock: ManualClock, oldest: str
) -> None:
    clock.advance(1)
    await begin(store, "resp_2")
    await end(store, "resp_2", "x" * 300 * KIB)
    assert await there(store, oldest)
    clock.advance(1)
    await begin(store, "resp_3")
    await end(store, "resp_3", "x" * 300 * KIB)
    assert not await there(store, oldest)
    assert await store.responses.get(MINE, "resp_2")
    clock.advance(1)
    await begin(store, "resp_4")
    await end(store, "resp_4", "x" * 3000 * KIB)
    assert await store.responses.get(MINE, "resp_3") is None
    assert await store.responses.get(MINE, "resp_4")


async def test_conversations_that_say_nothing_fill_the_quota_too(
    store: Store, clock: ManualClock
) -> None:
    first = await store.conversations.create(MINE, {}, [])
    for _ in range(2 * KIB * KIB // OWN_BYTES):
        clock.advance(1)
        last = await store.conversations.create(MINE, {}, [])
    assert not await there(store, first.id)
    assert await there(store, last.id)


async def there(store: Store, id: str) -> bool:
    found = await store.responses.get(MINE, id) or await store.conversations.get(MINE, id)
    return found is not None


async def test_who_was_at_work_is_known_to_be_gone(tmp_path: Path, clock: ManualClock) -> None:
    with opened(tmp_path, clock) as store:
        with opened(tmp_path, clock) as other:
            await begin(other, "resp_1")
            at_work = await store.responses.get(MINE, "resp_1")
            assert at_work
            assert at_work.worker
            assert not store.worker.is_dead(at_work.worker)
        assert store.worker.is_dead(at_work.worker)
