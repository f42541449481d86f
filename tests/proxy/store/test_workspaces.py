"""The files of conversations in the store: kept for a time, and no more than there is room for."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from policies.sessions import Session, SessionSettings, State
from proxy.agent.suspension import SuspendedRun
from proxy.store.store import Store
from proxy.store.workspaces import MAX_STATES
from sandbox_runtime.errors import SandboxFileError
from sandbox_runtime.sandbox import Sink

CHAT = Session("me", "chat")
MIB = 1 << 20


def sending(data: bytes) -> Callable[[Sink], Awaitable[int]]:
    async def write(sink: Sink) -> int:
        await sink(data)
        return len(data)

    return write


async def kept(store: Store, state: State) -> bytes:
    return b"".join([piece async for piece in store.workspaces.read(state)])


async def test_of_one_conversation_the_newest_states_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    names = [str(number) for number in range(MAX_STATES + 3)]
    for name in names:
        await store.workspaces.save(State(CHAT, name), sending(name.encode()))
    assert await store.workspaces.known(CHAT, names) == set(names[3:])
    assert await kept(store, State(CHAT, names[-1])) == names[-1].encode()
    assert len(list(store.blobs.path(".").iterdir())) == MAX_STATES
    store.close()


async def test_the_oldest_go_where_a_key_has_too_much_and_the_newest_stays(tmp_path: Path) -> None:
    store = Store(tmp_path, SessionSettings(quota_mib=3))
    chats = [Session("me", f"chat {number}") for number in range(4)]
    other = Session("somebody else", "chat")
    await store.workspaces.save(State(other, "1"), sending(os.urandom(2 * MIB)))
    for chat in chats:
        await store.workspaces.save(State(chat, "1"), sending(os.urandom(MIB)))
    assert [await store.workspaces.newest(chat) for chat in chats] == [None, "1", "1", "1"]
    await store.workspaces.save(State(CHAT, "1"), sending(os.urandom(4 * MIB)))
    assert [await store.workspaces.newest(chat) for chat in (*chats, CHAT)] == [*[None] * 4, "1"]
    assert await store.workspaces.newest(other) == "1"
    store.close()


async def test_the_same_files_under_several_names_count_once(tmp_path: Path) -> None:
    store = Store(tmp_path, SessionSettings(quota_mib=3))
    other = State(Session("me", "another chat"), "1")
    await store.workspaces.save(other, sending(os.urandom(MIB)))
    await store.workspaces.save(State(CHAT, "1"), sending(os.urandom(MIB)))
    for number in range(2, 6):
        await store.workspaces.alias(State(CHAT, str(number)), State(CHAT, str(number - 1)))
    assert await store.workspaces.newest(other.session) == "1"
    store.close()


async def test_what_is_past_its_time_goes(tmp_path: Path) -> None:
    now = 1000.0
    store = Store(tmp_path, SessionSettings(retention_hours=1), now=lambda: now)
    parked = SuspendedRun([], 0, [("call_r1_1", "a", "lookup")], as_text=False, goes_on=None)
    await store.workspaces.save(State(CHAT, "1"), sending(b"1"))
    await store.suspended_runs.save("me", parked)
    assert await store.suspended_runs.find("me", "r1") == parked
    assert await store.suspended_runs.find("somebody else", "r1") is None
    now += 3601
    assert await store.workspaces.newest(CHAT) is None
    with pytest.raises(SandboxFileError):
        await kept(store, State(CHAT, "1"))
    now += 8 * 24 * 3600
    assert await store.suspended_runs.find("me", "r1") is None
    await store.sweep()
    now += 2 * 3600
    await store.sweep()
    assert await store.workspaces.known(CHAT, ["1"]) == set()
    store.close()


async def test_a_state_whose_content_is_gone_is_no_state_any_more(tmp_path: Path) -> None:
    store = Store(tmp_path)
    await store.workspaces.save(State(CHAT, "1"), sending(b"1"))
    for blob in store.blobs.path(".").iterdir():
        blob.unlink()
    with pytest.raises(SandboxFileError):
        await kept(store, State(CHAT, "1"))
    await store.sweep()
    assert await store.workspaces.newest(CHAT) is None
    store.close()


async def test_one_that_fails_on_the_way_leaves_the_one_before(tmp_path: Path) -> None:
    store = Store(tmp_path)
    await store.workspaces.save(State(CHAT, "1"), sending(b"1"))

    async def fail(sink: Sink) -> int:
        await sink(b"half")
        raise SandboxFileError("it is gone")

    with pytest.raises(SandboxFileError):
        await store.workspaces.save(State(CHAT, "1"), fail)
    assert await kept(store, State(CHAT, "1")) == b"1"
    assert len(list(store.blobs.path(".").iterdir())) == 1
    store.close()
