"""Distinction of clients' utility requests from the prompts of users."""

from typing import Any

import pytest

from policies.routing import Route, choose_route
from policies.utility_requests import TEMPLATES
from tests.policies.recorded_requests import Recorded, natural_prompts, recorded_requests

RECORDED = recorded_requests()
NATURAL = natural_prompts()
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("search", "clock")]


def request_with(*contents: Any, **fields: Any) -> dict[str, Any]:
    """Return a request with messages of the user and the assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": content} for n, content in enumerate(contents)]
    return {"model": "m", "messages": messages, **fields}


def template_text(request: Recorded) -> str:
    """Return the message of a recorded request that is built from the template."""
    texts = [
        message["content"]
        if isinstance(message["content"], str)
        else "\n\n".join(part["text"] for part in message["content"])
        for message in request.body["messages"]
    ]
    return max(texts, key=len)


BY_TEMPLATE = [
    request
    for request in RECORDED
    if "x-openwebui-task" not in request.headers and request.body.get("max_tokens") != 1
]
"""Recorded requests without a marker in the headers or in `max_tokens`."""
CLOSED = [
    request
    for request in BY_TEMPLATE
    if template_text(request).rstrip().endswith(tuple(t.end for t in TEMPLATES if t.end))
]
"""Requests whose template has a fixed end. The others end in free text."""


@pytest.mark.parametrize("request_", RECORDED, ids=lambda request: request.client)
def test_recorded_utility_request_goes_to_the_backend(request_: Recorded) -> None:
    assert choose_route(request_.body, request_.headers) == Route("plain", "m", "utility")


def test_every_client_with_a_template_has_a_recorded_request() -> None:
    known = {request.client.split("-")[0] for request in RECORDED}
    named = {template.client.lower().replace(" ", "-").split("-")[0] for template in TEMPLATES}
    assert named <= known


def test_utility_request_tests_have_at_least_200_distinct_user_prompts() -> None:
    assert len(set(NATURAL)) == len(NATURAL) >= 200


@pytest.mark.parametrize(
    "fields", [{}, {"tools": TOOLS}, {"max_tokens": 8}, {"max_completion_tokens": 1}]
)
def test_prompts_of_users_get_a_sandbox(fields: dict[str, Any]) -> None:
    misrouted = [
        body
        for prompt in NATURAL
        for body in requests_with_prompt(prompt, fields)
        if choose_route(body, {}) != Route("sandbox", "m", "auto")
    ]
    assert misrouted == []


def requests_with_prompt(prompt: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return requests with the prompt as text, as parts, with an image, within a chat, and after
    system instructions."""
    parts = [{"type": "text", "text": prompt}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    instructions = {"role": "system", "content": "You are helpful. Your answers have short titles."}
    only_prompt = request_with(prompt, **fields)
    return [
        only_prompt,
        request_with(parts, **fields),
        request_with([*parts, image], **fields),
        request_with("Hello.", "Hello!", prompt, **fields),
        request_with(prompt, "Done.", "Once more.", **fields),
        {**only_prompt, "messages": [instructions, *only_prompt["messages"]]},
    ]


@pytest.mark.parametrize("request_", BY_TEMPLATE, ids=lambda request: request.client)
def test_user_who_quotes_a_template_gets_a_sandbox(request_: Recorded) -> None:
    text = template_text(request_)
    quoted = "\n".join(f"> {line}" for line in text.splitlines())
    prompts = [
        f"Shorten this prompt and test it on chats.json:\n\n{text}",
        f"```\n{text}\n```\nPort it to Jinja2 and render it.",
        f'PROMPT = """{text}"""\nHow long is PROMPT? Run it.',
        f"{quoted}\n\nWhy does the answer to it hold quotation marks? Debug titles.py.",
        f"Prompt: {text}\n\nCount its words.",
    ]
    for prompt in prompts:
        assert choose_route(request_with(prompt), {}).kind == "sandbox", prompt
        assert choose_route(request_with("Hello.", "Hello!", prompt), {}).kind == "sandbox", prompt


@pytest.mark.parametrize("request_", CLOSED, ids=lambda request: request.client)
def test_utility_template_followed_by_a_user_question_gets_a_sandbox(request_: Recorded) -> None:
    text = template_text(request_)
    prompt = f"{text}\n\nThis is my prompt. Why is it slow? Time it with the model in m.gguf."
    assert choose_route(request_with(prompt), {}).kind == "sandbox"


@pytest.mark.parametrize("request_", BY_TEMPLATE, ids=lambda request: request.client)
def test_later_turn_of_a_chat_that_began_with_a_utility_request_gets_a_sandbox(
    request_: Recorded,
) -> None:
    first_messages = request_.body["messages"]
    further_messages = [
        {"role": "assistant", "content": "Sourdough"},
        {"role": "user", "content": "Now analyse data.csv and plot it."},
    ]
    fields = {"messages": [*first_messages, *further_messages]}
    assert choose_route({"model": "m", **fields}, {}).kind == "sandbox"


@pytest.mark.parametrize("request_", BY_TEMPLATE, ids=lambda request: request.client)
def test_template_prompt_with_several_tools_gets_a_sandbox_unless_it_is_a_codex_title(
    request_: Recorded,
) -> None:
    with_tools = {**request_.body, "tools": TOOLS, "tool_choice": "auto"}
    expected = "plain" if request_.client == "codex-title" else "sandbox"
    assert choose_route(with_tools, {}).kind == expected


@pytest.mark.parametrize("limit", [1, 8])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_low_token_limit_alone_does_not_make_a_request_a_utility_request(
    field: str, limit: int
) -> None:
    assert choose_route(request_with("Is 91 prime? Check.", **{field: limit}), {}).kind == "sandbox"


@pytest.mark.parametrize("task", ["", " ", "{{TASK}}"])
def test_empty_task_header_does_not_make_a_request_a_utility_request(task: str) -> None:
    assert (
        choose_route(request_with("Plot data.csv."), {"x-openwebui-task": task}).kind == "sandbox"
    )


@pytest.mark.parametrize("messages", [None, [], [None], [{"content": [{"type": "text"}]}]])
def test_malformed_messages_are_no_utility_request(messages: Any) -> None:
    assert choose_route({"model": "m", "messages": messages}, {}).kind == "sandbox"
