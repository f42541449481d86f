"""The default instruction of the model's chat template in the prompts of runs."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import pytest

from policies.default_instruction import MAX_CHARS, VALID_S, KnownInstruction
from policies.profile import Profile
from policies.prompts import system_prompt
from policies.tool_support import VERSION_CHECK_INTERVAL_S
from proxy.models.tool_support import REPROBE_AFTER_S, ToolSupportSettings
from proxy.profiles import Profiles
from tests.clients.chat_http import post_chat
from tests.clients.test_tool_support import PROBE, ROUTE, ToolSupportServer, served
from tests.fakes.engine import FakeEngine
from tests.stores import open_store, sqlite_only

DEFAULT = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
WITH_DEFAULT = f"{DEFAULT}\n\n{system_prompt()}"
USER = {"role": "user", "content": "How many?"}
Renders = Literal["as text", "as tokens", "no"]


def engine_with_default(renders: Renders = "as text") -> FakeEngine:
    return FakeEngine(renders=renders, default_instruction=DEFAULT)


async def instructions_of(
    server: ToolSupportServer, engine: FakeEngine, **body: Any
) -> list[Mapping[str, Any]]:
    """Send a request, and return the backend's messages that have another role than user."""
    await post_chat(server.http, **body)
    messages = engine.client_requests[-1]["messages"]
    await server.verdicts.wait_idle()
    return [message for message in messages if message["role"] != "user"]


@pytest.mark.parametrize("setting", ["probe", "always"])
@pytest.mark.parametrize("renders", ["as text", "as tokens"])
async def test_default_instruction_precedes_the_proxys_prompt(
    setting: Literal["probe", "always"], renders: Renders, tmp_path: Path
) -> None:
    engine = engine_with_default(renders)
    async with served(engine, tmp_path, ToolSupportSettings(setting)) as server:
        before = await instructions_of(server, engine)
        after = await instructions_of(server, engine)
    assert before == [{"role": "system", "content": system_prompt()}]
    assert after == [{"role": "system", "content": WITH_DEFAULT}]
    if setting == "always":
        assert engine.probes == []


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_clients_own_instruction_replaces_the_default_instruction(
    role: str, tmp_path: Path
) -> None:
    engine = engine_with_default()
    own = {"role": role, "content": "Answer in French."}
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        found = await instructions_of(server, engine, messages=[own, USER])
        late = await instructions_of(server, engine, messages=[USER, own, USER])
    assert found == [{"role": role, "content": f"{system_prompt()}\n\nAnswer in French."}]
    assert late == [{"role": "system", "content": system_prompt()}, own]


async def test_default_instruction_is_known_after_a_restart(tmp_path: Path) -> None:
    engine = engine_with_default()
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
    async with served(engine, tmp_path) as server:
        assert await instructions_of(server, engine) == [
            {"role": "system", "content": WITH_DEFAULT}
        ]


async def test_changed_default_instruction_of_the_template_is_used_after_the_next_probe(
    tmp_path: Path,
) -> None:
    engine = engine_with_default()
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        found = []
        for default in ("Today is Monday.", ""):
            engine.default_instruction = default
            server.clock.advance(VERSION_CHECK_INTERVAL_S)
            await server.ask_with_verdict()
            found += await instructions_of(server, engine)
    async with served(engine, tmp_path) as server:
        found += await instructions_of(server, engine)
    assert [message["content"] for message in found] == [
        f"Today is Monday.\n\n{system_prompt()}",
        system_prompt(),
        system_prompt(),
    ]


@pytest.mark.parametrize(
    ("renders", "path", "status"),
    [
        ("as text", "/apply-template", 503),
        ("as tokens", "/tokenize", 429),
        ("as tokens", "/detokenize", 500),
    ],
)
async def test_default_instruction_stays_while_an_endpoint_fails(
    renders: Renders, path: str, status: int, tmp_path: Path
) -> None:
    engine = engine_with_default(renders)
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        engine.statuses[path] = status
        server.clock.advance(VERSION_CHECK_INTERVAL_S)
        await server.ask_with_verdict()
        found = await instructions_of(server, engine)
    async with served(engine, tmp_path) as server:
        found += await instructions_of(server, engine)
        engine.statuses.clear()
        engine.default_instruction = "Today is Monday."
        server.clock.advance(REPROBE_AFTER_S)
        await server.ask_with_verdict()
        found += await instructions_of(server, engine)
    assert [message["content"] for message in found] == [
        WITH_DEFAULT,
        WITH_DEFAULT,
        f"Today is Monday.\n\n{system_prompt()}",
    ]


@pytest.mark.parametrize("change", ["no endpoint", "another endpoint", "no system role"])
async def test_default_instruction_is_forgotten_if_the_server_has_none_now(
    change: str, tmp_path: Path
) -> None:
    engine = engine_with_default()
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        if change == "no system role":
            engine.system_status = 500
        else:
            status = 404 if change == "no endpoint" else 422
            engine.statuses = {"/apply-template": status, "/tokenize": status}
        server.clock.advance(VERSION_CHECK_INTERVAL_S)
        await server.ask_with_verdict()
        requested = len(engine.paths)
        server.clock.advance(REPROBE_AFTER_S)
        found = await instructions_of(server, engine)
        assert len(engine.paths) == requested
    async with served(engine, tmp_path) as server:
        found += await instructions_of(server, engine)
    assert [message["content"] for message in found] == [system_prompt()] * 2


async def test_default_instruction_is_no_longer_used_if_no_probe_finds_it_for_a_day(
    tmp_path: Path,
) -> None:
    engine = engine_with_default()
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        engine.statuses["/apply-template"] = 503
        server.clock.advance(VALID_S - 1)
        found = await instructions_of(server, engine)
        server.clock.advance(1)
        found += await instructions_of(server, engine)
    assert [message["content"] for message in found] == [WITH_DEFAULT, system_prompt()]


@pytest.mark.parametrize(
    ("settings", "has_probe"), [(PROBE, False), (ToolSupportSettings("never"), True)]
)
async def test_stored_default_instruction_is_not_used_if_the_model_is_not_probed(
    settings: ToolSupportSettings, has_probe: bool, tmp_path: Path
) -> None:
    engine = engine_with_default()
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        assert server.verdicts.default_instruction("fake-model") == DEFAULT
    async with served(engine, tmp_path, settings, has_probe=has_probe) as server:
        assert server.verdicts.default_instruction("fake-model") == ""


async def test_each_probe_renews_the_time_of_the_stored_default_instruction(tmp_path: Path) -> None:
    """A store deletes instructions that no probe has confirmed for a month."""
    engine = engine_with_default()
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        server.clock.advance(VERSION_CHECK_INTERVAL_S)
        await server.ask_with_verdict()
    with closing(open_store(tmp_path)) as store:
        assert await store.tool_verdicts.default_instructions("b") == {
            "fake-model": KnownInstruction(DEFAULT, VERSION_CHECK_INTERVAL_S)
        }


@sqlite_only
async def test_default_instruction_is_stored_by_the_next_probe_after_a_failed_write(
    tmp_path: Path,
) -> None:
    engine = engine_with_default()
    engine.template = "ignores tools"

    def rename_table(old: str, new: str) -> None:
        with closing(sqlite3.connect(tmp_path / "store.sqlite3")) as database:
            database.execute(f"ALTER TABLE {old} RENAME TO {new}")

    async with served(engine, tmp_path) as server:
        rename_table("default_instructions", "unavailable")
        assert (await server.ask_with_verdict()).headers[ROUTE] == "tools_ignored"
        rename_table("unavailable", "default_instructions")
        server.clock.advance(VERSION_CHECK_INTERVAL_S)
        await server.ask_with_verdict()
    async with served(engine, tmp_path) as server:
        assert server.verdicts.default_instruction("fake-model") == DEFAULT


@pytest.mark.parametrize(
    ("renders", "path"), [("as text", "/apply-template"), ("as tokens", "/detokenize")]
)
async def test_unanswered_request_to_render_a_template_does_not_delay_the_tool_verdict(
    renders: Renders, path: str, tmp_path: Path
) -> None:
    engine = engine_with_default(renders)
    engine.template, engine.hanging_path = "ignores tools", path
    async with served(engine, tmp_path) as server:
        await post_chat(server.http)
        await engine.is_hanging.wait()
        response = await post_chat(server.http)
    assert response.headers[ROUTE] == "tools_ignored"


@pytest.mark.parametrize("status", [200, 403, 502])
async def test_default_instruction_is_found_by_detokenizing_whatever_status_unknown_paths_return(
    status: int, tmp_path: Path
) -> None:
    engine = engine_with_default("as tokens")
    engine.unknown_path_status = status
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        found = await instructions_of(server, engine)
    assert found == [{"role": "system", "content": WITH_DEFAULT}]


@pytest.mark.parametrize(
    ("renders", "paths"),
    [
        ("as text", ["/apply-template"] * 3),
        ("as tokens", ["/apply-template", *["/tokenize", "/detokenize"] * 3]),
    ],
)
async def test_probe_for_the_default_instruction_sends_few_requests(
    renders: Renders, paths: list[str], tmp_path: Path
) -> None:
    engine = engine_with_default(renders)
    async with served(engine, tmp_path, ToolSupportSettings("always")) as server:
        await server.ask_with_verdict()
    assert engine.paths == ["/version", *paths]


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(engine_with_default("no"), id="no rendering"),
        pytest.param(
            FakeEngine(renders="as text", default_instruction="a" * (MAX_CHARS + 1)), id="too long"
        ),
    ],
)
async def test_prompt_has_no_default_instruction_if_none_can_be_found(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        found = await instructions_of(server, engine)
    assert found == [{"role": "system", "content": system_prompt()}]


async def test_no_default_instruction_is_sent_if_the_profile_has_no_prompt(tmp_path: Path) -> None:
    engine, profiles = engine_with_default(), Profiles.only(Profile(prompt="none"))
    async with served(engine, tmp_path, profiles=profiles) as server:
        await server.ask_with_verdict()
        assert await instructions_of(server, engine) == []


async def test_template_is_not_rendered_for_an_unlisted_model_or_with_tool_support_set_to_never(
    tmp_path: Path,
) -> None:
    engine = engine_with_default()
    async with served(engine, tmp_path, ToolSupportSettings("never")) as server:
        await server.ask_with_verdict()
    async with served(engine, tmp_path, ToolSupportSettings("always"), model="another") as server:
        await server.ask_with_verdict()
    assert engine.paths == []
