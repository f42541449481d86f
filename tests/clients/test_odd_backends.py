"""Backends whose answers violate their API, as seen by a client of the proxy."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Frames, Item, Raw, frames, scripted_backend
from tests.fakes.server import running_proxy

JSON = {"content-type": "application/json"}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Work."}]}


async def post(tmp_path: Path, script: list[Item], **body: Any) -> tuple[httpx.Response, list[Any]]:
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        async with httpx.AsyncClient(timeout=20) as client:
            response = await client.post(f"{url}/v1/chat/completions", json={**BODY, **body})
        return response, [request.body for request in backend.requests]


def raw_completion(message: Any, **fields: Any) -> Raw:
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return Raw(200, json.dumps({"choices": [choice], **fields}).encode(), JSON)


ASSISTANT_MESSAGE = {"role": "assistant", "content": "It is 42."}
ODD_CHUNKS: list[Any] = [
    {"choices": 5},
    {"choices": [{"index": 0, "delta": "text"}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": {"a": 1}}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": ["x"]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": "x"}]}}]},
]


@pytest.mark.parametrize("chunk", ODD_CHUNKS, ids=json.dumps)
async def test_malformed_chunk_is_a_bad_response_error(chunk: Any, tmp_path: Path) -> None:
    response, _ = await post(tmp_path, [Frames(frames(chunk))] * 3, stream=True)
    events = [line for line in response.text.splitlines() if line.startswith("data: {")]
    assert json.loads(events[-1][6:])["error"]["code"] == "backend_bad_response"


@pytest.mark.parametrize(
    "raw",
    [Raw(999, b"{}", JSON), Raw(302, b"", {"location": "https://elsewhere.test/v1"})],
    ids=["status 999", "redirect"],
)
@pytest.mark.parametrize("model", ["m", "m:plain"])
async def test_malformed_backend_status_is_a_502(raw: Raw, model: str, tmp_path: Path) -> None:
    response, _ = await post(tmp_path, [raw] * 3, model=model)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "backend_bad_response"


async def test_malformed_backend_answer_is_a_502_in_a_run_and_relayed_for_a_plain_model(
    tmp_path: Path,
) -> None:
    raw = Raw(200, b"[" * 100_000, JSON)
    response, _ = await post(tmp_path, [raw] * 3)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "backend_bad_response"
    relayed, _ = await post(tmp_path, [raw], model="m:plain")
    assert relayed.content == raw.body


async def test_malformed_usage_is_ignored(tmp_path: Path) -> None:
    response, _ = await post(tmp_path, [raw_completion(ASSISTANT_MESSAGE, usage=["a"])])
    assert response.json()["choices"][0]["message"]["content"] == "It is 42."


async def test_infinity_and_lone_surrogates_become_valid_json(
    tmp_path: Path,
) -> None:
    choice = {"index": 0, "message": ASSISTANT_MESSAGE, "finish_reason": "stop"}
    logprobs = {"content": [{"token": "\ud83d", "logprob": float("-inf")}]}
    script = {"choices": [{**choice, "logprobs": logprobs}], "system_fingerprint": "\ud83d"}
    raw = Raw(200, json.dumps(script).encode(), JSON)
    response, _ = await post(tmp_path, [text_reply("It is 42."), raw], logprobs=True)
    assert response.status_code == 200
    assert response.json()["choices"][0]["logprobs"]["content"][0]["logprob"] is None


@pytest.mark.parametrize(
    "default",
    [{"stop": []}, {"logprobs": False}, {"logit_bias": {}}, {"response_format": {"type": "text"}}],
    ids=json.dumps,
)
async def test_request_parameter_with_its_default_value_causes_no_further_model_call(
    default: dict[str, Any], tmp_path: Path
) -> None:
    submit = tool_reply(call("submit", answer="SUBMITTED"))
    response, requests = await post(tmp_path, [submit, text_reply("asked again")], **default)
    assert response.json()["choices"][0]["message"]["content"] == "SUBMITTED"
    assert len(requests) == 1


async def test_sandbox_field_is_not_sent_to_the_backend(tmp_path: Path) -> None:
    for model in ("m", "m:plain"):
        _, requests = await post(
            tmp_path, [text_reply("Yes.")], model=model, sandbox={"steps": "off"}
        )
        assert "sandbox" not in requests[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sandbox", 5),
        ("max_tokens", "abc"),
        ("stream_options", {"include_usage": "yes"}),
        ("stream", "yes"),
    ],
)
async def test_error_names_the_field_of_the_wrong_type(
    field: str, value: Any, tmp_path: Path
) -> None:
    response, requests = await post(tmp_path, [], **{field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"].partition(".")[0] == field
    assert requests == []


async def test_request_with_a_lone_surrogate_in_the_model_name_is_answered(tmp_path: Path) -> None:
    async with (
        scripted_backend([text_reply("Yes.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient() as client,
    ):
        content = json.dumps({**BODY, "model": "\ud800"}).encode()
        response = await client.post(f"{url}/v1/chat/completions", content=content)
        assert response.status_code == 200
        assert (await client.head(f"{url}/health")).status_code == 200
