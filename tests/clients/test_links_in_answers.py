"""Links to produced files: listed below the answer if configured, and removed from what the model
receives.
"""

import base64
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from policies.artifacts import ArtifactLimits
from policies.profile import Profile
from policies.workspace import OUTPUT_DIR
from proxy.keys import Key, Keyring
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.fakes.backend import ScriptedBackend, by_history, scripted_backend
from tests.fakes.server import running_proxy

MAKE = tool_reply(call("execute_bash", command="mkdir -p output/sub; echo 1 > output/sub/b.csv"))
LINK = re.compile(r"http://[^)\s]+/content\?exp=\d+&sig=[0-9a-f]+")
CHAT_UI = {"chatui-conversation-id": "c1"}


def chat_body(content: Any, model: str = "m", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}], **more}


async def answer_text(client: httpx.AsyncClient, body: dict[str, Any], **headers: str) -> str:
    response = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def messages_sent(backend: ScriptedBackend, number: int) -> str:
    """Return the messages of a backend request as one string."""
    return str(backend.requests[number].body["messages"])


@asynccontextmanager
async def file_maker(home: Path) -> AsyncIterator[tuple[ScriptedBackend, httpx.AsyncClient]]:
    """Run a proxy whose model makes a file and names it in its answer, and a client of it."""
    script = by_history([MAKE, text_reply("See output/sub/b.csv.")])
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", home) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        yield backend, client


@pytest.mark.parametrize("path_in_answer", ["output/sub/b.csv", "./output/sub/b.csv"])
async def test_relative_path_in_an_answer_becomes_a_link(
    path_in_answer: str, tmp_path: Path
) -> None:
    script = by_history([MAKE, text_reply(f"It is in {path_in_answer}.")])
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        answer = await answer_text(client, chat_body("Make it."))
        assert answer.startswith("It is in [b.csv](http://")
        link = LINK.search(answer)
        assert link is not None
        assert (await client.get(link.group())).text == "1\n"


@pytest.mark.parametrize("model", ["m", "m:plain"])
@pytest.mark.parametrize("role", ["assistant", "user"])
async def test_signature_of_a_file_link_is_not_in_the_prompt(
    model: str, role: str, tmp_path: Path
) -> None:
    async with file_maker(tmp_path) as (backend, client):
        first = chat_body("Make it.")
        answer = await answer_text(client, first)
        said = [*first["messages"], {"role": role, "content": answer}]
        more = [{"type": "text", "text": answer}, {"type": "text", "text": "Go on."}]
        turn = {"model": model, "messages": [*said, {"role": "user", "content": more}]}
        await answer_text(client, turn)
        link = LINK.search(answer)
        assert link is not None
        assert (await client.get(link.group())).status_code == 200
    prompt = messages_sent(backend, -1)
    assert "sig=" in answer
    assert "sig=" not in prompt
    if model == "m":
        assert prompt.count(f"[b.csv]({OUTPUT_DIR}/sub/b.csv)") == 2
        assert "/v1/containers/" not in prompt
    else:
        assert prompt.count("/content)") == 2


@pytest.mark.parametrize("turn", ["messages", "responses", "previous response"])
async def test_signed_file_link_in_a_responses_or_messages_request_reaches_the_model_as_a_path(
    turn: str, tmp_path: Path
) -> None:
    async with file_maker(tmp_path) as (backend, client):
        first = await client.post("/v1/responses", json={"model": "m", "input": "Make it."})
        link = LINK.search(first.text)
        assert link is not None
        answer = {"role": "assistant", "content": f"See [b.csv]({link.group()})."}
        said = [{"role": "user", "content": "Make it."}, answer, {"role": "user", "content": "Go."}]
        path, fields = {
            "messages": ("/v1/messages", {"max_tokens": 100, "messages": said}),
            "responses": ("/v1/responses", {"input": said}),
            "previous response": (
                "/v1/responses",
                {"previous_response_id": first.json()["id"], "input": "Go."},
            ),
        }[turn]
        response = await client.post(path, json={"model": "m", **fields})
        assert response.status_code == 200, response.text
    prompt = messages_sent(backend, -1)
    assert f"[b.csv]({OUTPUT_DIR}/sub/b.csv)" in prompt
    assert "sig=" not in prompt
    assert "/v1/containers/" not in prompt


async def test_link_to_a_file_of_another_key_is_not_resolved(tmp_path: Path) -> None:
    script = by_history([MAKE, text_reply("See output/sub/b.csv.")])
    keyring = Keyring([("sk-a", Key("a")), ("sk-b", Key("b"))])
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=keyring) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        answer = await answer_text(client, chat_body("Make it."), authorization="Bearer sk-a")
        count = len(backend.requests)
        await answer_text(client, chat_body(answer), authorization="Bearer sk-b")
    prompt = messages_sent(backend, count)
    assert "sig=" not in prompt
    assert f"{OUTPUT_DIR}/sub/b.csv" not in prompt
    assert "/content)" in prompt


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_file"])
@pytest.mark.parametrize("key", ["sk-a", "sk-b"])
async def test_produced_image_can_be_sent_back_by_its_link(
    kind: str, key: str, tmp_path: Path
) -> None:
    make = tool_reply(call("execute_bash", command="mkdir -p output; echo pixels > output/p.png"))
    script = by_history([make, text_reply("See output/p.png.")])
    keyring = Keyring([("sk-a", Key("a")), ("sk-b", Key("b"))])
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=keyring) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        answer = await answer_text(client, chat_body("Make it."), authorization="Bearer sk-a")
        link = LINK.search(answer)
        assert link is not None
        parts = {
            "image_url": {"image_url": {"url": link.group(), "detail": "low"}},
            "input_image": {"image_url": link.group(), "detail": "low"},
            "input_file": {"file_url": link.group()},
        }
        count = len(backend.requests)
        again = chat_body([{"type": kind, **parts[kind]}])
        await answer_text(client, again, authorization=f"Bearer {key}")
    content = backend.requests[count].body["messages"][-1]["content"]
    assert "sig=" not in str(content)
    if key == "sk-b":
        assert "was not fetched" in str(content)
    elif kind == "input_file":
        assert "p.png (image/png, 7 bytes)" in str(content)
    else:
        data = base64.b64encode(b"pixels\n").decode()
        shown = {"url": f"data:image/png;base64,{data}", "detail": "low"}
        assert shown in [part.get("image_url") for part in content]


@pytest.mark.parametrize(
    ("setting", "headers", "is_listed"),
    [
        ("auto", {}, False),
        ("auto", CHAT_UI, True),
        ("never", CHAT_UI, False),
        ("always", {}, True),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_files_missing_from_the_answer_are_listed_if_configured(
    setting: Any, headers: dict[str, str], is_listed: bool, stream: bool, tmp_path: Path
) -> None:
    script = by_history([MAKE, text_reply("It is done.")])
    profiles = Profiles.only(Profile(artifacts=ArtifactLimits(list_files=setting)))
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=profiles) as url,
        httpx.AsyncClient(base_url=url, timeout=30, headers=headers) as client,
    ):
        body = chat_body("Make it.", stream=stream)
        text = (await client.post("/v1/chat/completions", json=body)).text
    assert "It is done." in text
    assert ("\\n\\n- [b.csv](http" in text) is is_listed


async def test_file_linked_in_the_answer_is_not_listed_again_below_it(tmp_path: Path) -> None:
    script = by_history([MAKE, text_reply("See output/sub/b.csv.")])
    profiles = Profiles.only(Profile(artifacts=ArtifactLimits(list_files="always")))
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=profiles) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as client,
    ):
        answer = await answer_text(client, chat_body("Make it."))
    assert len(LINK.findall(answer)) == 1
