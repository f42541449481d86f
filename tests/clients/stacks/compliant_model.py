"""A model for third-party test suites: it calls the client's tools and follows the requested
format.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from policies.prompts import TOOL_NAMES
from proxy.models.scripted import call, text_reply, tool_reply

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def reply_to(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to any request."""
    return {**_reply(body), "usage": USAGE}


def _reply(body: Mapping[str, Any]) -> dict[str, Any]:
    last = body["messages"][-1]
    users = [message["content"] for message in body["messages"] if message["role"] == "user"]
    words = json.dumps(users, ensure_ascii=False)
    tools = [tool["function"] for tool in body.get("tools", [])]
    client_tools = [tool for tool in tools if tool["name"] not in TOOL_NAMES]
    if client_tools and last["role"] != "tool":
        (tool, *_) = client_tools
        return tool_reply(call(tool["name"], **_filled(tool["parameters"], words)))
    if form := body.get("response_format"):
        return text_reply(json.dumps(_formatted(form, words)))
    return text_reply("As you wish.")


def _formatted(form: Mapping[str, Any], words: str) -> dict[str, Any]:
    if form["type"] == "json_schema":
        return _filled(form["json_schema"]["schema"], words)
    return dict.fromkeys(re.findall(r"'(\w+)'", words), "as you wish")


def _filled(schema: Mapping[str, Any], words: str) -> dict[str, Any]:
    """Return an object of the schema, filled with the first number and the first quotation of the
    prompt.
    """
    number = int((re.findall(r"\d+", words) or ["1"])[0])
    text = (re.findall(r"'([^']+)'", words) or ["as you wish"])[0]
    properties = schema.get("properties", {})
    return {
        name: number if kind.get("type") == "integer" else text for name, kind in properties.items()
    }
