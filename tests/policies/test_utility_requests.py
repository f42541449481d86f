"""The requests that clients make for themselves are told from the questions of people."""

from typing import Any

import pytest

from policies.routing import Route, choose_route
from policies.utility_requests import TEMPLATES
from tests.policies.recorded_requests import Recorded, natural_prompts, recorded_requests

RECORDED = recorded_requests()
NATURAL = natural_prompts()
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("search", "clock")]


def said(*contents: Any, **fields: Any) -> dict[str, Any]:
    """A request whose messages are the user's and the model's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": each} for n, each in enumerate(contents)]
    return {"model": "m", "messages": messages, **fields}


def template_text(request: Recorded) -> str:
    """The message of a recorded request that is made from the template."""
    texts = [
        each["content"]
        if isinstance(each["content"], str)
        else "\n\n".join(part["text"] for part in each["content"])
        for each in request.body["messages"]
    ]
    return max(texts, key=len)


BY_TEMPLATE = [
    each
    for each in RECORDED
    if "x-openwebui-task" not in each.headers and each.body.get("max_tokens") != 1
]
"""The others are told by a header, or by a single word."""
CLOSED = [
    each
    for each in BY_TEMPLATE
    if template_text(each).rstrip().endswith(tuple(t.end for t in TEMPLATES if t.end))
]
"""The others end in free text, which may be anything, a question too."""


@pytest.mark.parametrize("request_", RECORDED, ids=lambda each: each.client)
def test_recorded_utility_request_goes_to_the_backend(request_: Recorded) -> None:
    assert choose_route(request_.body, request_.headers) == Route("plain", "m", "utility")


def test_every_client_with_a_template_has_a_recorded_request() -> None:
    known = {each.client.split("-")[0] for each in RECORDED}
    named = {template.client.lower().replace(" ", "-").split("-")[0] for template in TEMPLATES}
    assert named <= known


def test_natural_prompts_are_numerous() -> None:
    assert len(set(NATURAL)) == len(NATURAL) >= 200


@pytest.mark.parametrize(
    "fields", [{}, {"tools": TOOLS}, {"max_tokens": 8}, {"max_completion_tokens": 1}]
)
def test_natural_prompts_get_a_sandbox(fields: dict[str, Any]) -> None:
    wrong = [
        body
        for prompt in NATURAL
        for body in shapes(prompt, fields)
        if choose_route(body, {}) != Route("sandbox", "m", "auto")
    ]
    assert wrong == []


def shapes(prompt: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """The prompt as text, in parts, with a picture, in the midst of a chat, beside instructions."""
    parts = [{"type": "text", "text": prompt}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    instructions = {"role": "system", "content": "You are helpful. Your answers have short titles."}
    alone = said(prompt, **fields)
    return [
        alone,
        said(parts, **fields),
        said([*parts, image], **fields),
        said("Hello.", "Hello!", prompt, **fields),
        said(prompt, "Done.", "Once more.", **fields),
        {**alone, "messages": [instructions, *alone["messages"]]},
    ]


@pytest.mark.parametrize("request_", BY_TEMPLATE, ids=lambda each: each.client)
def test_template_that_is_quoted_gets_a_sandbox(request_: Recorded) -> None:
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
        assert choose_route(said(prompt), {}).kind == "sandbox", prompt
        assert choose_route(said("Hello.", "Hello!", prompt), {}).kind == "sandbox", prompt


@pytest.mark.parametrize("request_", CLOSED, ids=lambda each: each.client)
def test_template_that_a_question_follows_gets_a_sandbox(request_: Recorded) -> None:
    text = template_text(request_)
    prompt = f"{text}\n\nThis is my prompt. Why is it slow? Time it with the model in m.gguf."
    assert choose_route(said(prompt), {}).kind == "sandbox"


@pytest.mark.parametrize("request_", BY_TEMPLATE, ids=lambda each: each.client)
def test_chat_that_began_with_a_template_has_its_sandbox(request_: Recorded) -> None:
    begun = request_.body["messages"]
    work = [
        {"role": "assistant", "content": "Sourdough"},
        {"role": "user", "content": "Now analyse data.csv and plot it."},
    ]
    fields = {"messages": [*begun, *work]}
    assert choose_route({"model": "m", **fields}, {}).kind == "sandbox"


@pytest.mark.parametrize("request_", BY_TEMPLATE, ids=lambda each: each.client)
def test_template_beside_several_tools_gets_a_sandbox(request_: Recorded) -> None:
    with_tools = {**request_.body, "tools": TOOLS, "tool_choice": "auto"}
    expected = "plain" if request_.client == "codex-title" else "sandbox"
    assert choose_route(with_tools, {}).kind == expected


@pytest.mark.parametrize("limit", [1, 8])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_few_tokens_alone_do_not_make_a_utility_request(field: str, limit: int) -> None:
    assert choose_route(said("Is 91 prime? Check.", **{field: limit}), {}).kind == "sandbox"


@pytest.mark.parametrize("task", ["", " ", "{{TASK}}"])
def test_empty_task_header_does_not_make_a_utility_request(task: str) -> None:
    assert choose_route(said("Plot data.csv."), {"x-openwebui-task": task}).kind == "sandbox"


@pytest.mark.parametrize("messages", [None, [], [None], [{"content": [{"type": "text"}]}]])
def test_malformed_messages_are_no_utility_request(messages: Any) -> None:
    assert choose_route({"model": "m", "messages": messages}, {}).kind == "sandbox"
