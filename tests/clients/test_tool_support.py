"""Models that cannot use tools: detected, answered without a sandbox, and the reason reported."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from policies.isolation import Isolation
from policies.profile import Profile
from policies.tool_support import FAILED_TOOLS_VERDICT_TTL_S, VERSION_CHECK_INTERVAL_S
from proxy.agent.model import Model
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.models.tool_support import ToolProbe, ToolSupportSettings, ToolVerdicts
from proxy.profiles import Profiles
from proxy.store.store import Store
from tests.clients.chat_http import answer_text, http_client, post_chat
from tests.fakes.backend import Item, Refusal, scripted_backend
from tests.fakes.engine import NO_PARSER, FakeEngine
from tests.fakes.manual_clock import ManualClock
from tests.fakes.server import AT_ONCE, EachKey, running_proxy

PROBE = ToolSupportSettings("probe")
ROUTE, DETAIL = "x-sandbox-route", "x-sandbox-route-detail"
HELLO: list[Any] = [{"role": "user", "content": "Hi there"}]


class ToolSupportServer:
    """A server in front of an engine, with the verdicts on its tool support."""

    def __init__(self, http: httpx.AsyncClient, verdicts: ToolVerdicts, clock: ManualClock) -> None:
        self.http = http
        self.verdicts = verdicts
        self.clock = clock

    async def ask_with_verdict(self) -> httpx.Response:
        """Send a request, wait for the verdict, and return the answer to a second request."""
        await post_chat(self.http)
        await self.verdicts.wait_idle()
        return await post_chat(self.http)


@asynccontextmanager
async def served(
    engine: FakeEngine,
    state_dir: Path,
    settings: ToolSupportSettings = PROBE,
    *,
    is_local: bool = True,
    has_probe: bool = True,
    model: str = "fake-model",
    reply: Callable[[dict[str, Any]], Item] | None = None,
    **changes: Any,
) -> AsyncIterator[ToolSupportServer]:
    clock, made = ManualClock(), list[ToolVerdicts]()

    def make_verdicts(door: Model, store: Store) -> ToolVerdicts:
        probe = ToolProbe(door, is_local=is_local) if has_probe else None
        made.append(ToolVerdicts(settings, probe, store.tool_verdicts, "b", now=clock.time))
        return made[0]

    async with (
        scripted_backend(reply or engine.reply, elsewhere=engine.elsewhere, model=model) as backend,
        running_proxy(backend, "memory", state_dir, make_verdicts=make_verdicts, **changes) as url,
        http_client(url) as http,
    ):
        await made[0].load()
        yield ToolSupportServer(http, made[0], clock)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = (record for record in caplog.records if record.levelno == logging.WARNING)
    return [record.getMessage() for record in records if record.name == "proxy.models.tool_support"]


@pytest.mark.parametrize("tokenizes", ["with tools", "no"])
async def test_request_to_a_model_whose_template_ignores_tools_gets_no_sandbox(
    tokenizes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(template="ignores tools", tokenizes=tokenizes)
    async with served(engine, tmp_path) as server:
        response = await server.ask_with_verdict()
        await post_chat(server.http)
    assert answer_text(response) == "Hello."
    assert response.headers[ROUTE] == "tools_ignored"
    assert "--chat-template-file" in response.headers[DETAIL]
    assert engine.requests[-1] == {
        "model": "fake-model",
        "messages": engine.requests[-1]["messages"],
    }
    assert [each["content"] for each in engine.requests[-1]["messages"]] == ["How many?"]
    assert [response.headers[DETAIL] in line for line in warnings(caplog)] == [True]


async def test_model_whose_server_refuses_tools_is_answered_without_a_sandbox(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(refusal=NO_PARSER)
    async with served(engine, tmp_path) as server:
        response = await server.ask_with_verdict()
        await post_chat(server.http)
    assert (response.status_code, answer_text(response)) == (200, "Hello.")
    assert response.headers[ROUTE] == "tools_refused"
    assert "--enable-auto-tool-choice --tool-call-parser PARSER" in response.headers[DETAIL]
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("tokenizes", ["with tools", "without tools", "no"])
async def test_model_with_tool_support_keeps_its_sandbox(
    tokenizes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(tokenizes=tokenizes)
    async with served(engine, tmp_path) as server:
        response = await server.ask_with_verdict()
        await server.verdicts.wait_idle()
    assert response.json()["sandbox"]["route"] == "auto"
    assert all(body["tools"] for body in engine.client_requests)
    assert sum(body["max_tokens"] for body in engine.probes) <= 64
    assert len(engine.probes) == (1 if tokenizes == "with tools" else 2)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(
            FakeEngine(template="ignores tools", counts=False, tokenizes="no"), id="no usage"
        ),
        pytest.param(FakeEngine(template="ignores tools", version=None), id="a hosted provider"),
    ],
)
async def test_request_gets_a_sandbox_if_it_is_unknown_whether_the_model_supports_tools(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with served(engine, tmp_path, is_local=False) as server:
        response = await server.ask_with_verdict()
    assert response.json()["sandbox"]["route"] == "auto"
    if engine.version is None:
        assert engine.probes == []


async def test_unlisted_model_is_not_probed_for_tool_support(tmp_path: Path) -> None:
    engine = FakeEngine(template="ignores tools")
    async with served(engine, tmp_path, model="another") as server:
        response = await server.ask_with_verdict()
    assert response.json()["sandbox"]["route"] == "auto"
    assert (engine.probes, engine.paths) == ([], [])


async def test_tool_verdict_survives_a_restart(tmp_path: Path) -> None:
    engine = FakeEngine(refusal=NO_PARSER)
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
    engine.requests.clear()
    async with served(engine, tmp_path) as server:
        response = await post_chat(server.http)
    assert response.headers[ROUTE] == "tools_refused"
    assert [body for body in engine.client_requests if body.get("tools")] == []


async def test_positive_tool_verdict_holds_until_the_engine_version_changes(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        probed = len(engine.probes)
        server.clock.advance(30 * 24 * 3600)
        await server.ask_with_verdict()
        assert len(engine.probes) == probed
        engine.version, engine.template = "2.0", "ignores tools"
        server.clock.advance(VERSION_CHECK_INTERVAL_S)
        response = await server.ask_with_verdict()
    assert response.headers[ROUTE] == "tools_ignored"


async def test_positive_tool_verdict_holds_for_a_day_if_the_engine_has_no_version(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(version=None)
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        probed = len(engine.probes)
        server.clock.advance(23 * 3600)
        await server.ask_with_verdict()
        assert len(engine.probes) == probed
        server.clock.advance(3600)
        await server.ask_with_verdict()
    assert len(engine.probes) == 2 * probed


async def test_negative_tool_verdict_is_checked_again_after_an_interval(tmp_path: Path) -> None:
    engine = FakeEngine(refusal=NO_PARSER)
    async with served(engine, tmp_path) as server:
        assert (await server.ask_with_verdict()).headers[ROUTE] == "tools_refused"
        engine.refusal = None
        server.clock.advance(VERSION_CHECK_INTERVAL_S)
        response = await server.ask_with_verdict()
    assert response.json()["sandbox"]["route"] == "auto"


async def test_tool_verdict_stays_after_one_refusal_of_tools(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        engine.refusal = NO_PARSER
        await post_chat(server.http)
        engine.refusal = None
        await server.verdicts.wait_idle()
        response = await post_chat(server.http)
    assert response.json()["sandbox"]["route"] == "auto"


async def test_tool_refusal_of_a_remote_backend_is_checked_again_after_a_day(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(refusal="fake-model does not support tools", version=None)
    async with served(engine, tmp_path, is_local=False) as server:
        response = await server.ask_with_verdict()
        assert response.headers[ROUTE] == "tools_refused"
        assert len(engine.probes) == 1
        server.clock.advance(24 * 3600)
        engine.refusal = None
        response = await server.ask_with_verdict()
    assert response.json()["sandbox"]["route"] == "auto"


@pytest.mark.parametrize("is_local", [True, False])
async def test_tool_refusal_caused_by_a_client_field_gives_no_verdict(
    is_local: bool, tmp_path: Path
) -> None:
    """The backend's error mixes its own words with the client's."""
    engine = FakeEngine(version="1.0" if is_local else None, counts=is_local)

    def reply(body: dict[str, Any]) -> Item:
        text = engine.reply(body)
        odd = next((name for name in body if name.startswith("tools-")), None)
        return Refusal(400, f"Unrecognized request argument supplied: {odd}") if odd else text

    async with served(engine, tmp_path, is_local=is_local, reply=reply) as server:
        provoked = await post_chat(server.http, **{"tools-x": 1})
        await server.verdicts.wait_idle()
        response = await post_chat(server.http)
    assert provoked.status_code in (200, 400)
    assert response.json()["sandbox"]["route"] == "auto"


async def test_model_is_not_probed_with_completions_if_tool_support_is_set_to_always(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(template="ignores tools")
    async with served(engine, tmp_path, ToolSupportSettings("always")) as server:
        response = await server.ask_with_verdict()
        engine.refusal = NO_PARSER
        failed = await server.ask_with_verdict()
    assert response.json()["sandbox"]["route"] == "auto"
    assert (failed.status_code, failed.json()["error"]["message"]) == (400, NO_PARSER)
    assert len(engine.client_requests) == 4
    assert engine.probes == []


async def test_tool_support_setting_of_a_model_overrides_the_backend_setting(
    tmp_path: Path,
) -> None:
    engine = FakeEngine()
    settings = ToolSupportSettings("always", [("small*", "never"), ("*", "always")])
    async with served(engine, tmp_path, settings) as server:
        small, large = [await post_chat(server.http, model=name) for name in ("small-1", "large")]
    assert small.headers[ROUTE] == "no_tool_support"
    assert large.json()["sandbox"]["route"] == "auto"


async def test_required_sandbox_without_tool_support_is_a_400(tmp_path: Path) -> None:
    engine = FakeEngine(template="ignores tools")
    always = Profiles.only(Profile(enabled="always", isolation=Isolation()))
    async with served(engine, tmp_path) as server:
        words = (await server.ask_with_verdict()).headers[DETAIL]
    async with served(engine, tmp_path, profiles=always) as server:
        response = await post_chat(server.http)
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": words,
        "type": "invalid_request_error",
        "param": "model",
        "code": "tools_not_supported",
    }


async def test_required_sandbox_turns_a_tool_refusal_into_a_400(tmp_path: Path) -> None:
    engine = FakeEngine(refusal=NO_PARSER)
    async with served(engine, tmp_path, profiles=AT_ONCE) as server:
        first = await post_chat(server.http)
        ask_with_verdict = await server.ask_with_verdict()
    for response in (first, ask_with_verdict):
        assert (response.status_code, response.json()["error"]["code"]) == (
            400,
            "tools_not_supported",
        )
        assert "--tool-call-parser PARSER" in response.json()["error"]["message"]


async def test_request_that_the_backend_refuses_for_its_tools_is_retried_without_tools(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(refusal=NO_PARSER)
    async with served(engine, tmp_path) as server:
        response = await post_chat(server.http)
    assert (response.status_code, answer_text(response)) == (200, "Hello.")
    assert "tools" not in engine.client_requests[-1]
    shown = response.json()["sandbox"]
    assert (shown["route"], shown["warnings"][0]["code"]) == ("tools_refused", "tools_refused")
    assert "--tool-call-parser PARSER" in shown["warnings"][0]["message"]


async def test_key_gets_no_sandbox_for_a_model_that_has_made_malformed_calls(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(call=tool_reply(call("no_such_tool", command="ls")))
    our_key, other_key = ({"authorization": f"Bearer {key}"} for key in ("ours", "theirs"))
    async with served(engine, tmp_path, keyring=EachKey()) as server:
        await post_chat(server.http, our_key)
        engine.call = None
        again, other = (
            await post_chat(server.http, our_key),
            await post_chat(server.http, other_key),
        )
        server.clock.advance(FAILED_TOOLS_VERDICT_TTL_S)
        later = await post_chat(server.http, our_key)
    assert again.headers[ROUTE] == "tools_failed"
    assert "(malformed call)" in again.headers[DETAIL]
    assert [response.json()["sandbox"]["route"] for response in (other, later)] == ["auto", "auto"]


async def test_responses_and_messages_requests_to_a_model_without_tools_get_no_sandbox(
    tmp_path: Path,
) -> None:
    engine = FakeEngine(template="ignores tools")
    async with served(engine, tmp_path) as server:
        await server.ask_with_verdict()
        async with openai.AsyncOpenAI(base_url=f"{server.http.base_url}/v1", api_key="none") as sdk:
            response = await sdk.responses.with_raw_response.create(model="fake-model", input="Hi")
        body = {"model": "fake-model", "max_tokens": 100, "messages": HELLO}
        message = await server.http.post("/v1/messages", json=body)
    assert response.parse().output_text == "Hello."
    assert message.json()["content"] == [{"type": "text", "text": "Hello."}]
    assert [response.headers[ROUTE] for response in (response, message)] == ["tools_ignored"] * 2
    assert [body.get("tools") for body in engine.client_requests[-2:]] == [None, None]


# Files of a request to a model without tools

NEVER = ToolSupportSettings("never")
NO_FILES = "Unsupported chat content part type: 'file'"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
INLINE = {"type": "file", "file": {"filename": "a.csv", "file_data": "data:text/csv;base64,aGk="}}


def with_part(part: dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is it?"}, part]
    return {"messages": [{"role": "user", "content": content}]}


def without_file_parts(body: dict[str, Any]) -> Item:
    """Reply as a server that refuses file parts, as vLLM does."""
    parts = [part for each in body["messages"] for part in each["content"]]
    has_file = any(part["type"] in ("file", "input_file") for part in parts)
    return Refusal(400, NO_FILES) if has_file else text_reply("Seen.")


async def upload(http: httpx.AsyncClient) -> str:
    form = {"purpose": "user_data"}
    response = await http.post("/v1/files", data=form, files={"file": ("a.csv", b"a,b\n")})
    return str(response.json()["id"])


@pytest.mark.parametrize("settings", [PROBE, NEVER])
async def test_upload_for_a_model_without_tools_is_refused_by_chat_completions(
    settings: ToolSupportSettings, tmp_path: Path
) -> None:
    engine = FakeEngine(template="ignores tools")
    async with served(engine, tmp_path, settings) as server:
        words = (await server.ask_with_verdict()).headers[DETAIL]
        asked, file_id = len(engine.client_requests), await upload(server.http)
        part = {"type": "file", "file": {"file_id": file_id}}
        picture = {"type": "input_image", "file_id": file_id}
        refused = [
            await post_chat(server.http, **with_part(part)),
            await post_chat(server.http, **with_part(picture), stream=True),
            await post_chat(server.http, sandbox={"file_ids": [file_id]}),
        ]
        assert len(engine.client_requests) == asked
    errors = [response.json()["error"] for response in refused]
    assert [response.status_code for response in refused] == [400] * 3
    assert [error.pop("param") for error in errors] == [
        "messages[0].content[1].file.file_id",
        "messages[0].content[1].file_id",
        "sandbox.file_ids[0]",
    ]
    message = (
        "The request has files, and it gets no sandbox in which the model could read them."
        f" {words} Name a model that supports tools, or send the text of the files in the"
        " message."
    )
    code = {"type": "invalid_request_error", "code": "tools_not_supported"}
    assert errors == [{"message": message, **code}] * 3


async def test_upload_for_a_model_without_tools_is_refused_by_the_responses_and_messages_apis(
    tmp_path: Path,
) -> None:
    async with served(FakeEngine(), tmp_path, NEVER) as server:
        file_id = await upload(server.http)
        part = {"type": "input_file", "file_id": file_id}
        items = [{"role": "user", "content": [part]}]
        body: dict[str, Any] = {"model": "fake-model", "input": items}
        response = await server.http.post("/v1/responses", json=body)
        source = {"type": "file", "file_id": file_id}
        content = [{"type": "document", "source": source}]
        body = {"model": "fake-model", "max_tokens": 9}
        body["messages"] = [{"role": "user", "content": content}]
        message = await server.http.post("/v1/messages", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        400,
        "input[0].content[0].file_id",
        "tools_not_supported",
    )
    assert message.status_code == 400
    assert "backend.tool_support is never" in message.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_error_explains_the_refusal_of_file_parts_by_the_backend(
    stream: bool, tmp_path: Path
) -> None:
    async with served(FakeEngine(), tmp_path, NEVER, reply=without_file_parts) as server:
        chat = await post_chat(server.http, **with_part(INLINE), stream=stream)
        part = {"type": "input_file", **INLINE["file"]}
        items = [{"role": "user", "content": [part]}]
        body = {"model": "fake-model", "input": items, "stream": stream}
        response = await server.http.post("/v1/responses", json=body)
    for refused in (chat, response):
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "tools_not_supported")
        assert "backend.tool_support is never for the model 'fake-model'" in error["message"]
        assert error["message"].endswith(f"The backend answered: {NO_FILES}")


async def test_file_part_that_the_backend_accepts_is_relayed(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served(engine, tmp_path, NEVER) as server:
        for part in (PICTURE, INLINE, {"type": "file", "file": {"file_id": "file-elsewhere"}}):
            response = await post_chat(server.http, **with_part(part))
            assert (response.status_code, answer_text(response)) == (200, "Hello.")
            assert engine.requests[-1]["messages"][0]["content"][1] == part


@pytest.mark.parametrize(
    ("model", "part", "refusal"),
    [
        ("fake-model:plain", INLINE, Refusal(400, NO_FILES)),
        ("fake-model", PICTURE, Refusal(400, "fake-model is not a multimodal model")),
        ("fake-model", INLINE, Refusal(400, "maximum context length is 4096 tokens")),
        ("fake-model", INLINE, Refusal(429, "slow down")),
    ],
    ids=["plain", "picture", "context", "rate"],
)
async def test_refusals_that_do_not_concern_file_parts_reach_the_client_unchanged(
    model: str, part: dict[str, Any], refusal: Refusal, tmp_path: Path
) -> None:
    async with served(FakeEngine(), tmp_path, NEVER, reply=lambda body: refusal) as server:
        response = await post_chat(server.http, model=model, **with_part(part))
    assert response.status_code == refusal.status
    assert response.json()["error"]["message"] == refusal.message
