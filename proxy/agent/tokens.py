"""The token ids and log probabilities in a backend's reply, in the formats of vLLM, SGLang,
llama.cpp and litellm."""

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from proxy.agent.events import CallTokens
from proxy.agent.model import Completion
from proxy.errors import BackendError, ContextOverflowError, ToolsRefusedError

TOKEN_OUTPUT_PARAMS = {
    "return_token_ids": True,
    "return_tokens": True,
    "verbose": True,
    "logprobs": True,
}
"""The parameters that request token ids and log probabilities. `return_tokens` and `verbose` are
llama.cpp's; vLLM and SGLang ignore them."""
_FEWEST_LOGPROBS = {"top_logprobs": 1}
"""Requests one alternative for each token. llama.cpp's default of 20 makes a reply ten times as
large, and 0 gives no log probabilities."""
_VERBOSE = "__verbose"
"""The field in which llama.cpp puts the ids of the sampled tokens and the rendered prompt."""
_ID_FIELDS = ("prompt_token_ids", "token_ids")
_PROVIDER_FIELDS = "provider_specific_fields"
"""The field of a choice in which litellm puts the fields of a provider."""
MAX_VERSION_CHARS = 200
"""Maximum length of a weight version."""


def with_token_output_params(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a call with the parameters that request its tokens."""
    fewest = {} if body.get("logprobs") else _FEWEST_LOGPROBS
    return {**body, **TOKEN_OUTPUT_PARAMS, **fewest}


def refuses_token_output_params(error: BackendError) -> bool:
    """Return True if a backend refused a call because of TOKEN_OUTPUT_PARAMS."""
    if isinstance(error, ContextOverflowError | ToolsRefusedError):
        return False
    words = f"{error.message} {error.param}"
    return error.status in (400, 422) and any(name in words for name in TOKEN_OUTPUT_PARAMS)


def rendered_prompt(reply: Completion) -> str | None:
    """Return the prompt as llama.cpp's chat template has rendered it, or None for other servers."""
    prompt = _verbose_fields(reply).get("prompt")
    return prompt if isinstance(prompt, str) else None


def read_tokens(reply: Completion, rendered_ids: list[int] | None = None) -> CallTokens:
    """Return the tokens of a reply. `rendered_ids` are the tokens of `rendered_prompt`, if known.
    If the id or the log probability of a token is unknown, return no tokens, and the reason in
    `missing`."""
    version = _weight_version(reply)
    fields = {**_provider_fields(reply.choice), **reply.response, **reply.choice}
    prompt_ids, reply_ids = (_token_ids(fields.get(name)) for name in _ID_FIELDS)
    if rendered_ids is not None:
        prompt_ids, reply_ids = rendered_ids, _token_ids(_verbose_fields(reply).get("tokens"))
        counted = reply.usage.get("prompt_tokens")
        if len(prompt_ids) != counted:
            missing = f"The rendered prompt has {len(prompt_ids)} tokens instead of {counted}."
            return CallTokens(missing=missing, weight_version=version)
    if prompt_ids is None or reply_ids is None:
        return CallTokens(missing="The backend sent no token ids.", weight_version=version)
    logprobs = _logprobs(reply.choice)
    if logprobs is None:
        return CallTokens(missing="The backend sent no log probabilities.", weight_version=version)
    if len(logprobs) != len(reply_ids):
        missing = f"The backend sent {len(logprobs)} log probabilities for {len(reply_ids)} tokens."
        return CallTokens(missing=missing, weight_version=version)
    return CallTokens(prompt_ids, reply_ids, logprobs, weight_version=version)


def without_tokens(reply: Completion, body: Mapping[str, Any]) -> Completion:
    """Return a reply without the fields that only TOKEN_OUTPUT_PARAMS requested. `body` is the body
    of the call before TOKEN_OUTPUT_PARAMS were added."""
    hidden = set() if body.get("return_token_ids") else set(_ID_FIELDS)
    if not body.get("logprobs"):
        hidden.add("logprobs")
    if not body.get("verbose"):
        hidden.add(_VERBOSE)
    choice = {name: value for name, value in reply.choice.items() if name not in hidden}
    if nested := _provider_fields(choice):
        choice[_PROVIDER_FIELDS] = {
            name: value for name, value in nested.items() if name not in hidden
        }
    response = {name: value for name, value in reply.response.items() if name not in hidden}
    return replace(reply, choice=choice, response=response)


def _provider_fields(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = choice.get(_PROVIDER_FIELDS)
    return nested if isinstance(nested, dict) else {}


def _verbose_fields(reply: Completion) -> Mapping[str, Any]:
    verbose = reply.response.get(_VERBOSE)
    return verbose if isinstance(verbose, dict) else {}


def _token_ids(value: Any) -> list[int] | None:
    # The types as a set: a loop over 10,000 ids would take 0.4 ms.
    is_list = isinstance(value, list) and set(map(type, value)) <= {int}
    return value if is_list else None


def _logprobs(choice: Mapping[str, Any]) -> list[float] | None:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return None
    found = [each.get("logprob") for each in content if isinstance(each, dict)]
    return [float(each) for each in found if isinstance(each, int | float) and isfinite(each)]


def _weight_version(reply: Completion) -> str | None:
    """Return the version that SGLang reports in `metadata`."""
    metadata = reply.response.get("metadata")
    version = metadata.get("weight_version") if isinstance(metadata, dict) else None
    return version[:MAX_VERSION_CHARS] if isinstance(version, str) else None
