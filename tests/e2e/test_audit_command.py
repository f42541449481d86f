"""`sandbox-proxy audit verify` on logs of servers that stopped or were killed."""

import asyncio
from pathlib import Path
from typing import Any

import anyio

from proxy.models.scripted import call, text_reply, tool_reply
from tests.clients.chat_http import PATH, http_client, post_chat
from tests.e2e.proxy_process import run, serving, state_dir
from tests.fakes.backend import Held, scripted_backend

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "How many?"}]}
AUDIT_CONFIG = {"audit": {"enabled": True, "key_env": "AUDIT_KEY"}}
KEY = {"AUDIT_KEY": "known to few"}


async def test_audit_verify_finds_an_unfinished_log_and_a_flipped_byte(
    tmp_path: Path,
) -> None:
    bash = tool_reply(call("execute_bash", command="echo a"))
    done = tool_reply(call("submit", answer="Done."))
    script = [bash, done, bash, Held(text_reply("Never said."), asyncio.Event())]
    async with (
        scripted_backend(script) as backend,
        serving(tmp_path, "bubblewrap", backend.base_url, AUDIT_CONFIG, **KEY) as server,
        http_client(server.url) as http,
    ):
        with anyio.fail_after(60):
            whole = (await post_chat(http)).headers["x-sandbox-run"]
            async with http.stream("POST", PATH, json={**BODY, "stream": True}) as begun:
                await backend.arrived(4)
                server.process.kill()
                await server.ended()
    killed = begun.headers["x-sandbox-run"]
    verify = ("audit", "verify", "--config", str(tmp_path / "config.yaml"))
    result = await run(tmp_path, *verify, **KEY)
    lines = result.stdout.decode().splitlines()
    assert result.returncode == 0
    assert sorted(line.split()[0] for line in lines) == ["ok", "ok", "unfinished"]
    assert any(f"{killed}  4 lines: the run is at work, or was killed" in line for line in lines)
    (log,) = (state_dir(tmp_path) / "audit").glob(f"*/{whole}.jsonl")
    log.write_bytes(log.read_bytes().replace(b"echo a", b"echo b"))
    result = await run(tmp_path, *verify, whole, **KEY)
    assert result.returncode == 1
    assert result.stdout.decode().startswith("WRONG ")
    assert "line 3 does not match its hash" in result.stdout.decode()
