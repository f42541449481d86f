"""What the backend keeps for all its clients, who are one to it: no key reaches another's."""

from pathlib import Path

import pytest

from proxy.keys import Key, Keyring
from tests.clients.test_passthrough import Recorder, before

KEPT = [
    *("batches", "threads", "assistants", "vector_stores", "fine_tuning/jobs", "uploads", "evals"),
    *("realtime/client_secrets", "videos", "skills", "prompts", "chat/completions"),
]


@pytest.mark.parametrize("kept", KEPT)
async def test_no_key_reaches_what_another_keeps_at_the_backend(kept: str, tmp_path: Path) -> None:
    """As it was seen: B listed, read and deleted what A had made, all with the operator's key."""
    backend = Recorder(status=200)
    keyring = Keyring([("sk-a", Key("a")), ("sk-b", Key("b"))])
    plain = {"model": "fake-model:plain"}
    async with before(backend.record, tmp_path, keyring=keyring) as client:
        answers = [
            await client.request(
                method, f"/v1/{path}", headers={"authorization": f"Bearer {key}"}, json=body
            )
            for key, method, path, body in (
                ("sk-a", "POST", f"{kept}/made_1", {}),
                ("sk-b", "GET", kept, plain),
                ("sk-b", "GET", f"{kept}/made_1", plain),
                ("sk-b", "DELETE", f"{kept}/made_1", plain),
            )
        ]
    assert backend.seen == []
    assert {answer.status_code for answer in answers} <= {403, 404, 405}


async def test_what_is_refused_for_being_kept_says_how_to_open_it(tmp_path: Path) -> None:
    backend = Recorder()
    async with before(backend.record, tmp_path) as client:
        answer = await client.get("/v1/batches")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (403, "path_keeps_state")
    assert "backend.passthrough: all" in error["message"]


async def test_a_backends_response_goes_on_for_its_client_alone(tmp_path: Path) -> None:
    """Who knows the id of another's response cannot go on with it through `:plain`."""
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
