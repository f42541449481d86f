"""Failing requests: the exception class of the SDK, and the field that it names."""

import os
from typing import Any

import openai
import pytest
from chat import answer, ask
from model import NAME, Script, bash, says

HELLO = Script(says("Hello."))
LOCKED: Any = {"base_url": os.environ["LOCKED_URL"]}


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"temperature": 9}, "temperature", "decimal_above_max_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"messages": []}, "messages", "empty_array"),
        ({"messages": [{"content": "Hello."}]}, "messages[0].role", "missing_required_parameter"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"sandbox": {"steps": "all"}}, "sandbox.steps", "invalid_value"),
    ],
)
def test_error_names_the_field_with_an_invalid_value(
    client: Any, body: Any, param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, HELLO, extra_body=body)
    error = caught.value
    assert (error.status_code, error.param, error.code) == (400, param, code)
    assert error.type == "invalid_request_error"


def test_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("another")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("route", "work"),
    [
        (
            "GET /v1/chat/completions/chatcmpl-1",
            lambda c: c.chat.completions.retrieve("chatcmpl-1"),
        ),
        ("POST /v1/responses/compact", lambda c: c.responses.compact(model=NAME, input="Hello.")),
        (
            "POST /v1/responses/input_tokens",
            lambda c: c.responses.input_tokens.count(model=NAME, input="Hello."),
        ),
    ],
)
def test_unserved_route_is_not_found(client: Any, route: str, work: Any) -> None:
    with pytest.raises(openai.NotFoundError, match=f"{route} is not served with a sandbox"):
        work(client)


def test_server_with_a_key_refuses_another_key(connect: Any) -> None:
    for work in (lambda wrong: ask(wrong, HELLO), lambda wrong: wrong.files.list()):
        with pytest.raises(openai.AuthenticationError) as caught:
            work(connect(**LOCKED))
        assert (caught.value.status_code, caught.value.code) == (401, "invalid_api_key")
    right = connect(api_key=os.environ["LOCKED_KEY"], **LOCKED)
    assert answer(ask(right, Script(says("Come in.")))) == "Come in."


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, openai.BadRequestError),
        (404, openai.NotFoundError),
        (429, openai.RateLimitError),
        (500, openai.InternalServerError),
    ],
)
def test_backend_error_keeps_its_status_and_message(
    client: Any, status: int, kind: type[openai.APIStatusError]
) -> None:
    fault = {"message": "not like this", "status": status, "code": "odd", "retry_after_s": 0}
    with pytest.raises(kind, match="not like this") as caught:
        ask(client, Script({"error": fault}))
    assert (caught.value.status_code, caught.value.code) == (status, "odd")


@pytest.mark.parametrize("steps", [[], [bash("echo begun")]])
def test_failure_ends_a_stream_with_an_error(client: Any, steps: list[Any]) -> None:
    script = Script(*steps, {"error": {"message": "not like this", "status": 400, "code": "odd"}})
    with pytest.raises(openai.APIError, match="not like this") as caught:
        list(ask(client, script, stream=True))
    assert caught.value.code == "odd"
