"""Chat parameters, and the ways in which the SDK can read the answer."""

import json
from typing import Any

import openai
import pytest
from chat import answer, ask, chat_request, sandbox_of
from model import NAME, Script, bash, says, submits
from pydantic import BaseModel

EVERY_CALL: dict[str, Any] = {
    "seed": 7,
    "temperature": 0.5,
    "reasoning_effort": "low",
    "metadata": {"team": "a"},
    "service_tier": "flex",
    "user": "ada",
}
UNKNOWN: dict[str, Any] = {"top_k": 20, "of_tomorrow": {"deep": [1]}}
VISIBLE_ANSWER: dict[str, Any] = {
    "stop": ["\n\n"],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"7": -100},
    "max_completion_tokens": 99,
}
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
STEP = {**bash("echo made > output/a.txt"), "usage": USAGE}
DONE = {**submits("Made."), "usage": USAGE}


class Place(BaseModel):
    city: str
    degrees: int


def parsed(client: Any, script: Script, streamed: bool) -> Any:
    if not streamed:
        return client.chat.completions.parse(**chat_request(script), response_format=Place)
    with client.chat.completions.stream(**chat_request(script), response_format=Place) as stream:
        return stream.get_final_completion()


def without(body: dict[str, Any]) -> dict[str, Any]:
    others = ("model", "messages", "tools", "stream", "stream_options")
    return {name: body[name] for name in body if name not in others}


def test_general_parameters_reach_each_call_and_answer_parameters_only_the_last_call(
    client: Any,
) -> None:
    script = Script(bash("echo 42"), submits("It is 42."), says("42."))
    done = ask(client, script, **EVERY_CALL, **VISIBLE_ANSWER, extra_body=UNKNOWN)
    # Each call may end in the answer, and needs room for reasoning and tool arguments.
    every = {"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4096}
    bare = {**EVERY_CALL, **UNKNOWN, **every}
    sent = [without(body) for body in script.requests()]
    assert (answer(done), sent) == ("42.", [bare, bare, {**VISIBLE_ANSWER, **bare}])


def test_log_probabilities_of_the_answer_are_returned(client: Any) -> None:
    token = {"token": "42", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "42"},
        "finish_reason": "stop",
        "logprobs": {"content": [token], "refusal": None},
    }
    script = Script(submits("42."), {"whole": {"choices": [choice]}})
    (made,) = ask(client, script, logprobs=True).choices
    assert [(each.token, each.logprob) for each in made.logprobs.content] == [("42", -0.5)]


def test_each_choice_has_its_own_sandbox_and_files(client: Any) -> None:
    done = ask(client, Script(STEP, DONE), n=2)
    type(done).model_validate(done.to_dict())
    assert [(each.index, each.message.content) for each in done.choices] == [
        (0, "Made."),
        (1, "Made."),
    ]
    first, second = sandbox_of(done), done.choices[1].model_extra["sandbox"]
    assert first["container_id"] != second["container_id"]
    assert [len(each["files"]) for each in (first, second)] == [1, 1]
    assert (done.usage.prompt_tokens, done.usage.total_tokens) == (40, 60)


def test_stream_ends_with_requested_usage(client: Any) -> None:
    chunks = list(
        ask(client, Script(STEP, DONE), stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks:
        type(chunk).model_validate(chunk.to_dict())
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 30)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Made."


@pytest.mark.parametrize("streamed", [False, True])
def test_answer_that_violates_its_schema_is_requested_again(client: Any, streamed: bool) -> None:
    script = Script(
        bash("true"), submits("In Bonn."), says("In Bonn."), says('{"city": "Bonn", "degrees": 21}')
    )
    done = parsed(client, script, streamed)
    assert done.choices[0].message.parsed == Place(city="Bonn", degrees=21)
    forms = [body.get("response_format", {}).get("json_schema", {}) for body in script.requests()]
    assert [form.get("strict") for form in forms] == [None, None, True, True]


@pytest.mark.parametrize("streamed", [False, True])
def test_answer_that_never_matches_its_schema_is_not_parsed(client: Any, streamed: bool) -> None:
    script = Script(submits("In Bonn."), *[says('{"city": "Bonn"}')] * 2)
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        parsed(client, script, streamed)
    assert answer(caught.value.completion) == '{"city": "Bonn"}'
    if not streamed:  # the stream helper drops fields outside the choices
        (warning,) = sandbox_of(caught.value.completion)["warnings"]
        assert warning["code"] == "response_format_violated"


@pytest.mark.parametrize("streamed", [False, True])
def test_model_refusal_reaches_the_client(client: Any, streamed: bool) -> None:
    refusal = {"role": "assistant", "content": None, "refusal": "I will not."}
    message = parsed(client, Script({"message": refusal}), streamed).choices[0].message
    assert (message.refusal, message.parsed) == ("I will not.", None)


def test_raw_response_has_sandbox_headers(client: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(**chat_request(Script(STEP, DONE)))
    done = raw.parse()
    assert answer(done) == "Made."
    assert raw.headers["x-sandbox-container"] == sandbox_of(done)["container_id"]
    assert f"chatcmpl-{raw.headers['x-sandbox-run']}" == done.id


def test_streaming_response_is_read_line_by_line(client: Any) -> None:
    create = client.chat.completions.with_streaming_response.create
    with create(**chat_request(Script(STEP, DONE)), stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Made."


def test_plain_model_is_answered_without_a_sandbox(client: Any) -> None:
    script = Script(says("Hello."))
    plain = {**chat_request(script), "model": f"{NAME}:plain"}
    done = client.chat.completions.create(**plain, extra_body=UNKNOWN)
    assert answer(done) == "Hello."
    assert script.requests() == [{**chat_request(script), **UNKNOWN}]
