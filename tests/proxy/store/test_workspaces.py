"""Snapshots of sessions, their limits and their expiry."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from policies.sessions import Session, SessionSettings, SessionState
from proxy.agent.suspended_run import SuspendedCall, SuspendedRun
from proxy.store.store import Store
from proxy.store.workspaces import MAX_STATES
from sandbox_runtime.errors import SandboxFileError
from sandbox_runtime.sandbox import Sink
from tests.stores import open_store, overwrite_blob, stored_blobs

CHAT = Session("me", "chat")
MIB = 1 << 20


def sending(data: bytes) -> Callable[[Sink], Awaitable[int]]:
    async def write(sink: Sink) -> int:
        await sink(data)
        return len(data)

    return write


async def read(store: Store, state: SessionState) -> bytes:
    return b"".join([piece async for piece in store.workspaces.read(state)])


async def test_newest_snapshots_of_a_session_are_kept(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    names = [str(number) for number in range(MAX_STATES + 3)]
    for name in names:
        await store.workspaces.save(SessionState(CHAT, name), sending(name.encode()))
    assert await store.workspaces.stored_names(CHAT, names) == set(names[3:])
    assert await read(store, SessionState(CHAT, names[-1])) == names[-1].encode()
    assert len(stored_blobs(tmp_path)) == MAX_STATES
    store.close()


async def test_oldest_snapshots_beyond_the_quota_are_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path, SessionSettings(quota_mib=3))
    chats = [Session("me", f"chat {number}") for number in range(4)]
    other = Session("somebody else", "chat")
    await store.workspaces.save(SessionState(other, "1"), sending(os.urandom(2 * MIB)))
    for chat in chats:
        await store.workspaces.save(SessionState(chat, "1"), sending(os.urandom(MIB)))
    assert [await store.workspaces.newest_state_name(chat) for chat in chats] == [
        None,
        "1",
        "1",
        "1",
    ]
    await store.workspaces.save(SessionState(CHAT, "1"), sending(os.urandom(4 * MIB)))
    assert [await store.workspaces.newest_state_name(chat) for chat in (*chats, CHAT)] == [
        *[None] * 4,
        "1",
    ]
    assert await store.workspaces.newest_state_name(other) == "1"
    store.close()


async def test_aliased_snapshots_count_once_toward_the_quota(tmp_path: Path) -> None:
    store = open_store(tmp_path, SessionSettings(quota_mib=3))
    other = SessionState(Session("me", "another chat"), "1")
    await store.workspaces.save(other, sending(os.urandom(MIB)))
    await store.workspaces.save(SessionState(CHAT, "1"), sending(os.urandom(MIB)))
    for number in range(2, 6):
        await store.workspaces.alias(
            SessionState(CHAT, str(number)), SessionState(CHAT, str(number - 1))
        )
    assert await store.workspaces.newest_state_name(other.session) == "1"
    store.close()


async def test_expired_snapshots_and_suspended_runs_are_deleted(tmp_path: Path) -> None:
    now = 1000.0
    store = open_store(tmp_path, SessionSettings(retention_hours=1), now=lambda: now)
    suspended = SuspendedRun(
        [], 0, [SuspendedCall("call_r1_1", "a", "lookup")], calls_are_text=False, resume_from=None
    )
    await store.workspaces.save(SessionState(CHAT, "1"), sending(b"1"))
    await store.suspended_runs.save("me", suspended)
    assert await store.suspended_runs.find("me", "r1") == suspended
    assert await store.suspended_runs.find("somebody else", "r1") is None
    now += 3601
    assert await store.workspaces.newest_state_name(CHAT) is None
    with pytest.raises(SandboxFileError):
        await read(store, SessionState(CHAT, "1"))
    now += 8 * 24 * 3600
    assert await store.suspended_runs.find("me", "r1") is None
    await store.sweep()
    now += 2 * 3600
    await store.sweep()
    assert await store.workspaces.stored_names(CHAT, ["1"]) == set()
    store.close()


async def test_snapshot_without_its_blob_is_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    await store.workspaces.save(SessionState(CHAT, "1"), sending(b"1"))
    for blob in stored_blobs(tmp_path):
        overwrite_blob(tmp_path, blob, None)
    with pytest.raises(SandboxFileError):
        await read(store, SessionState(CHAT, "1"))
    await store.sweep()
    assert await store.workspaces.newest_state_name(CHAT) is None
    store.close()


async def test_failed_save_leaves_the_previous_snapshot(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    await store.workspaces.save(SessionState(CHAT, "1"), sending(b"1"))

    async def fail(sink: Sink) -> int:
        await sink(b"half")
        raise SandboxFileError("it is gone")

    with pytest.raises(SandboxFileError):
        await store.workspaces.save(SessionState(CHAT, "1"), fail)
    assert await read(store, SessionState(CHAT, "1")) == b"1"
    assert len(stored_blobs(tmp_path)) == 1
    store.close()
