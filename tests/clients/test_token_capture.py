"""`sandbox.capture: tokens`: the trajectory has the token ids and log probabilities of a run."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from policies.limits import Limits
from policies.profile import AgentSettings, Profile
from policies.prompts import NUDGE
from policies.redaction import Redaction
from proxy.keys import Key, Keyring
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.models.tool_support import ToolSupportSettings, ToolVerdicts
from proxy.profiles import Profiles
from tests.clients.chat_http import BODY, PATH, answer_text, http_client, post_chat
from tests.fakes.backend import Held, Refusal, scripted_backend
from tests.fakes.server import running_proxy
from tests.fakes.tokens import (
    WEIGHT_VERSION,
    logprob_of,
    prompt_text,
    reply_text,
    text_of_tokens,
    tokenize,
    tokens_of,
)

ALLOWED = Profile(agent=AgentSettings(capture_tokens=True))
CAPTURE: dict[str, Any] = {"sandbox": {"capture": "tokens"}}
STEP = tool_reply(call("execute_bash", command="echo 42"), content="Let me see.")
ANSWER = text_reply("It is 42.")
CALL_FIELDS = ("token_segment", "prompt_tokens", "reply_tokens", "tokens_missing", "weight_version")


async def trajectory(http: httpx.AsyncClient, answered: httpx.Response) -> Any:
    """Return the native trajectory of a response's run."""
    assert answered.status_code == 200, answered.text
    run_id = answered.headers["x-sandbox-run"]
    return (await http.get(f"/v1/runs/{run_id}/trajectory")).raise_for_status().json()


def sampled(segment: dict[str, Any]) -> list[str]:
    """Return the texts that the model sampled in a token segment."""
    texts, last = list[list[int]](), 0
    for token, mask in zip(segment["response_ids"], segment["response_mask"], strict=True):
        if mask and not last:
            texts.append([])
        if mask:
            texts[-1].append(token)
        last = mask
    return [text_of_tokens(text) for text in texts]


@pytest.mark.parametrize("style", ["vllm", "sglang", "llama.cpp"])
@pytest.mark.parametrize("stream", [False, True])
async def test_model_calls_of_a_run_become_one_token_segment(
    tmp_path: Path, stream: bool, style: Any
) -> None:
    async with (
        scripted_backend(
            [STEP, ANSWER], style=style, has_tokens=True, elsewhere=tokenize
        ) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, stream=stream, **CAPTURE)
        found = await trajectory(http, answered)
        first, second = (request.body for request in backend.requests)
    replies = [reply_text(found["messages"][call["reply"]]) for call in found["model_calls"]]
    (segment,) = found["token_segments"]
    ids = [*segment["prompt_ids"], *segment["response_ids"]]
    assert text_of_tokens(segment["prompt_ids"]) == prompt_text(first)
    assert text_of_tokens(ids) == prompt_text(second) + replies[1]
    assert sampled(segment) == replies
    assert segment["logprobs"] == [
        logprob_of(token) if mask else 0.0
        for token, mask in zip(segment["response_ids"], segment["response_mask"], strict=True)
    ]
    for call_object, body, reply in zip(
        found["model_calls"], (first, second), replies, strict=True
    ):
        prompt_tokens = len(tokens_of(prompt_text(body)))
        version = WEIGHT_VERSION if style == "sglang" else None
        assert [call_object[name] for name in CALL_FIELDS] == [
            *(0, prompt_tokens, len(tokens_of(reply)), None, version)
        ]
    assert [
        (body["return_token_ids"], body["logprobs"], body.get("stream")) for body in (first, second)
    ] == [(True, True, None)] * 2
    assert not {"return_token_ids", "logprobs"} & found["settings"][0].keys()
    assert answer_text(answered).endswith("It is 42.")
    assert "token_ids" not in answered.text
    assert '"logprob"' not in answered.text
    assert "__verbose" not in answered.text


async def test_client_that_asks_for_verbose_replies_of_llama_cpp_gets_them(tmp_path: Path) -> None:
    async with (
        scripted_backend(
            [ANSWER] * 2, style="llama.cpp", has_tokens=True, elsewhere=tokenize
        ) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, verbose=True, **CAPTURE)
        streamed = await post_chat(http, stream=True, **CAPTURE)
    assert answered.json()["__verbose"]["prompt"] == prompt_text(backend.requests[0].body)
    assert "__verbose" not in streamed.text


async def cuts_off_tokens(request: web.Request) -> web.Response:
    """Serve a /tokenize whose tokens are not those of the completions."""
    body = await request.json()
    return web.json_response({"tokens": tokens_of(body["content"])[1:]})


async def has_no_tokenizer(request: web.Request) -> web.Response:
    return web.Response(status=404)


@pytest.mark.parametrize(
    ("elsewhere", "missing"),
    [
        (cuts_off_tokens, "The rendered prompt has {fewer} tokens instead of {counted}."),
        (has_no_tokenizer, "The backend sent no token ids."),
    ],
)
async def test_call_has_a_reason_for_missing_tokens_if_its_prompt_cannot_be_tokenized_again(
    tmp_path: Path, elsewhere: Any, missing: str
) -> None:
    async with (
        scripted_backend(
            [ANSWER], style="llama.cpp", has_tokens=True, elsewhere=elsewhere
        ) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        found = await trajectory(http, await post_chat(http, **CAPTURE))
        counted = len(tokens_of(prompt_text(backend.requests[0].body)))
    reason = found["model_calls"][0]["tokens_missing"]
    assert reason == missing.format(fewer=counted - 1, counted=counted)
    assert found["token_segments"] == []


async def test_steps_of_a_token_capture_run_are_streamed_while_it_continues(tmp_path: Path) -> None:
    shown = asyncio.Event()
    body = {**BODY, "stream": True, **CAPTURE}
    async with (
        scripted_backend([STEP, Held(ANSWER, until=shown)], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
        http.stream("POST", PATH, json=body) as answered,
    ):
        async for line in answered.aiter_lines():
            if "echo 42" in line:
                shown.set()
    assert shown.is_set()


async def test_client_that_asks_for_logprobs_gets_them(tmp_path: Path) -> None:
    async with (
        scripted_backend([ANSWER], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, logprobs=True, **CAPTURE)
        found = await trajectory(http, answered)
    content = answered.json()["choices"][0]["logprobs"]["content"]
    assert [each["logprob"] for each in content] == found["token_segments"][0]["logprobs"]
    assert "token_ids" not in answered.text


async def test_prompt_that_does_not_extend_the_earlier_tokens_begins_a_new_token_segment(
    tmp_path: Path,
) -> None:
    thinking = {**STEP, "reasoning": "I run echo."}
    async with (
        scripted_backend([thinking, ANSWER], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        found = await trajectory(http, await post_chat(http, **CAPTURE))
        prompts = [prompt_text(request.body) for request in backend.requests]
    segments = found["token_segments"]
    assert [text_of_tokens(segment["prompt_ids"]) for segment in segments] == prompts
    assert [set(segment["response_mask"]) for segment in segments] == [{1}, {1}]
    assert [each["token_segment"] for each in found["model_calls"]] == [0, 1]


BROKEN = tool_reply({"name": "execute_bash", "arguments": '{"command": "ec'}, content="Hm.")


@pytest.mark.parametrize("style", ["default", "reference"])
async def test_reply_with_invalid_arguments_is_sent_back_to_the_model_unchanged(
    tmp_path: Path, style: Any
) -> None:
    agent = AgentSettings(capture_tokens=True, style=style)
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "", "type": "function", "function": {"name": "execute_bash", "arguments": "["}},
            {"id": "", "type": "function", "function": {"name": "submit", "arguments": "["}},
        ],
    }
    async with (
        scripted_backend(
            [{"message": message}, tool_reply(call("submit", answer="It is 42."))], has_tokens=True
        ) as backend,
        running_proxy(
            backend, "memory", tmp_path, profiles=Profiles.only(Profile(agent=agent))
        ) as url,
        http_client(url) as http,
    ):
        found = await trajectory(http, await post_chat(http, **CAPTURE))
        first, second = (request.body["messages"] for request in backend.requests)
    assert second[len(first)] == message
    assert len(found["token_segments"]) == 1


async def test_invalid_arguments_that_the_backend_refuses_are_repaired(tmp_path: Path) -> None:
    """vLLM, SGLang and llama.cpp decode the arguments for the chat template."""
    refusal = Refusal(400, "Expecting value: line 1 column 1 (char 0)")
    async with (
        scripted_backend([STEP, BROKEN, refusal, STEP, ANSWER], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, **CAPTURE)
        found = await trajectory(http, answered)
        prompts = [request.body["messages"] for request in backend.requests]
    assert answer_text(answered).endswith("It is 42.")
    at = len(prompts[1])
    written = [prompt[at]["tool_calls"][0]["function"]["arguments"] for prompt in prompts[2:]]
    assert written[0] == '{"command": "ec'
    assert written[1:] == [json.dumps({"invalid_arguments": '{"command": "ec'})] * 2
    assert prompts[3][:at] == prompts[2][:at]
    assert prompts[3][at + 1 :] == prompts[2][at + 1 :]
    assert found["outcome"] == "answered"
    assert [each.get("token_segment") for each in found["model_calls"]] == [0, 0, None, 1, 1]


async def test_invalid_call_arguments_of_a_suspended_run_are_repaired(tmp_path: Path) -> None:
    weather = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    both = tool_reply({"name": "execute_bash", "arguments": "echo"}, call("weather"))
    async with (
        scripted_backend([both, ANSWER], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        first = await post_chat(http, tools=[weather], **CAPTURE)
        message = first.json()["choices"][0]["message"]
        (client_call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": client_call["id"], "content": "Sunny."}
        messages = [*BODY["messages"], message, result]
        await post_chat(http, tools=[weather], messages=messages)
        sent = backend.requests[1].body["messages"][-3]["tool_calls"]
    written = [each["function"]["arguments"] for each in sent]
    assert written == [json.dumps({"invalid_arguments": "echo"}), "{}"]


async def test_refused_token_id_parameters_are_not_sent_to_the_backend_again(
    tmp_path: Path,
) -> None:
    refusal = Refusal(400, "Unrecognized request argument supplied: return_token_ids")
    async with (
        scripted_backend([refusal, STEP, ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, **CAPTURE)
        found = await trajectory(http, answered)
        asked = ["return_token_ids" in request.body for request in backend.requests]
    assert answer_text(answered).endswith("It is 42.")
    assert asked == [True, False, False]
    reasons = {each["tokens_missing"] for each in found["model_calls"]}
    assert reasons == {f"The backend refused the parameters: {refusal.message}"}
    assert found["token_segments"] == []
    assert [each["error"] for each in found["model_calls"]] == [None, None]


async def test_refusal_of_another_parameter_reaches_the_client(tmp_path: Path) -> None:
    async with (
        scripted_backend([Refusal(400, "temperature must be at most 2")]) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        refused = await post_chat(http, **CAPTURE)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "temperature must be at most 2"


async def test_backend_without_token_ids_is_reported_in_the_trajectory(tmp_path: Path) -> None:
    async with (
        scripted_backend([ANSWER]) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        found = await trajectory(http, await post_chat(http, **CAPTURE))
    assert found["model_calls"][0]["tokens_missing"] == "The backend sent no token ids."
    assert "token_segment" not in found["model_calls"][0]


REFUSED: dict[str, tuple[Profile, dict[str, Any], int, str]] = {
    "not allowed": (Profile(), {}, 403, "The profile 'default' does not allow"),
    "redaction": (
        Profile(
            agent=AgentSettings(capture_tokens=True), redaction=Redaction(detectors=("github",))
        ),
        *({}, 400, "The profile 'default' redacts secrets"),
    ),
    "plain": (ALLOWED, {"model": f"{BODY['model']}:plain"}, 400, "sandbox.capture: tokens needs"),
    "never": (
        Profile(agent=AgentSettings(capture_tokens=True), enabled="never"),
        *({}, 400, "sandbox.capture: tokens needs a sandbox"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_request_whose_tokens_cannot_be_captured_is_refused(
    tmp_path: Path, case: str
) -> None:
    profile, fields, status, message = REFUSED[case]
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(profile)) as url,
        http_client(url) as http,
    ):
        refused = await post_chat(http, **fields, **CAPTURE)
        assert not backend.requests
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (status, "sandbox.capture")
    assert error["message"].startswith(message)


async def test_token_capture_sends_tools_to_a_model_without_tool_support(tmp_path: Path) -> None:
    async with (
        scripted_backend([STEP, ANSWER], has_tokens=True) as backend,
        running_proxy(
            backend,
            "memory",
            tmp_path,
            profiles=Profiles.only(ALLOWED),
            make_verdicts=lambda *_: ToolVerdicts(ToolSupportSettings("never")),
        ) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, **CAPTURE)
        assert answer_text(answered).endswith("It is 42.")
        assert all(request.body["tools"] for request in backend.requests)


async def test_empty_reply_is_kept_and_the_next_call_still_has_the_tools(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply(""), ANSWER], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(ALLOWED)) as url,
        http_client(url) as http,
    ):
        found = await trajectory(http, await post_chat(http, max_tokens=7, **CAPTURE))
        first, second = (request.body for request in backend.requests)
    added = [{"role": "assistant", "content": ""}, {"role": "user", "content": NUDGE}]
    assert second["messages"] == [*first["messages"], *added]
    assert (first["max_tokens"], second["max_tokens"]) == (7, 7)
    assert second["tools"] == first["tools"]
    assert len(found["token_segments"]) == 1


async def test_long_history_ends_a_token_capture_run_without_compaction(tmp_path: Path) -> None:
    long = tool_reply(call("execute_bash", command="seq 4000"))
    usage = {"prompt_tokens": 3000, "completion_tokens": 10, "total_tokens": 3010}
    full = Refusal(400, "This model's maximum context length is 4096 tokens.")
    profile = Profile(agent=AgentSettings(capture_tokens=True), limits=Limits(final_question=False))
    async with (
        scripted_backend(
            [{**long, "usage": usage}, *[full] * 8], window=4096, has_tokens=True
        ) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(profile)) as url,
        http_client(url) as http,
    ):
        found = await trajectory(http, await post_chat(http, **CAPTURE))
    assert found["result"]["stop_reason"] == "context_window"
    assert found["result"]["compactions"] == []
    assert len(found["token_segments"]) == 1


TRAINING = Profile(name="training", agent=AgentSettings(capture="tokens"))


@pytest.mark.parametrize("prefix", ["/sessions/rollout-7", ""])
async def test_key_with_a_profile_that_captures_tokens_needs_no_field_in_the_request(
    tmp_path: Path, prefix: str
) -> None:
    keyring = Keyring([("sk-agent", Key("agent", ("training",))), ("sk-user", Key("user"))])
    profiles = Profiles({"default": Profile(), "training": TRAINING})
    async with (
        scripted_backend([STEP, ANSWER, ANSWER], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=profiles, keyring=keyring) as url,
        http_client(f"{url}{prefix}") as agent,
        http_client(url) as user,
    ):
        agent.headers["authorization"] = "Bearer sk-agent"
        user.headers["authorization"] = "Bearer sk-user"
        found = await trajectory(agent, await post_chat(agent))
        await post_chat(user)
        listed = [(await each.get("/v1/trajectories")).json()["data"] for each in (agent, user)]
    assert [each["tokens_missing"] for each in found["model_calls"]] == [None, None]
    assert (len(found["token_segments"]), found["session_id"]) == (1, prefix[10:] or None)
    assert [len(each) for each in listed] == [1, 0]


@pytest.mark.parametrize("capture", ["none", "messages", "tokens", None])
async def test_capture_of_a_request_takes_precedence_over_that_of_the_profile(
    tmp_path: Path, capture: str | None
) -> None:
    async with (
        scripted_backend([ANSWER], has_tokens=True) as backend,
        running_proxy(
            backend, "memory", tmp_path, profiles=Profiles({"training": TRAINING}, "training")
        ) as url,
        http_client(url) as http,
    ):
        answered = await post_chat(http, sandbox={"capture": capture})
        run_id = answered.headers["x-sandbox-run"]
        found = (await http.get(f"/v1/runs/{run_id}/trajectory")).json()
    if capture == "none":
        assert found["error"]["code"] == "trajectory_not_captured"
    else:
        assert len(found["token_segments"]) == (0 if capture == "messages" else 1)


NOT_CAPTURED: dict[str, Profile] = {
    "redaction": replace(TRAINING, redaction=Redaction(detectors=("github",))),
    "never": replace(TRAINING, enabled="never"),
}


@pytest.mark.parametrize("case", NOT_CAPTURED)
async def test_trajectory_has_messages_but_no_tokens_if_the_run_cannot_capture_tokens(
    tmp_path: Path, case: str
) -> None:
    profiles = Profiles({"training": NOT_CAPTURED[case]}, "training")
    async with (
        scripted_backend([ANSWER], has_tokens=True) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=profiles) as url,
        http_client(url) as http,
    ):
        request = {"model": BODY["model"], "input": "How many?"}
        answered = await http.post("/v1/responses", json=request)
        found = await trajectory(http, answered)
    assert (len(found["model_calls"]), found["token_segments"]) == (1, [])
    assert "return_token_ids" not in backend.requests[0].body
