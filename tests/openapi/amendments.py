"""Differences between OpenAI's description and this server or OpenAI itself, with reasons."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Amendment:
    """One change to the description, and its reason."""

    at: str
    change: Mapping[str, Any]
    """The fields to replace. None removes a field."""
    why: str


_SCHEMA = "components/schemas"
_WORDS = "the description says so, in words"
_NAME = {"pattern": "^[a-zA-Z0-9_-]{1,64}$"}
_LISTS = {"containers": 100, "containers/{container_id}/files": 100, "files": 10_000}
_TOOLS = ("FunctionTool", "CustomToolParam", "FunctionShellToolParam", "CodeInterpreterTool")

AMENDMENTS = (
    Amendment(
        f"{_SCHEMA}/OpenAIFile/properties/purpose",
        {"enum": ["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]},
        "a file may be uploaded for 'evals', so it must be told of too",
    ),
    Amendment(
        "paths/~files~{file_id}~content/get/responses/200",
        {"content": None},
        "a file comes as what it is, not as a string in JSON",
    ),
    Amendment(
        f"{_SCHEMA}/CreateFileRequest",
        {"additionalProperties": None},
        "fields that are not known are no reason to refuse a file",
    ),
    Amendment(
        f"{_SCHEMA}/CreateChatCompletionRequest/allOf/1/properties/functions",
        {"minItems": None},
        "clients send an empty list where they have none, and backends take it",
    ),
    Amendment(f"{_SCHEMA}/FunctionObject/properties/name", _NAME, _WORDS),
    Amendment(f"{_SCHEMA}/ChatCompletionFunctions/properties/name", _NAME, _WORDS),
    Amendment(
        f"{_SCHEMA}/CreateContainerBody/properties/expires_after/properties/minutes",
        {"minimum": 1, "maximum": 1440},
        "what has no end, or has ended before it begins, is not kept",
    ),
    Amendment(
        f"{_SCHEMA}/CreateContainerBody/properties",
        {"skills": None},
        "they are not served, which the client is told",
    ),
    Amendment(
        f"{_SCHEMA}/ContainerNetworkPolicyAllowlistParam/properties",
        {"domain_secrets": None},
        "they are not served, which the client is told",
    ),
    Amendment(
        "paths/~containers~{container_id}~files/post/requestBody/content/application~json/schema",
        {"$ref": None, "type": "object", "properties": {"file_id": {"type": "string"}}}
        | {"required": ["file_id"]},
        "JSON names a file that is there",
    ),
    Amendment(
        "paths/~containers~{container_id}~files/post/requestBody/content/multipart~form-data/schema",
        {"$ref": None, "type": "object", "required": ["file"]}
        | {"properties": {"file": {"type": "string", "format": "binary"}}},
        "a form brings one",
    ),
    Amendment(
        "paths/~containers~{container_id}~files~{file_id}/get/responses/200/content",
        {"application/zip": {}},
        "at /content, where a file's id would stand, they are all",
    ),
    Amendment(
        f"{_SCHEMA}/CreateChatCompletionRequest/allOf/1/properties/n",
        {"maximum": 16},
        "each has a sandbox, so there are fewer at most",
    ),
    Amendment(
        "paths/~containers/post/requestBody",
        {"required": True},
        "a container has a name",
    ),
    Amendment(
        f"{_SCHEMA}/CreateResponse/allOf/2",
        {"required": ["model", "input"]},
        "prompts that could name both are not kept here",
    ),
    Amendment(
        f"{_SCHEMA}/CreateResponse/allOf/2/properties",
        {"context_management": None},
        "long contexts are seen to here, which the client is told",
    ),
    Amendment(
        f"{_SCHEMA}/InputParam/oneOf/1",
        {"minItems": 1},
        "who asks nothing is told so",
    ),
    Amendment(
        f"{_SCHEMA}/Tool",
        {"oneOf": [{"$ref": f"#/{_SCHEMA}/{name}"} for name in _TOOLS]},
        "all others are OpenAI's own, which the client is told",
    ),
    Amendment(f"{_SCHEMA}/FunctionTool/properties/name", _NAME, _WORDS),
    Amendment(
        f"{_SCHEMA}/ResponseProperties/properties",
        {"prompt": None},
        "prompts are not kept here, which the client is told",
    ),
    *(
        Amendment(
            f"{_SCHEMA}/ChatCompletionRequest{role}Message",
            {"required": ["role"]},
            "one that says nothing is left out, which OpenAI's are not",
        )
        for role in ("System", "Developer")
    ),
    *(
        Amendment(
            f"{_SCHEMA}/ChatCompletionRequest{role}Message/properties/content/oneOf/1",
            {"minItems": None},
            "one that says nothing is left out, which OpenAI's are not",
        )
        for role in ("System", "Developer")
    ),
    Amendment(
        f"{_SCHEMA}/ChatCompletionRequestMessageContentPartAudio/properties/input_audio",
        {"required": ["data"]},
        "whatever it is in, it lies in a file",
    ),
    Amendment(
        f"{_SCHEMA}/ChatCompletionRequestMessageContentPartAudio/properties/input_audio/properties/format",
        {"enum": None},
        "whatever it is in, it lies in a file",
    ),
    Amendment(
        f"{_SCHEMA}/PromptCacheBreakpointParam",
        {"required": None, "properties": None, "type": None},
        "a hint, which goes with a part and is not read; a part that became a file has none",
    ),
    Amendment(
        f"{_SCHEMA}/StopConfiguration/oneOf/1",
        {"minItems": None, "maxItems": None},
        "vLLM and SGLang take none, and any number",
    ),
    Amendment(
        f"{_SCHEMA}/CreateChatCompletionRequest/allOf/1/properties/logit_bias",
        {"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
        "vLLM and SGLang take decimals; the bounds are there in words",
    ),
    *(
        Amendment(
            f"paths/~{path.replace('/', '~')}/get/parameters/name=limit/schema",
            {"minimum": 1, "maximum": most},
            _WORDS,
        )
        for path, most in _LISTS.items()
    ),
)
