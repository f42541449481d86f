"""The pages of the request fields and of the headers."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from docs.generate.declarations import (
    doc,
    field_docs,
    leaves,
    members,
    row,
    schema_words,
    section_type,
    table,
    type_words,
    value_words,
)
from policies.headers import RequestHeader, ResponseHeader
from policies.profile import describe_stricter_values
from policies.routing import REASON_SENTENCES
from proxy.api.description import describe
from proxy.app import _routes as all_routes
from proxy.config import parse
from proxy.deprecated_settings import HEADER_RENAMES
from proxy.profiles import build_profiles
from proxy.schemas import chat_parameters, messages_request, responses_parameters
from proxy.schemas.chat_parameters import LLAMA_CPP, OPENAI, PARAMETERS, SGLANG, VLLM
from proxy.schemas.request_options import PolicyOptions, SandboxOptions
from proxy.schemas.responses_request import TRANSLATED_FIELDS

_MODEL_ROUTES = RequestHeader.PROFILE.routes


def request_fields() -> str:
    """Return the page of the fields of requests that call a model."""
    scopes = field_docs(chat_parameters)["ParameterScope"]
    return "\n".join(
        [
            "# Request fields",
            "",
            "Requests to `/v1/chat/completions`, `/v1/responses` and `/v1/messages` have the fields"
            " of their API, and a `sandbox` object with the settings of the request's sandbox."
            ' OpenAI\'s SDKs send the object by `extra_body={"sandbox": {…}}`.',
            "",
            "## The `sandbox` object",
            "",
            doc(SandboxOptions),
            "",
            *table("field", "type", "default", "meaning"),
            *_option_rows(),
            "",
            "## Settings of the profile in the `sandbox` object",
            "",
            f"{doc(PolicyOptions)} *May be* names the values that a request may set. Another value"
            " is refused with status 403. Defaults are those of the default profile.",
            "",
            *table("field", "type", "default", "may be", "meaning"),
            *_policy_rows(),
            "",
            "## Headers",
            "",
            "Headers of the three routes that change how the request is answered."
            " [Headers](headers.md) has those of all routes.",
            "",
            *table("header", "meaning"),
            *(
                row(f"`{_shown(header)}`", words)
                for header, words in _with_docs(RequestHeader)
                if header.routes == _MODEL_ROUTES
            ),
            "",
            "## Chat completions",
            "",
            f"{scopes} A field that is in no table is sent with every call. Null means absent.",
            "",
            *table("field", "type", "sent with", "use"),
            *_chat_rows(),
            "",
            *_backend_fields(),
            "## Responses",
            "",
            "The request becomes a chat completion. A field that is not in the table is sent to the"
            " backend unchanged.",
            "",
            *table("field", "type", "use"),
            *_responses_rows(),
            "",
            "Fields of chat completions are refused:",
            "",
            *table("field", "instead"),
            *(
                row(f"`{name}`", instead.replace("'", "`"))
                for name, instead in responses_parameters.CHAT_FIELDS.items()
            ),
            "",
            "## Messages",
            "",
            "The request becomes a chat completion. A field that is not in the table is sent with"
            " every model call, except for these, which are dropped: "
            + ", ".join(f"`{name}`" for name in messages_request.DROPPED_FIELDS)
            + ", and fields that a chat completion does not send with every call.",
            "",
            *table("field", "type", "use"),
            *_messages_rows(),
            "",
        ]
    )


def _option_rows() -> Iterator[str]:
    for name, kind, _, words in members(SandboxOptions):
        if name not in PolicyOptions.__annotations__:
            meaning, _, default = words.partition(" Default: ")
            yield row(f"`sandbox.{name}`", _bounded(kind), default.rstrip("."), meaning)


def _bounded(kind: Any) -> str:
    bounds = [each.gt for field in get_args(kind)[1:] for each in getattr(field, "metadata", ())]
    return ", ".join([type_words(kind), *(f"above {each}" for each in bounds)])


def _policy_rows() -> Iterator[str]:
    profile = build_profiles(parse({}, "the defaults")).default
    for name, kind, _, words in members(PolicyOptions):
        value = getattr(profile, name)
        section = section_type(kind)
        if section is None:
            words = field_docs(type(profile))[name]
            found = [(name, type_words(kind), value, words)]
        else:
            found = list(leaves(section, name, value))
        for path, kind_words, default, meaning in found:
            compared = "isolation.network" if path.startswith("isolation.network.") else path
            may_be = describe_stricter_values(compared, default)
            yield row(f"`sandbox.{path}`", kind_words, value_words(default), may_be, meaning)


def _chat_rows() -> Iterator[str]:
    schemas = _schema("ChatCompletionRequest")
    for name in (*OPENAI, "sandbox"):
        parameter = PARAMETERS[name]
        kind = schema_words(schemas.get(name, {}))
        yield row(f"`{name}`", kind, _sent_with(parameter.scope), parameter.description)


def _sent_with(scope: str) -> str:
    return {"proxy": "no call"}.get(scope, scope)


def _backend_fields() -> Iterator[str]:
    """Yield a table for the fields of each backend: many, so their types are in the code."""
    for backend, found in (("vLLM", VLLM), ("SGLang", SGLANG), ("llama.cpp", LLAMA_CPP)):
        yield from (f"Fields of {backend}:", "", *table("sent with", "fields"))
        for scope in get_args(chat_parameters.ParameterScope):
            names = [f"`{name}`" for name, each in found.items() if each.scope == scope]
            if names:
                yield row(_sent_with(scope), ", ".join(names))
        yield ""


def _responses_rows() -> Iterator[str]:
    schemas = _schema("ResponseRequest")
    for name in responses_parameters.FIELDS:
        if hint := responses_parameters.REFUSED_FIELDS.get(name):
            use = f"Refused. {hint}"
        else:
            use = TRANSLATED_FIELDS.get(name, "The same in a chat completion.")
        yield row(f"`{name}`", schema_words(schemas.get(name, {})), use)


def _messages_rows() -> Iterator[str]:
    schemas = _schema("MessageRequest")
    for name, field in messages_request.FIELDS.items():
        yield row(f"`{name}`", schema_words(schemas.get(name, {})), field.description)


@cache
def _components() -> Mapping[str, Any]:
    schemas: Mapping[str, Any] = describe(list(all_routes()))["components"]["schemas"]
    return schemas


def _schema(name: str) -> Mapping[str, Any]:
    properties: Mapping[str, Any] = _components()[name]["properties"]
    return properties


def headers() -> str:
    """Return the page of the headers."""
    return "\n".join(
        [
            "# Headers",
            "",
            "The HTTP headers that the proxy reads and sets itself. Names are not case-sensitive."
            " The body's `sandbox` object has the settings of a request too: see"
            " [Request fields](request-fields.md).",
            "",
            "## Request headers",
            "",
            "Other request headers are passed on to the backend, except for those that identify the"
            " client, describe the connection or begin with `x-sandbox-`.",
            "",
            *table("header", "routes", "meaning"),
            *(row(f"`{_shown(each)}`", each.routes, it) for each, it in _with_docs(RequestHeader)),
            "",
            "If the request comes from an address in the environment variable"
            " `FORWARDED_ALLOW_IPS` (default: the loopback addresses), `x-forwarded-for` and"
            " `x-forwarded-proto` give the address of the client and the scheme of its URL.",
            "",
            "For one release the proxy also reads former names:",
            "",
            *table("header", "former name"),
            *(row(f"`{name}`", f"`{former}`") for name, former in HEADER_RENAMES.items()),
            "",
            "## Response headers",
            "",
            "A relayed response has the backend's headers as well.",
            "",
            *table("header", "routes", "meaning"),
            *(row(f"`{_shown(each)}`", each.routes, it) for each, it in _with_docs(ResponseHeader)),
            "",
            f"The values of `{ResponseHeader.ROUTE}` and of `sandbox.route` in an answer:",
            "",
            *table("value", "reason"),
            *(row(f"`{name}`", words) for name, words in REASON_SENTENCES.items()),
            "",
        ]
    )


def _with_docs(kind: Any) -> Iterator[tuple[Any, str]]:
    words = field_docs(kind)
    for header in kind:
        yield header, words[header.name]


def _shown(header: str) -> str:
    return f"{header.lower()}*" if header.endswith("-") else header.lower()
