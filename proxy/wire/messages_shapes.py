"""What a request of Anthropic's Messages API must look like, as far as it is read."""

from collections.abc import Collection, Mapping
from typing import Any

from proxy.wire.shapes import (
    Check,
    anything,
    array,
    boolean,
    either,
    fields,
    integer,
    mapping,
    not_among,
    number,
    one_of,
    require,
    text,
)


def tagged(kinds: Mapping[str, Check]) -> Check:
    """An object whose `type` says what else it must have."""

    def check(value: Any, param: str) -> None:
        mapping(value, param)
        require(value, "type", f"{param}.type")
        text(value["type"], f"{param}.type")
        if value["type"] not in kinds:
            raise not_among(value["type"], kinds, f"{param}.type")
        kinds[value["type"]](value, param)

    return check


def having(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """An object in which null does not stand for what must be there."""
    others = fields(optional or {})

    def check(value: Any, param: str) -> None:
        others(value, param)
        for name, of in required.items():
            require(value, name, f"{param}.{name}")
            of(value[name], f"{param}.{name}")

    return check


_TEXT = having({"text": text})
_BASE64 = having({"media_type": text, "data": text})
_URL = having({"url": text})
_FILE = having({"file_id": text})
_IMAGE = having({"source": tagged({"base64": _BASE64, "url": _URL, "file": _FILE})})
_SEARCH_RESULT = having({"title": text, "source": text, "content": array(tagged({"text": _TEXT}))})
_CONTENT_SOURCE = either(
    "a string or array of objects",
    str,
    list,
    checks={list: array(tagged({"text": _TEXT, "image": _IMAGE}))},
)
_DOCUMENT = having(
    {
        "source": tagged(
            {
                "base64": _BASE64,
                "text": having({"data": text}),
                "url": _URL,
                "file": _FILE,
                "content": having({"content": _CONTENT_SOURCE}),
            }
        )
    },
    {"title": text, "context": text},
)
_TOLD: Mapping[str, Check] = {
    "text": _TEXT,
    "image": _IMAGE,
    "document": _DOCUMENT,
    "search_result": _SEARCH_RESULT,
}
_RESULT = having(
    {"tool_use_id": text},
    {
        "is_error": boolean,
        "content": either(
            "a string or array of objects",
            str,
            list,
            checks={list: array(tagged({**_TOLD, "tool_reference": having({"tool_name": text})}))},
        ),
    },
)
_OF_THE_USER: Mapping[str, Check] = {**_TOLD, "tool_result": _RESULT, "container_upload": _FILE}
_OF_THE_ASSISTANT: Mapping[str, Check] = {
    "text": _TEXT,
    "tool_use": having({"id": text, "name": text, "input": mapping}),
    "compaction": fields({"content": text}),
}


def _assistant_block(value: Any, param: str) -> None:
    """Thinking, and what a server did of its own, is of many kinds, and is not read."""
    mapping(value, param)
    require(value, "type", f"{param}.type")
    text(value["type"], f"{param}.type")
    _OF_THE_ASSISTANT.get(value["type"], anything)(value, param)


def _content(of: Check, minimum: int = 0) -> Check:
    blocks = array(of, minimum=minimum)
    return either("a string or array of objects", str, list, checks={list: blocks})


_CONTENTS: Mapping[str, Check] = {
    "user": _content(tagged(_OF_THE_USER), minimum=1),
    "assistant": _content(_assistant_block),
    "system": _content(tagged({"text": _TEXT})),
}


def message(value: Any, param: str) -> None:
    """One turn."""
    mapping(value, param)
    require(value, "role", f"{param}.role")
    one_of(*_CONTENTS)(value["role"], f"{param}.role")
    require(value, "content", f"{param}.content")
    _CONTENTS[value["role"]](value["content"], f"{param}.content")


_THINKING = tagged(
    {
        "enabled": fields({"budget_tokens": integer(1), "display": text}),
        "adaptive": fields({"display": text}),
        "between_tools": anything,
        "disabled": anything,
    }
)
_PARALLEL = fields({"disable_parallel_tool_use": boolean})
_TOOL_CHOICE = tagged(
    {
        "auto": _PARALLEL,
        "any": _PARALLEL,
        "tool": having({"name": text}, {"disable_parallel_tool_use": boolean}),
        "none": anything,
    }
)
_FORMAT = tagged({"json_schema": having({"schema": mapping})})
_EFFORTS = one_of("low", "medium", "high", "xhigh", "max")
FIELDS: Mapping[str, Check] = {
    "model": text,
    "max_tokens": integer(1),
    "messages": array(message, minimum=1),
    "system": _content(tagged({"text": _TEXT})),
    "stop_sequences": array(text),
    "stream": boolean,
    "temperature": number(0, 1),
    "top_p": number(0, 1),
    "top_k": integer(0),
    "metadata": fields({"user_id": text}),
    "service_tier": one_of("auto", "standard_only"),
    "thinking": _THINKING,
    "tool_choice": _TOOL_CHOICE,
    "tools": array(mapping),
    "output_config": fields({"effort": _EFFORTS, "format": _FORMAT}),
    "output_format": _FORMAT,
    "container": either("a string or an object", str, dict, checks={dict: fields({"id": text})}),
    "mcp_servers": array(mapping),
    "thread": fields(
        {"type": one_of("create", "continue"), "previous_message_id": text}, required=["type"]
    ),
    "compaction": mapping,
    "sandbox": mapping,
}


def check_fields(body: Mapping[str, Any], required: Collection[str]) -> None:
    """Raise BadRequestError for the first field that is missing or not what it may be."""
    for name in required:
        require(body, name, name)
    for name, of in FIELDS.items():
        if body.get(name) is not None or name in required:
            of(body[name], name)
