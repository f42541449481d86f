"""A server in a cgroup with little memory left refuses runs and large bodies, and nothing else."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from proxy.models.scripted import call, text_reply, tool_reply
from tests.e2e.proxy_process import serving
from tests.fakes.backend import scripted_backend

MIB = 1 << 20
LIMIT_MIB, RESERVE_MIB, LEFT_MIB = 768, 256, 128
DONE = tool_reply(call("submit", answer="done"))
HOLD = "import sys; held = b'x' * int(sys.argv[1]); print('held', flush=True); input()"
ENTER = 'echo $$ > "$0" && exec "$@"'


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Yield a new cgroup with a memory limit. Skips the test if this process may not make one."""
    version_1 = Path("/sys/fs/cgroup/memory")
    folder = version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")
    directory = folder / f"llm-sandbox-test-{uuid.uuid4().hex[:8]}"
    names = ("memory.limit_in_bytes",) if folder == version_1 else ("memory.max",)
    try:
        directory.mkdir()
        (directory / names[0]).write_text(str(LIMIT_MIB * MIB))
    except OSError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(f"no cgroup with a memory limit can be made: {error}")
    try:
        yield directory
    finally:
        directory.rmdir()


def inside(cgroup: Path) -> list[str]:
    """Return the start of a command line whose program runs in the cgroup."""
    return ["sh", "-c", ENTER, str(cgroup / "cgroup.procs")]


@asynccontextmanager
async def memory_held(cgroup: Path, count: int) -> AsyncIterator[None]:
    """Have a program in the cgroup hold this many bytes."""
    command = [*inside(cgroup), sys.executable, "-c", HOLD, str(count)]
    process = await anyio.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    try:
        line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 100)
        assert line == b"held"
        yield
    finally:
        with anyio.CancelScope(shield=True):
            process.kill()
            await process.wait()
            await process.aclose()


def body(model: str, text: str = "Work.") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}]}


async def metric(client: httpx.AsyncClient, name: str) -> int:
    for line in (await client.get("/metrics")).text.splitlines():
        if line.startswith(f"llm_sandbox_memory_{name} "):
            return int(float(line.split()[1]))
    raise AssertionError(name)


async def test_runs_and_large_bodies_are_refused_while_memory_is_low(
    cgroup: Path, tmp_path: Path
) -> None:
    more = {
        "server": {"memory_reserve_mib": RESERVE_MIB},
        "sandbox": {"pool": {"min_ready": 0}, "self_test": False},
    }
    script = [DONE, text_reply("plain"), DONE]
    async with (
        scripted_backend(script) as backend,
        serving(tmp_path, "bubblewrap", backend.base_url, more, prefix=inside(cgroup)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        with anyio.fail_after(120):
            chat, large = "/v1/chat/completions", "x" * MIB
            first = await client.post(chat, json=body("m"))
            assert first.json()["choices"][0]["message"]["content"] == "done"
            available = await metric(client, "available_bytes")
            assert RESERVE_MIB * MIB < available < LIMIT_MIB * MIB
            assert 0 < await metric(client, "resident_bytes") < LIMIT_MIB * MIB
            async with memory_held(cgroup, available - LEFT_MIB * MIB):
                while await metric(client, "available_bytes") > RESERVE_MIB * MIB:
                    pass
                for refused in (
                    await client.post(chat, json=body("m")),
                    await client.post(chat, json=body("m:plain", large)),
                ):
                    assert refused.status_code == 503
                    assert int(refused.headers["retry-after"]) > 0
                    assert refused.json()["error"] == {
                        "message": "The server has too little memory for this request."
                        " Send it again later.",
                        "type": "server_error",
                        "param": None,
                        "code": "server_busy",
                    }
                messages = {**body("m"), "max_tokens": 9}
                refused = await client.post("/v1/messages", json=messages)
                assert (refused.status_code, refused.json()["error"]["type"]) == (
                    503,
                    "overloaded_error",
                )
                assert await metric(client, "refused_total") == 3
                for path in ("/health", "/health/ready", "/v1/models", "/v1/capabilities"):
                    assert (await client.get(path)).status_code == 200
                short = await client.post(chat, json=body("m:plain"))
                assert short.json()["choices"][0]["message"]["content"] == "plain"
            while await metric(client, "available_bytes") < available - LEFT_MIB * MIB:
                pass
            again = await client.post(chat, json=body("m"))
            assert again.json()["choices"][0]["message"]["content"] == "done"
    assert json.dumps(large) not in str([seen.body for seen in backend.requests])
