"""A model that cannot use tools is answered plain, and everybody hears why."""

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
from policies.tool_support import CHECK_EVERY_S, EVIDENCE_HOLDS_S
from proxy.agent.model import Model
from proxy.models.scripted import call, tool_reply
from proxy.models.tool_support import ToolProbe, ToolSettings, ToolVerdicts
from proxy.profiles import Profiles
from proxy.store.store import Store
from tests.clients.chat import answer, ask, client
from tests.fakes.backend import Item, Refusal, scripted_backend
from tests.fakes.engine import NO_PARSER, FakeEngine
from tests.fakes.manual_clock import ManualClock
from tests.fakes.server import AT_ONCE, EachKey, running_proxy

PROBE = ToolSettings("probe")
ROUTE, DETAIL = "x-sandbox-route", "x-sandbox-route-detail"
HELLO: list[Any] = [{"role": "user", "content": "Hi there"}]


class House:
    """A server before an engine."""

    def __init__(self, http: httpx.AsyncClient, verdicts: ToolVerdicts, clock: ManualClock) -> None:
        self.http = http
        self.verdicts = verdicts
        self.clock = clock

    async def known(self) -> httpx.Response:
        """Ask twice: the answer is that to the second request, when the verdict is known."""
        await ask(self.http)
        await self.verdicts.wait_idle()
        return await ask(self.http)


@asynccontextmanager
async def served(
    engine: FakeEngine,
    state_dir: Path,
    settings: ToolSettings = PROBE,
    *,
    is_local: bool = True,
    model: str = "fake-model",
    reply: Callable[[dict[str, Any]], Item] | None = None,
    **changes: Any,
) -> AsyncIterator[House]:
    clock, made = ManualClock(), list[ToolVerdicts]()

    def make_verdicts(door: Model, store: Store) -> ToolVerdicts:
        probe = ToolProbe(door, is_local=is_local)
        made.append(ToolVerdicts(settings, probe, store.tool_verdicts, "b", now=clock.time))
        return made[0]

    async with (
        scripted_backend(reply or engine.reply, elsewhere=engine.elsewhere, model=model) as backend,
        running_proxy(backend, "memory", state_dir, make_verdicts=make_verdicts, **changes) as url,
        client(url) as http,
    ):
        await made[0].load()
        yield House(http, made[0], clock)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = (record for record in caplog.records if record.levelno == logging.WARNING)
    return [record.getMessage() for record in said if record.name == "proxy.models.tool_support"]


@pytest.mark.parametrize("tokenizes", ["with tools", "no"])
async def test_a_model_whose_template_ignores_tools_is_answered_plain(
    tokenizes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(template="ignores tools", tokenizes=tokenizes)
    async with served(engine, tmp_path) as there:
        told = await there.known()
        await ask(there.http)
    assert answer(told) == "Hello."
    assert told.headers[ROUTE] == "tools_ignored"
    assert "--chat-template-file" in told.headers[DETAIL]
    assert engine.asked[-1] == {"model": "fake-model", "messages": engine.asked[-1]["messages"]}
    assert [each["content"] for each in engine.asked[-1]["messages"]] == ["How many?"]
    assert [told.headers[DETAIL] in line for line in warnings(caplog)] == [True]


async def test_a_model_whose_server_refuses_tools_is_answered_plain(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(refusal=NO_PARSER)
    async with served(engine, tmp_path) as there:
        told = await there.known()
        await ask(there.http)
    assert (told.status_code, answer(told)) == (200, "Hello.")
    assert told.headers[ROUTE] == "tools_refused"
    assert "--enable-auto-tool-choice --tool-call-parser PARSER" in told.headers[DETAIL]
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("tokenizes", ["with tools", "without tools", "no"])
async def test_a_model_that_is_told_of_tools_keeps_its_computer(
    tokenizes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(tokenizes=tokenizes)
    async with served(engine, tmp_path) as there:
        told = await there.known()
        await there.verdicts.wait_idle()
    assert told.json()["sandbox"]["route"] == "auto"
    assert all(body["tools"] for body in engine.answered)
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
async def test_a_model_of_which_nothing_is_known_keeps_its_computer(
    engine: FakeEngine, tmp_path: Path
) -> None:
    async with served(engine, tmp_path, is_local=False) as there:
        told = await there.known()
    assert told.json()["sandbox"]["route"] == "auto"
    if engine.version is None:
        assert engine.probes == []


async def test_a_model_that_the_backend_does_not_list_is_not_probed(tmp_path: Path) -> None:
    engine = FakeEngine(template="ignores tools")
    async with served(engine, tmp_path, model="another") as there:
        told = await there.known()
    assert told.json()["sandbox"]["route"] == "auto"
    assert (engine.probes, engine.paths) == ([], [])


async def test_a_verdict_is_known_again_after_a_restart(tmp_path: Path) -> None:
    engine = FakeEngine(refusal=NO_PARSER)
    async with served(engine, tmp_path) as there:
        await there.known()
    engine.asked.clear()
    async with served(engine, tmp_path) as there:
        told = await ask(there.http)
    assert told.headers[ROUTE] == "tools_refused"
    assert [body for body in engine.answered if body.get("tools")] == []


async def test_a_good_verdict_holds_for_a_version_of_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served(engine, tmp_path) as there:
        await there.known()
        probed = len(engine.probes)
        there.clock.advance(30 * 24 * 3600)
        await there.known()
        assert len(engine.probes) == probed
        engine.version, engine.template = "2.0", "ignores tools"
        there.clock.advance(CHECK_EVERY_S)
        told = await there.known()
    assert told.headers[ROUTE] == "tools_ignored"


async def test_a_good_verdict_holds_for_a_day_where_no_version_is_known(tmp_path: Path) -> None:
    engine = FakeEngine(version=None)
    async with served(engine, tmp_path) as there:
        await there.known()
        probed = len(engine.probes)
        there.clock.advance(23 * 3600)
        await there.known()
        assert len(engine.probes) == probed
        there.clock.advance(3600)
        await there.known()
    assert len(engine.probes) == 2 * probed


async def test_an_operator_who_does_what_the_verdict_says_is_believed(tmp_path: Path) -> None:
    engine = FakeEngine(refusal=NO_PARSER)
    async with served(engine, tmp_path) as there:
        assert (await there.known()).headers[ROUTE] == "tools_refused"
        engine.refusal = None
        there.clock.advance(CHECK_EVERY_S)
        told = await there.known()
    assert told.json()["sandbox"]["route"] == "auto"


async def test_one_odd_refusal_does_not_decide_for_everybody(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with served(engine, tmp_path) as there:
        await there.known()
        engine.refusal = NO_PARSER
        await ask(there.http)
        engine.refusal = None
        await there.verdicts.wait_idle()
        told = await ask(there.http)
    assert told.json()["sandbox"]["route"] == "auto"


async def test_a_refusal_decides_where_nobody_can_probe(tmp_path: Path) -> None:
    engine = FakeEngine(refusal="fake-model does not support tools", version=None)
    async with served(engine, tmp_path, is_local=False) as there:
        told = await there.known()
        assert told.headers[ROUTE] == "tools_refused"
        assert len(engine.probes) == 1
        there.clock.advance(24 * 3600)
        engine.refusal = None
        told = await there.known()
    assert told.json()["sandbox"]["route"] == "auto"


@pytest.mark.parametrize("is_local", [True, False])
async def test_a_refusal_that_a_client_has_provoked_decides_nothing(
    is_local: bool, tmp_path: Path
) -> None:
    """The backend's error has words of its own and some of the client's."""
    engine = FakeEngine(version="1.0" if is_local else None, counts=is_local)

    def reply(body: dict[str, Any]) -> Item:
        answer = engine.reply(body)
        odd = next((name for name in body if name.startswith("tools-")), None)
        return Refusal(400, f"Unrecognized request argument supplied: {odd}") if odd else answer

    async with served(engine, tmp_path, is_local=is_local, reply=reply) as there:
        provoked = await ask(there.http, **{"tools-x": 1})
        await there.verdicts.wait_idle()
        told = await ask(there.http)
    assert provoked.status_code in (200, 400)
    assert told.json()["sandbox"]["route"] == "auto"


async def test_always_finds_nothing_out(tmp_path: Path) -> None:
    engine = FakeEngine(template="ignores tools")
    async with served(engine, tmp_path, ToolSettings("always")) as there:
        told = await there.known()
        engine.refusal = NO_PARSER
        failed = await there.known()
    assert told.json()["sandbox"]["route"] == "auto"
    assert (failed.status_code, failed.json()["error"]["message"]) == (400, NO_PARSER)
    assert len(engine.answered) == 4
    assert (engine.probes, engine.paths) == ([], [])


async def test_a_setting_by_model_goes_before_the_backends(tmp_path: Path) -> None:
    engine = FakeEngine()
    settings = ToolSettings("always", [("small*", "never"), ("*", "always")])
    async with served(engine, tmp_path, settings) as there:
        small, large = [await ask(there.http, model=name) for name in ("small-1", "large")]
    assert small.headers[ROUTE] == "no_tool_support"
    assert large.json()["sandbox"]["route"] == "auto"


async def test_who_must_have_a_computer_hears_why_there_is_none(tmp_path: Path) -> None:
    engine = FakeEngine(template="ignores tools")
    always = Profiles.only(Profile(enabled="always", isolation=Isolation()))
    async with served(engine, tmp_path) as there:
        words = (await there.known()).headers[DETAIL]
    async with served(engine, tmp_path, profiles=always) as there:
        told = await ask(there.http)
    assert told.status_code == 400
    assert told.json()["error"] == {
        "message": words,
        "type": "invalid_request_error",
        "param": "model",
        "code": "tools_not_supported",
    }


async def test_a_refusal_is_an_error_too_where_a_computer_is_a_must(tmp_path: Path) -> None:
    engine = FakeEngine(refusal=NO_PARSER)
    async with served(engine, tmp_path, profiles=AT_ONCE) as there:
        first = await ask(there.http)
        known = await there.known()
    for told in (first, known):
        assert (told.status_code, told.json()["error"]["code"]) == (400, "tools_not_supported")
        assert "--tool-call-parser PARSER" in told.json()["error"]["message"]


async def test_a_request_refused_for_its_tools_is_sent_again_plain_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(refusal=NO_PARSER)
    async with served(engine, tmp_path) as there:
        told = await ask(there.http)
    assert (told.status_code, answer(told)) == (200, "Hello.")
    assert "tools" not in engine.answered[-1]
    shown = told.json()["sandbox"]
    assert (shown["route"], shown["warnings"][0]["code"]) == ("tools_refused", "tools_refused")
    assert "--tool-call-parser PARSER" in shown["warnings"][0]["message"]


async def test_a_model_that_fails_at_tools_is_answered_plain_for_that_key(tmp_path: Path) -> None:
    engine = FakeEngine(call=tool_reply(call("no_such_tool", command="ls")))
    ours, theirs = ({"authorization": f"Bearer {key}"} for key in ("ours", "theirs"))
    async with served(engine, tmp_path, keyring=EachKey()) as there:
        await ask(there.http, ours)
        engine.call = None
        again, other = await ask(there.http, ours), await ask(there.http, theirs)
        there.clock.advance(EVIDENCE_HOLDS_S)
        later = await ask(there.http, ours)
    assert again.headers[ROUTE] == "tools_failed"
    assert "(malformed call)" in again.headers[DETAIL]
    assert [told.json()["sandbox"]["route"] for told in (other, later)] == ["auto", "auto"]


async def test_the_other_dialects_are_answered_plain_too(tmp_path: Path) -> None:
    engine = FakeEngine(template="ignores tools")
    async with served(engine, tmp_path) as there:
        await there.known()
        async with openai.AsyncOpenAI(base_url=f"{there.http.base_url}/v1", api_key="none") as sdk:
            response = await sdk.responses.with_raw_response.create(model="fake-model", input="Hi")
        body = {"model": "fake-model", "max_tokens": 100, "messages": HELLO}
        message = await there.http.post("/v1/messages", json=body)
    assert response.parse().output_text == "Hello."
    assert message.json()["content"] == [{"type": "text", "text": "Hello."}]
    assert [told.headers[ROUTE] for told in (response, message)] == ["tools_ignored"] * 2
    assert [body.get("tools") for body in engine.answered[-2:]] == [None, None]
