"""What a request of Anthropic's Messages API must look like, as far as it is read."""

from collections.abc import Collection, Mapping
from typing import Any

from proxy.wire.validation import Check, anything, array, boolean, fields, having, integer, mapping, number, one_of, require, tagged, text, text_or_object, text_or_parts

_TEXT = having({"text": text})
_BASE64 = having({"media_type": text, "data": text})
_URL = having({"url": text})
_FILE = having({"file_id": text})
_IMAGE = having({"source": tagged({"base64": _BASE64, "url": _URL, "file": _FILE})})
_SEARCH_RESULT = having({"title": text, "source": text, "content": array(tagged({"text": _TEXT}))})
_DOCUMENT = having(
    {
        "source": tagged(
            {
                "base64": _BASE64,
                "text": having({"data": text}),
                "url": _URL,
                "file": _FILE,
                "content": having(
                    {"content": text_or_parts(tagged({"text": _TEXT, "image": _IMAGE}))}
                ),
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
        "content": text_or_parts(tagged({**_TOLD, "tool_reference": having({"tool_name": text})})),
    },
)
_OF_THE_USER: Mapping[str, Check] = {**_TOLD, "tool_result": _RESULT, "container_upload": _FILE}
_OF_THE_ASSISTANT: Mapping[str, Check] = {
    "text": _TEXT,
    "tool_use": having({"id": text, "name": text, "input": mapping}),
    "compaction": fields({"content": text}),
}
_SYSTEM = text_or_parts(tagged({"text": _TEXT}))
_CONTENTS: Mapping[str, Check] = {
    "user": text_or_parts(tagged(_OF_THE_USER), minimum=1),
    # Thinking, and what a server did of its own, is of many kinds, and is not read.
    "assistant": text_or_parts(tagged(_OF_THE_ASSISTANT, others=anything)),
    "system": _SYSTEM,
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
    "system": _SYSTEM,
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
    "container": text_or_object(fields({"id": text})),
    "mcp_servers": array(mapping),
    "thread": having({"type": one_of("create", "continue")}, {"previous_message_id": text}),
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
