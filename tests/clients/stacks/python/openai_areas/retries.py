"""Retries, idempotency keys, timeouts and detached runs."""

import uuid
from typing import Any

import openai
import pytest
from chat import answer, ask, sandbox_of
from model import NAME, Script, bash, held, says, submits

FAULT: Any = {"error": {"message": "the engine died", "status": 500}}
ATTEMPTS = 3
"""Number of attempts that the proxy makes at a failing backend."""


def key() -> dict[str, Any]:
    return {"extra_headers": {"Idempotency-Key": uuid.uuid4().hex}}


def test_sdk_retry_joins_its_abandoned_run(connect: Any) -> None:
    script = Script(bash("echo once"), held(submits("Once.")))

    def on_request(request: Any) -> None:
        if request.headers["x-stainless-retry-count"] != "0":
            request.extensions["timeout"] = dict.fromkeys(("connect", "read", "write", "pool"))
            script.release()

    client = connect(max_retries=1, timeout=0.5, on_request=on_request)
    # The announced read timeout; the client itself disconnects after half a second.
    done = ask(client, script, extra_headers={"x-stainless-read-timeout": "600"})
    assert (answer(done), len(script.requests())) == ("Once.", 2)


def test_requests_with_one_idempotency_key_get_one_run_and_one_answer(client: Any) -> None:
    script, once = Script(bash("echo once"), submits("Once.")), key()
    first = ask(client, script, **once)
    assert ask(client, script, **once) == first
    assert len(script.requests()) == 2


def test_stored_answer_of_an_idempotency_key_can_be_streamed(client: Any) -> None:
    script, once = Script(bash("echo once"), submits("Once.")), key()
    first = ask(client, script, **once)
    chunks = list(ask(client, script, stream=True, **once))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Once."
    assert {chunk.id for chunk in chunks} == {first.id}
    assert len(script.requests()) == 2


def test_requests_with_one_idempotency_key_create_one_response(client: Any) -> None:
    script, once = Script(bash("echo once"), submits("Once.")), key()
    first = client.responses.create(model=NAME, input=script.prompt, **once)
    second = client.responses.create(model=NAME, input=script.prompt, **once)
    assert (second, second.output_text, len(script.requests())) == (first, "Once.", 2)


def test_idempotency_key_of_another_request_is_refused(client: Any) -> None:
    once = key()
    ask(client, Script(says("One.")), **once)
    with pytest.raises(openai.UnprocessableEntityError):
        ask(client, Script(says("Two.")), **once)


def test_sdk_does_not_retry_an_error_that_the_proxy_has_retried(connect: Any) -> None:
    script = Script(FAULT)
    with pytest.raises(openai.InternalServerError, match="the engine died"):
        ask(connect(max_retries=1), script)
    assert len(script.requests()) == ATTEMPTS


def test_sdk_does_not_retry_a_run_that_failed_after_a_reply(connect: Any) -> None:
    script = Script(bash("echo once"), FAULT)
    with pytest.raises(openai.InternalServerError) as caught:
        ask(connect(max_retries=1), script)
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert len(script.requests()) == 1 + ATTEMPTS


def test_sdk_timeout_is_the_deadline_of_the_run(connect: Any) -> None:
    script = Script(bash("echo on"), held(says("About 42.")))
    done = ask(connect(timeout=4), script)
    assert (answer(done), sandbox_of(done)["stop_reason"]) == ("About 42.", "deadline")


def test_detached_run_continues_without_its_client(client: Any) -> None:
    script = Script(bash("echo on"), held(submits("To the end.")))
    leaving: Any = {"extra_body": {"sandbox": {"on_disconnect": "detach"}}}
    stream = ask(client, script, stream=True, **leaving)
    run_id = next(iter(stream)).id.removeprefix("chatcmpl-")
    script.requests(2)
    stream.close()
    script.release()
    while (run := client.get(f"/runs/{run_id}", cast_to=object))["status"] == "running":
        pass
    assert run["completion"]["choices"][0]["message"]["content"] == "To the end."
