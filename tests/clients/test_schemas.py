"""Chat completions, chunks and errors, validated against OpenAI's own description."""

import json
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Frames, Item, Raw, Refusal, chunk, frames, scripted_backend
from tests.fakes.server import ATTEMPTS, running_proxy
from tests.openapi.description import check, described

pytestmark = described
BODY = {"model": "fake-model", "messages": [{"role": "user", "content": "Hello."}]}
LOOKUP = {"name": "lookup", "parameters": {"type": "object"}}
TOOL = {"tools": [{"type": "function", "function": LOOKUP}]}
LOOKUP_CALL = tool_reply(call("lookup", key="x"))
TOKEN = {"token": "42", "logprob": -0.1, "bytes": [52, 50], "top_logprobs": []}
MAKE = tool_reply(call("execute_bash", command="printf 'GIF89a;' > output/dot.gif"))
SUBMIT = tool_reply(call("submit", answer="See /testbed/output/dot.gif."))
REFUSAL = {"message": {"role": "assistant", "content": None, "refusal": "No."}}
NULLS = {
    "prompt_tokens": 1,
    "completion_tokens": 2,
    "total_tokens": 3,
    "prompt_tokens_details": None,
}
JSON_FORM = {"response_format": {"type": "json_object"}}
RUNS: dict[str, tuple[list[Item], dict[str, Any]]] = {
    "prose": ([text_reply("Hello you.")], {}),
    "empty": ([text_reply("")] * 4, {}),
    "steps": ([MAKE, SUBMIT], {}),
    "hidden steps": ([MAKE, SUBMIT], {"sandbox": {"steps": "off"}}),
    "thinking": ([{"reasoning": "Hm.", "content": "42"}], {}),
    "usage": ([{"content": "42", "usage": NULLS}], {}),
    "client tools": ([LOOKUP_CALL], TOOL),
    "functions": ([LOOKUP_CALL], {"functions": [LOOKUP]}),
    "choices": ([text_reply("42")] * 3, {"n": 3}),
    "form": ([SUBMIT, text_reply("{}")], JSON_FORM),
    "form not held": ([SUBMIT, text_reply("?"), text_reply("?")], JSON_FORM),
    "refusal": ([REFUSAL], {}),
    "cut short": ([SUBMIT, {"content": "4", "finish_reason": "length"}], {"stop": ["x"]}),
}
FAILURES: dict[str, tuple[list[Item], dict[str, Any], int]] = {
    "bad value": ([], {"temperature": 3}, 400),
    "refused by the backend": ([Refusal(400, "no", code=400)], {}, 400),
    "backend broken": ([Raw(200, b"<html>")] * ATTEMPTS, {}, 502),
}


async def post(script: list[Item], body: dict[str, Any], tmp_path: Path) -> httpx.Response:
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(timeout=30) as client,
    ):
        with anyio.fail_after(30):
            return await client.post(f"{url}/v1/chat/completions", json={**BODY, **body})


def parse_chunks(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("script", "body"), RUNS.values(), ids=RUNS)
async def test_completion_matches_the_openai_schema(
    script: list[Item], body: dict[str, Any], tmp_path: Path
) -> None:
    completion = (await post(script, body, tmp_path)).json()
    check("CreateChatCompletionResponse", completion)
    for choice in completion["choices"]:
        assert {"logprobs", "message", "finish_reason", "index"} <= choice.keys()
    for details in ("prompt_tokens_details", "completion_tokens_details"):
        counts = completion["usage"].get(details, {}).values()
        assert all(isinstance(count, int) for count in counts)


@pytest.mark.parametrize(("script", "body"), RUNS.values(), ids=RUNS)
async def test_stream_chunks_match_the_openai_schema(
    script: list[Item], body: dict[str, Any], tmp_path: Path
) -> None:
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunks = parse_chunks((await post(script, streamed, tmp_path)).text)
    for piece in chunks:
        check("CreateChatCompletionStreamResponse", piece)
    assert len({(piece["id"], piece["created"], piece["model"]) for piece in chunks}) == 1
    ends = [choice for piece in chunks for choice in piece["choices"] if choice["finish_reason"]]
    assert len(ends) == body.get("n", 1)
    assert (chunks[-1]["choices"], "usage" in chunks[-1]) == ([], True)


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_have_the_fields_content_and_refusal(
    stream: bool, tmp_path: Path
) -> None:
    logprobs = {"content": [TOKEN]}  # as vLLM sends it, without `refusal`
    if stream:
        pieces = [chunk({"content": "42"}, logprobs=logprobs), chunk({}, "stop"), "[DONE]"]
        last: Item = Frames(frames(*pieces))
    else:
        choice = {"index": 0, "finish_reason": "stop", "logprobs": logprobs}
        choice["message"] = {"role": "assistant", "content": "42"}
        body = json.dumps({"id": "x", "choices": [choice]}).encode()
        last = Raw(200, body, {"content-type": "application/json"})
    answer = await post([SUBMIT, last], {"logprobs": True, "stream": stream}, tmp_path)
    if stream:
        found = [choice for piece in parse_chunks(answer.text) for choice in piece["choices"]]
        for piece in parse_chunks(answer.text):
            check("CreateChatCompletionStreamResponse", piece)
    else:
        found = answer.json()["choices"]
        check("CreateChatCompletionResponse", answer.json())
    assert [choice["logprobs"] for choice in found if choice.get("logprobs")] == [
        {"content": [TOKEN], "refusal": None}
    ]


@pytest.mark.parametrize(("script", "body", "status"), FAILURES.values(), ids=FAILURES)
async def test_error_matches_the_openai_schema(
    script: list[Item], body: dict[str, Any], status: int, tmp_path: Path
) -> None:
    answer = await post(script, body, tmp_path)
    assert answer.status_code == status
    check("ErrorResponse", answer.json())


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/chat/nonsense", b"{}", 404),
        ("GET", "/v1/metrics/nonsense", b"", 404),
        ("GET", "/v1/chat/completions", b"", 405),
        ("DELETE", "/v1/models", b"", 405),
        ("POST", "/health", b"", 405),
        ("GET", "/v1/models/none", b"", 404),
        ("GET", "/v1/containers/cntr_x/files/cfile_x/content", b"", 404),
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"\xff", 400),
        ("POST", "/v1/chat/completions", b'{"temperature": NaN}', 400),
    ],
)
async def test_error_of_any_route_matches_the_openai_schema(
    method: str, path: str, content: bytes, status: int, tmp_path: Path
) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient() as client,
    ):
        answer = await client.request(method, url + path, content=content)
    assert answer.status_code == status
    check("ErrorResponse", answer.json())


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/containers", "GET, POST"),
        ("/v1/containers/cntr_x/files/cfile_x", "DELETE, GET"),
    ],
)
async def test_error_for_a_wrong_method_lists_the_allowed_methods(
    path: str, methods: str, tmp_path: Path
) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient() as client,
    ):
        answer = await client.patch(url + path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)
