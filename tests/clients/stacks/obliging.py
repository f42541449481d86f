"""A model that does what it is asked, for suites that come with conversations of their own.

It calls the client's tool where there is one, and keeps to the form where there is one.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from policies.prompts import TOOL_NAMES
from proxy.models.scripted import call, text_reply, tool_reply

USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}


def oblige(body: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to a request, whatever it is."""
    return {**_reply(body), "usage": USAGE}


def _reply(body: Mapping[str, Any]) -> dict[str, Any]:
    last = body["messages"][-1]
    users = [said["content"] for said in body["messages"] if said["role"] == "user"]
    words = json.dumps(users, ensure_ascii=False)
    tools = [tool["function"] for tool in body.get("tools", [])]
    theirs = [tool for tool in tools if tool["name"] not in TOOL_NAMES]
    if theirs and last["role"] != "tool":
        (tool, *_) = theirs
        return tool_reply(call(tool["name"], **_filled(tool["parameters"], words)))
    if form := body.get("response_format"):
        return text_reply(json.dumps(_in_form(form, words)))
    return text_reply("As you wish.")


def _in_form(form: Mapping[str, Any], words: str) -> dict[str, Any]:
    if form["type"] == "json_schema":
        return _filled(form["json_schema"]["schema"], words)
    return dict.fromkeys(re.findall(r"'(\w+)'", words), "as you wish")


def _filled(schema: Mapping[str, Any], words: str) -> dict[str, Any]:
    """An object of this schema, from the first number and the first quotation that were said."""
    number = int((re.findall(r"\d+", words) or ["1"])[0])
    text = (re.findall(r"'([^']+)'", words) or ["as you wish"])[0]
    properties = schema.get("properties", {})
    return {
        name: number if kind.get("type") == "integer" else text for name, kind in properties.items()
    }
