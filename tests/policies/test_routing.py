"""Which requests get a computer."""

from typing import Any

import pytest

from policies.profile import Profile
from policies.routing import Route, route


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [{"type": "function", "function": {"name": "lookup"}}], "tool_choice": "auto"},
        {"tool_choice": {"type": "function", "function": {"name": "lookup"}}},
        {"tool_choice": None, "functions": []},
        {"functions": [{"name": "f"}], "function_call": "auto"},
        {"modalities": ["text"], "input_ids": None, "add_generation_prompt": True},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_a_request_gets_a_computer(fields: dict[str, Any]) -> None:
    assert route({"model": "qwen3", **fields}, {}) == Route("sandbox", "qwen3", "computer: auto")


@pytest.mark.parametrize(
    ("body", "model", "reason"),
    [
        ({"model": "qwen3:plain"}, "qwen3", "the model's name ends in :plain"),
        ({"model": "a:b:plain"}, "a:b", "the model's name ends in :plain"),
        ({"model": "qwen3:plain:plain"}, "qwen3:plain", "the model's name ends in :plain"),
        ({"model": "m", "tool_choice": "none"}, "m", "tool_choice forbids tools"),
        ({"model": "m", "function_call": "none"}, "m", "tool_choice forbids tools"),
        ({"model": "m", "modalities": ["text", "audio"]}, "m", "the answer is not text alone"),
        (
            {"model": "m", "continue_final_message": True},
            "m",
            "it continues a message that is begun",
        ),
        (
            {"model": "m", "add_generation_prompt": False},
            "m",
            "it continues a message that is begun",
        ),
        ({"model": "m", "input_ids": [1]}, "m", "it belongs to one call of one server"),
        ({"model": "m", "bootstrap_room": 0}, "m", "it belongs to one call of one server"),
    ],
)
def test_a_request_that_cannot_or_will_not_use_tools_goes_straight_on(
    body: dict[str, Any], model: str, reason: str
) -> None:
    assert route(body, {}) == Route("plain", model, reason)


@pytest.mark.parametrize("model", ["plain", "qwen3:plainer", "qwen3:PLAIN", ":plain/qwen3"])
def test_only_the_whole_suffix_counts(model: str) -> None:
    assert route({"model": model}, {}).kind == "sandbox"


UTILITY = "a chat UI asks for itself"
TITLE = "Make a concise title of 3-5 words for the chat."
OPEN_WEBUI_TITLE = f"""### Task:
{TITLE}
### Chat History:
<chat_history>
USER: hello
</chat_history>"""
OPEN_WEBUI_PROMPTS = [
    "Generate a concise title summarizing the chat history.",
    "Generate 1-3 broad tags categorizing the main themes of the chat history.",
    "Predict 3-5 useful messages this user might naturally send next to advance their objective.",
    "Suggest 3-5 relevant follow-up questions that the user might naturally ask next.",
    "Generate a detailed prompt for am image generation task based on the given language.",
    "Analyze the chat history to determine the necessity of generating search queries.",
    "You are an autocompletion system. Continue the text in `<text>`.",
]
"""How versions up to 0.12 begin, each as it is spelt."""
OPEN_WEBUI_WORK = [
    "### Task:\nSummarize the conversation history that will be compacted out of the context.",
    "Your task is to reflect the speaker's likely facial expression through a fitting emoji.",
    "You have been provided with a set of responses from various models to the latest query.",
]
CLAUDE_CODE_TITLE = """x-anthropic-billing-header: cc_version=2.1.197.db9; cc_entrypoint=cli;

You are Claude Code, Anthropic's official CLI for Claude.

Generate a concise, sentence-case title (3-7 words) that captures the main topic or goal of this \
coding session."""
OPEN_WEBUI_ANSWER = """### Task:
Answer the user's query from the context.
<context>titles and tags</context>"""


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": text}]}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (said("Anything."), {"x-openwebui-task": "tags_generation"}),
        (said(OPEN_WEBUI_TITLE), {}),
        (said(OPEN_WEBUI_TITLE.replace("title", "list of tags")), {}),
        *((said(OPEN_WEBUI_TITLE.replace(TITLE, each)), {}) for each in OPEN_WEBUI_PROMPTS),
        *((said(each), {}) for each in OPEN_WEBUI_WORK),
        (said("Give a concise, 5-word-or-less title for the conversation."), {}),
        (said("Write a short title for this chat", "system"), {}),
        (said(CLAUDE_CODE_TITLE, "system"), {}),
        ({**said("Say OK."), "max_tokens": 1}, {}),
        ({**said("Say OK."), "max_completion_tokens": 8}, {}),
    ],
)
def test_what_a_chat_ui_asks_for_itself_goes_straight_on(
    body: dict[str, Any], headers: dict[str, str]
) -> None:
    assert route(body, headers) == Route("plain", "m", UTILITY)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (said("Anything."), {"x-openwebui-task": ""}),
        (said("Anything."), {"x-openwebui-task": "{{TASK}}"}),
        (said(OPEN_WEBUI_ANSWER), {}),
        (said(OPEN_WEBUI_ANSWER + "<chat_history>"), {}),
        (said("Plot the sales. " * 30 + "Then write a short title for the chat."), {}),
        ({**said("Write a short title for this chat"), "tools": [{"type": "function"}]}, {}),
        ({**said("Count."), "max_tokens": 9, "max_completion_tokens": None}, {}),
        ({"model": "m", "messages": [None, {"content": [{"type": "text", "text": "x"}]}]}, {}),
    ],
)
def test_what_a_user_asks_does_not(body: dict[str, Any], headers: dict[str, str]) -> None:
    assert route(body, headers).kind == "sandbox"


def test_who_may_not_have_a_computer_goes_straight_on() -> None:
    never = Profile(computer="never")
    assert route({"model": "m", "tools": [{}]}, {}, never) == Route("plain", "m", "computer: never")


@pytest.mark.parametrize(
    "fields", [{}, {"tool_choice": "none"}, {"max_tokens": 1}, {"tools": [{}]}]
)
def test_who_must_have_one_gets_it_for_whatever_is_asked(fields: dict[str, Any]) -> None:
    always = Profile(computer="always", weak_models=("m",))
    assert route({"model": "m", **fields}, {}, always) == Route("sandbox", "m", "computer: always")


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        ("m:plain", {}, "the model's name ends in :plain"),
        ("m", {"modalities": ["text", "audio"]}, "the answer is not text alone"),
    ],
)
def test_what_cannot_be_answered_with_one_is_refused_then(
    model: str, fields: dict[str, Any], reason: str
) -> None:
    always = Profile(computer="always")
    assert route({"model": model, **fields}, {}, always) == Route("refused", "m", reason)


@pytest.mark.parametrize(
    ("model", "kind"), [("Qwen3-4B", "plain"), ("Qwen3-4B-FP8", "plain"), ("Qwen3-40B", "sandbox")]
)
def test_a_model_that_is_too_weak_for_it_answers_without(model: str, kind: str) -> None:
    profile = Profile(weak_models=("Qwen3-4B", "Qwen3-4B-*"))
    assert route({"model": model}, {}, profile).kind == kind
