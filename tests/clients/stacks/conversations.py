"""The prompts of the client programs, and the scripted model that answers them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from policies.prompts import TOOL_NAMES
from proxy.models.scripted import call, text_reply, tool_reply
from tests.fakes.backend import Frames, Item, Refusal, chunk, frames

PROMPTS = {
    "question": "What is six times seven?",
    "work": "Squares as a table and a dot as a picture, please.",
    "tools": "How warm is it in Bonn?",
    "shape": "Where is it 21 degrees warm? Keep to the form.",
    "refused": "Say what you refuse.",
    "broken": "Break.",
    "cut": "Think, then break.",
    "unavailable": "What does the computer say?",
}
"""The prompt of each scenario."""
SHARED_SCENARIOS = ("question", "work", "refused", "broken", "cut", "unavailable")
"""Scenarios that every variant of a client runs; the others have functions of their own."""

ANSWER = "Six times seven is forty-two."
TABLE = b"n,square\n1,1\n2,4\n"
DOT = b"GIF89a;"
COMMAND = (
    r"printf 'n,square\n1,1\n2,4\n' > output/table.csv; "
    "printf 'GIF89a;' > output/dot.gif; echo made"
)
THOUGHT = "A table, then."
WARMTH = "It is 21 degrees warm in Bonn."
PLACE = {"city": "Bonn", "degrees": 21}
"""The answer in the requested shape."""
REFUSAL = "no such grammar"
FAULT = "the engine died"
UNAVAILABLE = "no engine answers"
"""The pool's error when it cannot lease a sandbox."""

USAGE = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
"""Usage of each model call."""


def answer(body: Mapping[str, Any]) -> Item:
    """Return the model's reply for the scenario that the messages belong to."""
    prompt, later_messages = _last_prompt(body["messages"])
    scenario = next(name for name, words in PROMPTS.items() if words in prompt)
    match scenario:
        case "question":
            return _with_usage(text_reply(ANSWER))
        case "work":
            return _with_usage(_work(later_messages))
        case "tools":
            return _with_usage(_tools(later_messages, body))
        case "shape":
            return _with_usage(_shape(body))
        case "unavailable":
            return tool_reply(call("execute_bash", command="true"))
    return _fault(scenario, body)


def _last_prompt(messages: Sequence[Mapping[str, Any]]) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """Return the last user message that is a scenario's prompt, and the messages after it."""
    for index in reversed(range(len(messages))):
        text = json.dumps(messages[index].get("content"))
        if messages[index]["role"] == "user" and any(words in text for words in PROMPTS.values()):
            return text, messages[index + 1 :]
    raise AssertionError("no user message contains a prompt of a scenario")


def _work(later_messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not later_messages:
        return {"reasoning": THOUGHT, **tool_reply(call("execute_bash", command=COMMAND))}
    links = "[table.csv](/testbed/output/table.csv) and [dot.gif](sandbox:/testbed/output/dot.gif)"
    return tool_reply(call("submit", answer=f"Here: {links}."))


def _tools(later_messages: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> dict[str, Any]:
    """Call a sandbox tool, then the client's tool, then answer."""
    if any("21 degrees" in json.dumps(message.get("content")) for message in later_messages):
        # smolagents accepts an answer only from its final_answer tool.
        own = "final_answer" in _names(body)
        return tool_reply(call("final_answer" if own else "submit", answer=WARMTH))
    if not later_messages:
        return tool_reply(call("execute_bash", command="echo looking"))
    return tool_reply(call("warmth", city="Bonn"))


def _shape(body: Mapping[str, Any]) -> dict[str, Any]:
    """Call the client's tool for the requested shape, or answer with JSON if the format is set."""
    if theirs := [name for name in _names(body) if name not in TOOL_NAMES]:
        return tool_reply(call(theirs[0], **PLACE))
    return text_reply(json.dumps(PLACE) if "response_format" in body else "In Bonn.")


def _names(body: Mapping[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in body.get("tools", [])]


def _fault(scenario: str, body: Mapping[str, Any]) -> Item:
    if scenario == "refused":
        return Refusal(400, REFUSAL, code="bad_grammar")
    if scenario == "cut" and body.get("stream"):
        fault = {"error": {"message": FAULT, "type": "InternalServerError", "code": 500}}
        return Frames(frames(chunk({"reasoning": "Let me see."}), fault, "[DONE]"))
    return Refusal(500, FAULT, "InternalServerError")


def _with_usage(reply: Mapping[str, Any]) -> dict[str, Any]:
    return {**reply, "usage": USAGE}
