"""The default instruction of the model's chat template in the prompts of runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from policies.default_instruction import MAX_CHARS
from policies.profile import Profile
from policies.prompts import system_prompt
from policies.tool_support import CHECK_EVERY_S
from proxy.models.tool_support import ToolSupportSettings
from proxy.profiles import Profiles
from tests.clients.chat_http import post_chat
from tests.clients.test_tool_support import ToolSupportServer, served
from tests.fakes.engine import FakeEngine

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


async def test_default_instruction_follows_the_template(tmp_path: Path) -> None:
    engine = engine_with_default()
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        found = []
        for default in ("Today is Monday.", ""):
            engine.default_instruction = default
            server.clock.advance(CHECK_EVERY_S)
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


async def test_template_adds_its_own_default_if_the_profile_has_no_prompt(tmp_path: Path) -> None:
    engine, profiles = engine_with_default(), Profiles.only(Profile(prompt="none"))
    async with served(engine, tmp_path, profiles=profiles) as server:
        await server.ask_with_verdict()
        assert await instructions_of(server, engine) == []


async def test_unlisted_and_never_models_are_not_rendered(tmp_path: Path) -> None:
    engine = engine_with_default()
    async with served(engine, tmp_path, ToolSupportSettings("never")) as server:
        await server.ask_with_verdict()
    async with served(engine, tmp_path, ToolSupportSettings("always"), model="another") as server:
        await server.ask_with_verdict()
    assert engine.paths == []
