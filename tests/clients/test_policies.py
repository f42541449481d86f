"""Policies of profile, model, key and request, applied in this order."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web

from proxy.config import Config, parse
from proxy.keys import Key, Keyring
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import build_profiles
from tests.clients.chat_http import BODY, http_client, post_chat
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.server import running_proxy

TREE: dict[str, Any] = {
    "models": {
        "weak*": {"policy": {"enabled": "never"}},
        "watched": {"policy": {"enabled": "always"}},
    },
    "keys": [
        {
            "name": "student",
            "env": "STUDENT_KEY",
            "profiles": ["default", "research"],
            "policy": {"limits": {"max_turns": 2}},
        },
    ],
}
KEYS = [
    ("sk-student", Key("student", ("default", "research"), {"limits": {"max_turns": 2}})),
    ("sk-bound", Key("bound", policy={"enabled": "always"})),
]
STUDENT = {"authorization": "Bearer sk-student"}
STEPS = tool_reply(call("execute_bash", command="true"))


@asynccontextmanager
async def served(
    state_dir: Path, *replies: Any, **more: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, ScriptedBackend]]:
    config: Config = parse(TREE, "c.yaml")
    async with (
        scripted_backend(list(replies), **more) as backend,
        running_proxy(
            backend,
            "memory",
            state_dir,
            profiles=build_profiles(config),
            keyring=Keyring([*KEYS, ("sk-other", Key("other"))], operator_secret="sk-operator"),
            passthrough="all",
        ) as url,
        http_client(url) as http,
    ):
        http.headers["authorization"] = "Bearer sk-other"
        yield http, backend


def error(response: httpx.Response) -> tuple[int, str | None, str | None, str]:
    details = response.json()["error"]
    return response.status_code, details["code"], details["param"], details["message"]


async def test_key_limits_apply_under_a_profile_that_the_request_chooses(tmp_path: Path) -> None:
    async with served(tmp_path, STEPS, STEPS, text_reply("Enough.")) as (http, _):
        response = await post_chat(http, {**STUDENT, "x-sandbox-profile": "research"})
    assert response.json()["sandbox"]["stop_reason"] == "max_turns"


async def test_request_can_set_lower_limits_than_its_key(tmp_path: Path) -> None:
    async with served(tmp_path, STEPS, text_reply("Enough.")) as (http, _):
        response = await post_chat(http, STUDENT, sandbox={"limits": {"max_turns": 1}})
    assert response.json()["sandbox"]["stop_reason"] == "max_turns"
    assert response.json()["usage"]["sandbox"]["tool_calls"] == 1


@pytest.mark.parametrize(
    ("headers", "fields", "param", "words"),
    [
        (
            STUDENT,
            {"sandbox": {"limits": {"max_turns": 3}}},
            "sandbox.limits.max_turns",
            "limits.max_turns: 3 is more than key 'student' allows (2).",
        ),
        (
            {"x-sandbox-profile": "research"},
            {},
            "sandbox.profile",
            "Profile 'research' needs a key that lists it, because it allows more than 'default':",
        ),
        (
            {},
            {
                "sandbox": {
                    "isolation": {"network": {"mode": "allowlist", "allowed_hosts": ["pypi"]}}
                }
            },
            "sandbox.isolation.network",
            "isolation.network: allowlist is more than profile 'default' allows (none).",
        ),
        (
            {"x-sandbox-enabled": "never"},
            {"model": "watched"},
            "sandbox.enabled",
            "enabled: never is more than model 'watched' allows (always).",
        ),
        (
            {},
            {"model": "watched:plain"},
            "sandbox.enabled",
            "enabled: always holds here (profile 'default'), and this request can only be answered"
            " without a sandbox: the model's name ends in :plain.",
        ),
    ],
)
async def test_request_over_its_policy_is_a_403_that_names_the_limit(
    headers: dict[str, str], fields: dict[str, Any], param: str, words: str, tmp_path: Path
) -> None:
    async with served(tmp_path) as (http, backend):
        status, code, told_param, message = error(await post_chat(http, headers, **fields))
    assert (status, code, told_param) == (403, "policy_violation", param)
    assert message.startswith(words)
    assert not backend.requests


@pytest.mark.parametrize(
    ("headers", "fields", "param"),
    [
        ({"x-sandbox-profile": "fast"}, {}, "sandbox.profile"),
        ({}, {"sandbox": {"profile": 7}}, "sandbox.profile"),
        ({}, {"sandbox": {"limits": {"max_turn": 3}}}, "sandbox.limits.max_turn"),
        ({}, {"sandbox": {"limits": {"max_turns": -3}}}, "sandbox.limits.max_turns"),
        ({"x-sandbox-enabled": "maybe"}, {}, "sandbox.enabled"),
        ({}, {"sandbox": "none"}, "sandbox"),
        ({}, {"sandbox": {"computr": "never"}}, "sandbox.computr"),
        ({}, {"sandbox": {"isolation": {"memory_mib": 0}}}, "sandbox.isolation"),
        (
            {},
            {"sandbox": {"artifacts": {"deny_types": ["."] * 257}}},
            "sandbox.artifacts.deny_types",
        ),
        ({}, {"sandbox": {"watch": {"rules": []}}}, "sandbox.watch"),
    ],
)
async def test_invalid_policy_field_is_a_400_that_names_the_field(
    headers: dict[str, str], fields: dict[str, Any], param: str, tmp_path: Path
) -> None:
    async with served(tmp_path) as (http, _):
        status, _, told_param, _ = error(await post_chat(http, headers, **fields))
    assert (status, told_param) == (400, param)


@pytest.mark.parametrize(
    ("headers", "sandbox"),
    [
        ({"x-sandbox-computer": "never"}, {}),
        ({}, {"computer": "never"}),
        ({}, {"computer": "never", "prompt": "strict", "limits": {"wall_time_s": 5}}),
    ],
)
async def test_old_field_names_in_a_request_work_like_the_new_names(
    headers: dict[str, str], sandbox: dict[str, Any], tmp_path: Path
) -> None:
    async with served(tmp_path, text_reply("Hello you.")) as (http, _):
        response = await post_chat(http, headers, sandbox=sandbox)
    assert response.headers["x-sandbox-route"] == "never"


@pytest.mark.parametrize(
    ("headers", "sandbox", "param", "message"),
    [
        (
            {},
            {"limits": {"max_tokens": 9, "max_total_tokens": 9}},
            "sandbox.limits.max_tokens",
            "limits.max_tokens and limits.max_total_tokens are the same setting: remove"
            " limits.max_tokens.",
        ),
        (
            {"x-sandbox-computer": "never", "x-sandbox-enabled": "never"},
            {},
            "x-sandbox-computer",
            "x-sandbox-computer and x-sandbox-enabled are the same setting: remove"
            " x-sandbox-computer.",
        ),
    ],
)
async def test_old_and_new_name_of_one_setting_in_a_request_are_a_400_that_names_both(
    headers: dict[str, str],
    sandbox: dict[str, Any],
    param: str,
    message: str,
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as (http, _):
        found = error(await post_chat(http, headers, sandbox=sandbox))
    assert found == (400, "invalid_value", param, message)


async def test_setting_under_its_old_name_is_bounded_like_under_its_new_name(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as (http, _):
        found = error(await post_chat(http, sandbox={"limits": {"max_tokens": 10**9}}))
    assert found[:3] == (403, "policy_violation", "sandbox.limits.max_total_tokens")


@pytest.mark.parametrize(
    ("headers", "model", "why"),
    [
        ({}, "weak-1", "never"),
        ({"x-sandbox-enabled": "never"}, "m", "never"),
        ({}, "m:plain", "plain_suffix"),
    ],
)
async def test_route_header_of_a_relayed_response_says_why_it_was_relayed(
    headers: dict[str, str], model: str, why: str, tmp_path: Path
) -> None:
    async with served(tmp_path, text_reply("Hello you.")) as (http, backend):
        response = await post_chat(http, headers, model=model)
    assert response.headers["x-sandbox-route"] == why
    assert "sandbox" not in response.json()
    assert "tools" not in backend.requests[0].body


@pytest.mark.parametrize("fields", [{}, {"tool_choice": "none"}, {"max_tokens": 1}])
async def test_required_sandbox_is_used_even_if_tool_choice_none_drops_the_client_tools(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    lookup = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
    async with served(tmp_path, STEPS, text_reply("Done.")) as (http, backend):
        response = await post_chat(http, model="watched", tools=[lookup], **fields)
    assert response.json()["sandbox"]["route"] == "always"
    names = [tool["function"]["name"] for tool in backend.requests[0].body["tools"]]
    assert ("lookup" in names) is ("tool_choice" not in fields)
    assert "execute_bash" in names


async def elsewhere(_: web.Request) -> web.Response:
    return web.json_response({"data": []})


@pytest.mark.parametrize(
    ("key", "model", "status"),
    [("sk-bound", "m", 403), ("sk-other", "watched", 403), ("sk-other", "m", 200)],
)
async def test_relayed_completion_request_is_refused_if_a_sandbox_is_required(
    key: str, model: str, status: int, tmp_path: Path
) -> None:
    headers = {"authorization": f"Bearer {key}"}
    async with served(tmp_path, elsewhere=elsewhere) as (http, _):
        body = {"model": model, "prompt": "How many?"}
        asked = await http.post("/v1/completions", json=body, headers=headers)
        listed = await http.get("/v1/batches", headers=headers)
    assert (asked.status_code, listed.status_code) == (status, 200)
    if status == 403:
        _, code, param, message = error(asked)
        assert (code, param) == ("policy_violation", "sandbox.enabled")
        assert message.startswith("enabled: always holds here")


async def test_idempotency_key_reused_under_another_profile_is_refused(tmp_path: Path) -> None:
    key = {"idempotency-key": "order-1"}
    async with served(tmp_path, text_reply("42")) as (http, backend):
        first = await post_chat(http, key)
        again = await post_chat(http, key)
        other = await post_chat(http, {**key, "x-sandbox-profile": "strict"})
    assert (first.status_code, again.json()) == (200, first.json())
    assert error(other)[:3] == (422, "idempotency_key_reused", "Idempotency-Key")
    assert len(backend.requests) == 1


async def test_response_names_the_route_of_its_request(tmp_path: Path) -> None:
    async with served(tmp_path, text_reply("Hello you.")) as (http, _):
        response = await post_chat(http)
    assert response.json()["sandbox"]["route"] == "auto"


async def test_policies_apply_to_every_api(tmp_path: Path) -> None:
    async with served(tmp_path) as (http, _):
        address = str(http.base_url).rstrip("/")
        asked = {"x-sandbox-profile": "research"}
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="sk-other") as one:
            with pytest.raises(openai.PermissionDeniedError, match="needs a key that lists it"):
                await one.responses.create(model="m", input="How many?", extra_headers=asked)
            with pytest.raises(openai.PermissionDeniedError, match="enabled: always holds here"):
                await one.responses.create(model="watched:plain", input="How many?")
        message = {**BODY, "max_tokens": 100}
        response = await http.post("/v1/messages", json=message, headers=asked)
        plain = await http.post("/v1/messages", json={**message, "model": "watched:plain"})
    assert (response.status_code, plain.status_code) == (403, 403)
    assert response.json()["error"]["type"] == "permission_error"


async def test_unknown_key_is_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as (http, _):
        response = await post_chat(http, {"authorization": "Bearer sk-nobody"})
    assert error(response)[:2] == (401, "invalid_api_key")


async def test_capabilities_list_the_profiles_of_the_key(tmp_path: Path) -> None:
    async with served(tmp_path) as (http, _):
        details = (await http.get("/v1/capabilities")).json()
        operator = {"authorization": "Bearer sk-operator"}
        all_told = (await http.get("/v1/capabilities", headers=operator)).json()
    assert details["profile"] == all_told["profile"] == "default"
    assert details["profiles"].keys() < all_told["profiles"].keys()
    assert all_told["profiles"].keys() >= {"default", "research", "strict"}
