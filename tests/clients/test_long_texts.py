"""Long texts that are moved to sandbox files, and how the prompt refers to them."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from aiohttp import web

from policies.context import estimate_tokens
from policies.profile import Profile
from policies.workspace import INPUT_DIR, InputLimits
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.fakes.backend import ScriptedBackend, by_history, scripted_backend
from tests.fakes.server import REAL_KINDS, Kind, running_proxy

SUBMIT = tool_reply(call("submit", answer="done"))
BOOK = "".join(f"Line {number} of the book.\n" for number in range(3000))
LONG_PROMPT = f"<document title='a.txt'>\n{BOOK}</document>\nWho wrote it?"
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
WORDS = (
    "report",
    "says",
    "that",
    "costs",
    "and",
    "revenue",
    "of",
    "every",
    "plant",
    "in",
    "spring",
)
FACT = "The plant in Orlu paid 4,731 crowns for its turbine."


def library() -> dict[str, str]:
    """Return four documents of 25,000 tokens each; one of them contains FACT."""
    chance = random.Random(5)
    documents = {
        f"report-{place}.txt": [" ".join(chance.choices(WORDS, k=12)) + "." for _ in range(2000)]
        for place in ("north", "south", "east", "west")
    }
    documents["report-east.txt"][1234] = FACT
    return {name: "\n".join(lines) + "\n" for name, lines in documents.items()}


def request_body(path: str, text: str, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "fake-model", **more}
    if path == "/v1/responses":
        return {**body, "input": text}
    limit = {"max_tokens": 100} if path == "/v1/messages" else {}
    return {**body, **limit, "messages": [{"role": "user", "content": text}]}


async def post(
    url: str, body: dict[str, Any], path: str = PATHS[0], headers: dict[str, str] | None = None
) -> Any:
    with anyio.fail_after(60):
        async with httpx.AsyncClient(base_url=url, timeout=None) as http:
            answer = await http.post(path, json=body, headers=headers)
    return answer.json()


def user_text(backend: ScriptedBackend, number: int = -1) -> str:
    """Return the text of the user messages in a backend request."""
    messages = backend.requests[number].body["messages"]
    return "".join(str(message["content"]) for message in messages if message["role"] == "user")


@pytest.mark.parametrize("kind", REAL_KINDS)
async def test_run_with_documents_in_files_uses_at_most_an_eighth_of_the_tokens_of_a_plain_request(
    kind: Kind, tmp_path: Path
) -> None:
    def script(body: dict[str, Any]) -> dict[str, Any]:
        """Search for the fact, read the lines around it, and submit the amount."""
        seen = [message["content"] for message in body["messages"] if message["role"] == "tool"]
        if not body.get("tools"):
            return text_reply(re.findall(r"Orlu paid (\S+)", user_text(backend))[0])
        if not seen:
            return tool_reply(call("execute_bash", command=f"grep -n Orlu {INPUT_DIR}/*"))
        path, line = re.findall(rf"({INPUT_DIR}/\S+?):(\d+):", seen[0])[0]
        around = f"sed -n {int(line)},{int(line) + 1}p {path}"
        if len(seen) == 1:
            return tool_reply(call("execute_bash", command=around))
        return tool_reply(call("submit", answer=re.findall(r"Orlu paid (\S+)", seen[1])[0]))

    documents = library()
    document_texts = [
        f"<document title='{name}'>\n{text}</document>\n" for name, text in documents.items()
    ]
    text = "".join([*document_texts, "What did Orlu pay?"])
    async with scripted_backend(script) as backend, running_proxy(backend, kind, tmp_path) as url:
        answers = [
            (await post(url, {**request_body(PATHS[0], text), "model": model}))["choices"][0][
                "message"
            ]
            for model in ("fake-model:plain", "fake-model")
        ]
    assert [answer["content"] for answer in answers] == ["4,731", "4,731"]
    plain, *run_tokens = (
        estimate_tokens(json.dumps(seen.body, ensure_ascii=False)) for seen in backend.requests
    )
    assert plain > 100_000
    assert len(run_tokens) == 3
    assert 8 * sum(run_tokens) <= plain
    for name, content in documents.items():
        assert f"{INPUT_DIR}/{name}: 2,000 lines, {len(content):,} characters" in user_text(backend)


@pytest.mark.parametrize("path", PATHS)
async def test_usage_reports_the_tokens_saved_by_moving_documents_to_files(
    path: str, tmp_path: Path
) -> None:
    script = [tool_reply(call("execute_bash", command=f"cat {INPUT_DIR}/a.txt")), SUBMIT]
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        usage = (await post(url, request_body(path, LONG_PROMPT), path))["usage"]["sandbox"]
        short = (
            (await post(url, request_body(path, "Hello."), path))
            .get("usage", {})
            .get("sandbox", {})
        )
    each = estimate_tokens(LONG_PROMPT) - estimate_tokens(user_text(backend, 0))
    assert (usage["documents_tokens"], usage["documents_tokens_saved"]) == (each, 2 * each)
    assert short.get("documents_tokens_saved", 0) == 0
    assert "Line 0 of the book." in str(backend.requests[1].body["messages"][-1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("headers", "sandbox"),
    [({}, {"offload_documents": False}), ({"X-Sandbox-Offload-Documents": "off"}, {})],
    ids=["by body", "by header"],
)
async def test_request_can_keep_documents_in_the_prompt(
    path: str, headers: dict[str, str], sandbox: dict[str, Any], tmp_path: Path
) -> None:
    async with (
        scripted_backend(lambda body: SUBMIT) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        unmoved = await post(url, request_body(path, LONG_PROMPT, sandbox=sandbox), path, headers)
        prompt = user_text(backend)
        await post(
            url, request_body(path, LONG_PROMPT, sandbox={"offload_documents": True}), path, headers
        )
    assert prompt == LONG_PROMPT
    assert unmoved["usage"]["sandbox"]["documents_tokens"] == 0
    assert f"{INPUT_DIR}/a.txt" in user_text(backend)


@pytest.mark.parametrize(
    ("headers", "sandbox", "param"),
    [({}, {"offload_documents": "no"}, "sandbox.offload_documents"),
     ({"X-Sandbox-Offload-Documents": "maybe"}, {}, "X-Sandbox-Offload-Documents")],
)  # fmt: skip
async def test_invalid_documents_setting_is_refused(
    headers: dict[str, str], sandbox: dict[str, Any], param: str, tmp_path: Path
) -> None:
    async with scripted_backend([]) as backend, running_proxy(backend, "memory", tmp_path) as url:
        answer = await post(
            url, request_body(PATHS[0], LONG_PROMPT, sandbox=sandbox), headers=headers
        )
    assert answer["error"]["param"] == param
    assert backend.requests == []


@pytest.mark.parametrize(
    "more",
    [
        {"model": "fake-model:plain"},
        {"tool_choice": "none"},
        {"sandbox": {"enabled": "never"}},
    ],
)
async def test_request_without_a_sandbox_keeps_long_text_in_the_prompt(
    more: dict[str, Any], tmp_path: Path
) -> None:
    async with (
        scripted_backend([text_reply("Nobody.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        await post(url, {**request_body(PATHS[0], LONG_PROMPT), **more})
    assert user_text(backend) == LONG_PROMPT


async def test_only_long_texts_of_user_messages_become_files(tmp_path: Path) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    tool = {"name": "f", "description": BOOK, "parameters": {"type": "object"}}
    messages = [
        {"role": "system", "content": LONG_PROMPT},
        {"role": "user", "content": LONG_PROMPT},
        {"role": "assistant", "content": LONG_PROMPT, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": LONG_PROMPT},
        {"role": "user", "content": "And now?"},
    ]
    body = {"model": "m", "messages": messages, "tools": [{"type": "function", "function": tool}]}
    async with (
        scripted_backend([SUBMIT]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        await post(url, body)
    sent = backend.requests[0].body
    assert sent["messages"][0]["content"].endswith(LONG_PROMPT)
    assert len(sent["messages"][1]["content"]) < 1000
    assert [message["content"] for message in sent["messages"][2:]] == [
        LONG_PROMPT,
        LONG_PROMPT,
        "And now?",
    ]
    assert sent["tools"][-1]["function"]["description"] == BOOK


async def test_growing_conversation_keeps_its_prompt_prefix_and_files(tmp_path: Path) -> None:
    other = LONG_PROMPT.replace("book", "play")
    first: list[dict[str, Any]] = [{"role": "user", "content": LONG_PROMPT}]
    second = [*first, {"role": "assistant", "content": "Anon."}, {"role": "user", "content": other}]
    heads = "; ".join(f"cat {INPUT_DIR}/{name} | head -c 20" for name in ("a.txt", "a-2.txt"))
    look = tool_reply(call("execute_bash", command=heads))
    async with (
        scripted_backend(by_history([SUBMIT, look, SUBMIT])) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        await post(url, {"model": "m", "messages": first})
        await post(url, {"model": "m", "messages": second})
    before, after, seen = (request.body["messages"] for request in backend.requests)
    assert after[: len(before)] == before
    assert re.findall(r"/a\S*\.txt", user_text(backend)) == ["/a.txt", "/a-2.txt"]
    assert seen[-1]["content"].split("\n")[2:4] == ["Line 0 of the book.", "Line 0 of the play."]


def tokenizer(count: Callable[[], web.Response], asked_for: list[Any]) -> Any:
    async def tokenize(request: web.Request) -> web.Response:
        assert request.path == "/tokenize"
        asked_for.append(await request.json())
        return count()

    return tokenize


@pytest.mark.parametrize(
    ("tokens", "is_moved"), [(12_000, False), (12_001, True)], ids=["up to", "over"]
)
async def test_backend_tokenizer_decides_if_a_text_near_the_limit_becomes_a_file(
    tokens: int, is_moved: bool, tmp_path: Path
) -> None:
    token_requests: list[Any] = []
    elsewhere = tokenizer(
        lambda: web.json_response({"count": tokens, "tokens": []}), token_requests
    )
    async with (
        scripted_backend(lambda body: SUBMIT, elsewhere=elsewhere) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        await post(url, request_body(PATHS[0], "Hello."))
        await post(url, request_body(PATHS[0], LONG_PROMPT * 10))
        assert token_requests == []
        for _ in range(2):
            await post(url, request_body(PATHS[0], LONG_PROMPT))
    assert token_requests == [
        {"model": "fake-model", "prompt": LONG_PROMPT, "add_special_tokens": False}
    ]
    assert (user_text(backend) != LONG_PROMPT) is is_moved


@pytest.mark.parametrize(
    ("answer", "times"),
    [
        (web.Response, 2),
        (lambda: web.Response(status=500), 2),
        (lambda: web.json_response({"count": "many"}), 2),
        (lambda: web.Response(status=404), 1),
    ],
    ids=["no JSON", "a failure", "no number", "no such path"],
)
async def test_token_estimate_is_used_if_the_backend_cannot_count_tokens(
    answer: Callable[[], web.Response], times: int, tmp_path: Path
) -> None:
    token_requests: list[Any] = []
    over = Profile(inputs=InputLimits(offload_text_over_tokens=estimate_tokens(LONG_PROMPT) - 1))
    async with (
        scripted_backend(
            lambda body: SUBMIT, elsewhere=tokenizer(answer, token_requests)
        ) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=Profiles.only(over)) as url,
    ):
        for _ in range(2):
            await post(url, request_body(PATHS[0], LONG_PROMPT))
    assert len(token_requests) == times
    assert f"{INPUT_DIR}/a.txt" in user_text(backend)
