"""State that the backend keeps for all clients of its one key: no client key reaches another's."""

from pathlib import Path
from typing import Any

import pytest

from proxy.keys import Key, Keyring
from tests.clients.test_passthrough import Recorder, before
from tests.fakes.server import EachKey, single_key

STATEFUL_PATHS = [
    *("batches", "threads", "assistants", "vector_stores", "fine_tuning/jobs", "uploads", "evals"),
    *("realtime/client_secrets", "videos", "skills", "prompts", "chat/completions"),
]


@pytest.mark.parametrize("path_name", STATEFUL_PATHS)
async def test_stateful_backend_paths_are_refused_if_the_server_has_several_keys(
    path_name: str, tmp_path: Path
) -> None:
    """Key B once listed, read and deleted what key A had made, through the operator's key."""
    backend = Recorder(status=200)
    keyring = Keyring([("sk-a", Key("a")), ("sk-b", Key("b"))])
    plain = {"model": "fake-model:plain"}
    async with before(backend.record, tmp_path, keyring=keyring) as client:
        answers = [
            await client.request(
                method, f"/v1/{path}", headers={"authorization": f"Bearer {key}"}, json=body
            )
            for key, method, path, body in (
                ("sk-a", "POST", f"{path_name}/made_1", {}),
                ("sk-b", "GET", path_name, plain),
                ("sk-b", "GET", f"{path_name}/made_1", plain),
                ("sk-b", "DELETE", f"{path_name}/made_1", plain),
            )
        ]
    assert backend.seen == []
    assert {answer.status_code for answer in answers} <= {403, 404, 405}


async def test_error_for_a_refused_stateful_path_names_the_setting(tmp_path: Path) -> None:
    backend = Recorder()
    async with before(backend.record, tmp_path) as client:
        answer = await client.get("/v1/batches")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (403, "path_keeps_state")
    assert "backend.passthrough: all" in error["message"]


async def test_plain_response_can_be_continued_only_with_the_key_that_made_it(
    tmp_path: Path,
) -> None:
    """A client that knows another's response id cannot continue it through `:plain`."""
    backend = Recorder(b'{"id": "resp_of_a", "object": "response"}', 200)
    keyring = Keyring([("sk-a", Key("a")), ("sk-b", Key("b"))])
    first = {"model": "fake-model:plain", "input": "Hello."}
    second = {**first, "previous_response_id": "resp_of_a"}
    async with before(backend.record, tmp_path, keyring=keyring) as client:
        statuses = [
            (
                await client.post(
                    "/v1/responses", json=body, headers={"authorization": f"Bearer {key}"}
                )
            ).status_code
            for key, body in (("sk-a", first), ("sk-b", second), ("sk-a", second))
        ]
    assert statuses == [200, 404, 200]
    assert len(backend.seen) == 2


OF_ANOTHER: dict[str, dict[str, Any]] = {
    "a response": {"previous_response_id": "resp_of_a"},
    "a conversation": {"conversation": "conv_of_a"},
    "a conversation's object": {"conversation": {"id": "conv_of_a"}},
    "an item": {"input": [{"type": "item_reference", "id": "msg_of_a"}]},
    "an item without a type": {"input": [{"id": "msg_of_a"}]},
    "a picture": {"input": [{"type": "image_generation_call", "id": "ig_of_a"}]},
    "a container": {"tools": [{"type": "code_interpreter", "container": "cntr_of_a"}]},
    "a shell's container": {
        "tools": [
            {
                "type": "shell",
                "environment": {"type": "container_reference", "container_id": "cntr_of_a"},
            }
        ]
    },
}
RESPONSES_PATHS = [
    *("/v1/responses", "/v1/responses/compact", "/v1/responses/input_tokens"),
    *("/responses/compact", "/openai/v1/responses/compact", "/api/v1/responses/compact"),
]


@pytest.mark.parametrize("reference", OF_ANOTHER)
@pytest.mark.parametrize("path", RESPONSES_PATHS)
async def test_request_cannot_reference_backend_state_of_another_key(
    path: str, reference: str, tmp_path: Path
) -> None:
    backend = Recorder(status=200)
    body = {"model": "fake-model:plain", "input": "Hello.", **OF_ANOTHER[reference]}
    async with before(backend.record, tmp_path, keyring=EachKey()) as client:
        answer = await client.post(path, json=body)
    assert (answer.status_code, backend.seen) == (404, [])
    assert next(iter(OF_ANOTHER[reference])) in answer.json()["error"]["param"]


async def test_key_of_a_server_with_one_key_may_reference_any_backend_state(tmp_path: Path) -> None:
    backend = Recorder(b'{"id": "resp_1", "object": "response"}', 200)
    body = {"model": "fake-model:plain", **OF_ANOTHER["an item"]}
    async with before(backend.record, tmp_path, keyring=single_key("sk-a")) as client:
        headers = {"authorization": "Bearer sk-a"}
        answer = await client.post("/v1/responses", json=body, headers=headers)
    assert (answer.status_code, len(backend.seen)) == (200, 1)


async def test_request_to_responses_compact_without_a_json_content_type_is_refused(
    tmp_path: Path,
) -> None:
    backend = Recorder(status=200)
    async with before(backend.record, tmp_path) as client:
        answer = await client.post(
            "/api/v1/responses/compact", content=b'{"previous_response_id": "resp_of_a"}'
        )
    assert (answer.status_code, backend.seen) == (400, [])


async def test_client_can_compact_a_backend_response_to_its_own_request(
    tmp_path: Path,
) -> None:
    backend = Recorder(b'{"id": "resp_of_a", "object": "response"}', 200)
    first = {
        "model": "fake-model:plain",
        "input": [
            {"role": "user", "content": "Hi."},
            {"type": "reasoning", "id": "rs_1", "summary": []},
        ],
        "tools": [{"type": "code_interpreter", "container": {"type": "auto"}}],
    }
    async with before(backend.record, tmp_path) as client:
        made = await client.post("/v1/responses", json=first)
        body = {**first, "previous_response_id": "resp_of_a"}
        compacted = await client.post("/v1/responses/compact", json=body)
    assert (made.status_code, compacted.status_code, len(backend.seen)) == (200, 200, 2)


async def test_backend_items_can_be_referenced_with_passthrough_all(tmp_path: Path) -> None:
    backend = Recorder(status=200)
    body = {"model": "fake-model:plain", **OF_ANOTHER["an item"]}
    async with before(backend.record, tmp_path, passthrough="all") as client:
        answer = await client.post("/v1/responses", json=body)
    assert (answer.status_code, len(backend.seen)) == (200, 1)
