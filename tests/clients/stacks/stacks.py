"""The client stacks: the parts of an answer that each shows, and the errors that each raises."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from policies.steps import StepsMode

ALL = frozenset({"text", "finish", "calls", "thought", "usage", "cited", "pictures", "files"})

Failing = Literal["refused", "broken", "cut", "unavailable"]


@dataclass(frozen=True)
class Variant:
    """One variant of a request: the API, and whether it is sync or async, streamed or not."""

    name: str
    shows: frozenset[str]
    raises: Mapping[str, str]
    """Error type, and status if the client exposes it, by scenario."""
    thinks: frozenset[StepsMode] = frozenset({"reasoning"})
    """Steps settings under which the steps are part of the reasoning."""
    late: str = ""
    """Error raised after the first output, if it differs.

    A client that distinguishes the two waits for a while after the start of the stream (AI SDK 7:
    50 ms), so an error before the first output may still arrive after that time.
    """

    def raises_at(self, profile: StepsMode) -> Mapping[str, frozenset[str]]:
        """Return the possible errors of each failing scenario under a steps setting."""
        may_be = {fault: frozenset({kind}) for fault, kind in self.raises.items()}
        if self.late:
            is_shown = profile in self.thinks
            unavailable = frozenset({self.late} if is_shown else {self.raises["cut"], self.late})
            may_be |= {"cut": frozenset({self.late}), "unavailable": unavailable}
        return may_be

    @property
    def streams(self) -> bool:
        """True if this variant reads the answer as a stream."""
        return not {"streamed", "helper"}.isdisjoint(self.name.split())


@dataclass(frozen=True)
class Stack:
    """One client library in one version."""

    name: str
    """Name of its lock file."""
    language: Literal["python", "node"]
    program: str
    variants: tuple[Variant, ...]
    tools: tuple[str, ...] = ()
    """Scenarios with a client tool that report every step."""
    agents: tuple[str, ...] = ()
    """Scenarios with a client tool that report only the answer."""
    shapes: tuple[str, ...] = ()
    """Scenarios with a structured answer."""
    lists_models: bool = False
    has_shell: bool = False
    """True if the client can request a hosted shell and shows its items."""
    shows_calls: bool = False
    """True if the client shows a hosted shell as tool calls and results."""

    def __str__(self) -> str:
        return f"{self.language}-{self.name}"


def failing(refused: str, broken: str, unavailable: str) -> dict[str, str]:
    """Return the errors for a refusal, a broken backend, and an unavailable sandbox."""
    return {"refused": refused, "broken": broken, "cut": broken, "unavailable": unavailable}


def streaming(non_streamed: Mapping[str, str], begun: Mapping[str, str]) -> dict[str, str]:
    """Return the errors of a stream: those of `non_streamed` before its start, else of `begun`."""
    return {**begun, "refused": non_streamed["refused"], "broken": non_streamed["broken"]}


# The openai SDK and libraries on top of it. An error inside a stream has no status.
OPENAI = failing(
    "openai.BadRequestError 400",
    "openai.InternalServerError 500",
    "openai.InternalServerError 503",
)
OPENAI_STREAM = streaming(OPENAI, failing(*["openai.APIError"] * 3))
# The stream helper drops fields outside the choices.
HELPER = ALL - {"files"}


RESPONSES = frozenset({"text", "finish", "calls", "thought", "usage", "files"})


def responses(
    name: str, raises: Mapping[str, str], shows: frozenset[str] = RESPONSES, late: str = ""
) -> Variant:
    """Return a variant that uses the Responses API; it shows step items only with a hosted tool."""
    return Variant(name, shows, raises, frozenset({"reasoning", "items"}), late)


def openai_sdk(name: str) -> Stack:
    """Return a major version of the Python openai SDK."""
    return Stack(
        name,
        "python",
        "openai_client.py",
        (
            Variant("non-streamed", ALL, OPENAI),
            Variant("streamed", ALL, OPENAI_STREAM),
            Variant("helper", HELPER, OPENAI_STREAM),
            Variant("async", ALL, OPENAI),
            Variant("async streamed", ALL, OPENAI_STREAM),
            Variant("async helper", HELPER, OPENAI_STREAM),
            responses("responses", OPENAI),
            responses("responses streamed", OPENAI_STREAM),
            responses("responses helper", OPENAI_STREAM),
            responses("responses async streamed", OPENAI_STREAM),
        ),
        tools=("tools", "tools helper", "responses tools"),
        shapes=("shape", "shape helper", "responses shape"),
        lists_models=True,
        has_shell=True,
    )


LANGCHAIN = frozenset({"text", "finish", "calls", "usage"})
LANGCHAIN_ERRORS = "langchain_openai.chat_models.base."
LANGCHAIN_NON_STREAMED = failing(
    f"{LANGCHAIN_ERRORS}OpenAIInvalidRequestError 400",
    f"{LANGCHAIN_ERRORS}OpenAIAPIError 500",
    f"{LANGCHAIN_ERRORS}OpenAIAPIError 503",
)
LANGCHAIN_ANTHROPIC = failing(
    "langchain_anthropic.chat_models.AnthropicInvalidRequestError 400",
    "langchain_anthropic.chat_models.AnthropicAPIError 500",
    "langchain_anthropic.chat_models.AnthropicAPIError 503",
)
LANGCHAIN_STREAM = streaming(LANGCHAIN_NON_STREAMED, OPENAI_STREAM)
LITELLM = ALL - {"files"}
LITELLM_NON_STREAMED = failing(
    "litellm.exceptions.BadRequestError 400",
    "litellm.exceptions.InternalServerError 500",
    "litellm.exceptions.ServiceUnavailableError 503",
)
LITELLM_STREAM = streaming(
    LITELLM_NON_STREAMED, failing(*["litellm.exceptions.MidStreamFallbackError 500"] * 3)
)
PYDANTIC_AI = frozenset({"text", "finish", "calls", "thought", "usage"})
PYDANTIC_AI_NON_STREAMED = failing(
    "pydantic_ai.exceptions.ModelRequestRejectedError 400",
    "pydantic_ai.exceptions.ModelServerError 500",
    "pydantic_ai.exceptions.ModelUnavailableError 503",
)
# A numeric error code inside the stream is taken for the status.
PYDANTIC_AI_STREAM = streaming(
    PYDANTIC_AI_NON_STREAMED,
    failing(
        "pydantic_ai.exceptions.ModelAPIError",
        "pydantic_ai.exceptions.ModelServerError 500",
        "pydantic_ai.exceptions.ModelAPIError",
    ),
)
TERSE = frozenset({"text", "calls", "usage"})

# Anthropic's message type has no place for citations and images.
ANTHROPIC = ALL - {"cited", "pictures"}
ANTHROPIC_NON_STREAMED = failing(
    "anthropic.BadRequestError 400",
    "anthropic.InternalServerError 500",
    "anthropic.ServiceUnavailableError 503",
)
ANTHROPIC_STREAM = streaming(ANTHROPIC_NON_STREAMED, failing(*["anthropic.APIStatusError 200"] * 3))
LANGCHAIN_ANTHROPIC_STREAM = streaming(LANGCHAIN_ANTHROPIC, ANTHROPIC_STREAM)

PYTHON = (
    openai_sdk("openai-2"),
    openai_sdk("openai-3"),
    Stack(
        "langchain",
        "python",
        "langchain_client.py",
        (
            Variant("non-streamed", LANGCHAIN, LANGCHAIN_NON_STREAMED),
            Variant("streamed", LANGCHAIN, LANGCHAIN_STREAM),
            Variant("async", LANGCHAIN, LANGCHAIN_NON_STREAMED),
            Variant("async streamed", LANGCHAIN, LANGCHAIN_STREAM),
            responses("responses", LANGCHAIN_NON_STREAMED, LANGCHAIN),
            responses("responses streamed", LANGCHAIN_STREAM, LANGCHAIN),
            Variant("anthropic", LANGCHAIN, LANGCHAIN_ANTHROPIC),
            Variant("anthropic streamed", LANGCHAIN, LANGCHAIN_ANTHROPIC_STREAM),
        ),
        tools=("tools", "responses tools", "anthropic tools"),
        shapes=("shape",),
    ),
    Stack(
        "litellm",
        "python",
        "litellm_client.py",
        (
            Variant("non-streamed", LITELLM, LITELLM_NON_STREAMED),
            Variant("streamed", LITELLM, LITELLM_STREAM),
            Variant("async", LITELLM, LITELLM_NON_STREAMED),
        ),
        tools=("tools",),
        shapes=("shape",),
    ),
    Stack(
        "llama-index",
        "python",
        "llama_index_client.py",
        (
            Variant("non-streamed", frozenset({"text", "finish", "calls", "usage"}), OPENAI),
            Variant("streamed", frozenset({"text", "calls"}), OPENAI_STREAM),
        ),
        tools=("tools",),
        shapes=("shape",),
    ),
    Stack(
        "pydantic-ai",
        "python",
        "pydantic_ai_client.py",
        (
            Variant("non-streamed", PYDANTIC_AI, PYDANTIC_AI_NON_STREAMED),
            Variant("streamed", PYDANTIC_AI, PYDANTIC_AI_STREAM),
            responses("responses", PYDANTIC_AI_NON_STREAMED, PYDANTIC_AI),
            responses("responses streamed", PYDANTIC_AI_STREAM, PYDANTIC_AI),
        ),
        tools=("tools", "tools streamed", "responses tools"),
        shapes=("shape",),
    ),
    Stack(
        "instructor",
        "python",
        "instructor_client.py",
        (Variant("non-streamed", frozenset({"text", "usage"}), OPENAI),),
        shapes=("shape", "shape streamed"),
    ),
    Stack(
        "llm",
        "python",
        "llm_client.py",
        (Variant("non-streamed", TERSE, OPENAI), Variant("streamed", TERSE, OPENAI_STREAM)),
        tools=("tools",),
        shapes=("shape",),
    ),
    Stack(
        "smolagents",
        "python",
        "smolagents_client.py",
        (Variant("non-streamed", TERSE, OPENAI), Variant("streamed", TERSE, OPENAI_STREAM)),
        agents=("tools",),
    ),
    Stack(
        "anthropic",
        "python",
        "anthropic_client.py",
        (
            Variant("non-streamed", ANTHROPIC, ANTHROPIC_NON_STREAMED),
            Variant("streamed", ANTHROPIC, ANTHROPIC_STREAM),
            Variant("helper", ANTHROPIC - {"files"}, ANTHROPIC_STREAM),
            Variant("async", ANTHROPIC, ANTHROPIC_NON_STREAMED),
            Variant("async streamed", ANTHROPIC, ANTHROPIC_STREAM),
            Variant("async helper", ANTHROPIC - {"files"}, ANTHROPIC_STREAM),
            Variant("beta", ANTHROPIC, ANTHROPIC_NON_STREAMED),
        ),
        tools=("tools", "tools helper"),
        agents=("tool runner",),
        shapes=("shape", "shape helper"),
        lists_models=True,
    ),
)

# Node errors are reported by their bare class names.
NODE_OPENAI = failing("BadRequestError 400", "InternalServerError 500", "InternalServerError 503")
NODE_OPENAI_STREAM = streaming(NODE_OPENAI, failing(*["APIError"] * 3))
NODE_ANTHROPIC = failing(
    "BadRequestError 400", "InternalServerError 500", "ServiceUnavailableError 503"
)
NODE_ANTHROPIC_STREAM = streaming(NODE_ANTHROPIC, failing(*["APIError"] * 3))
# The Node helper keeps only the last piece of unknown fields.
NODE_HELPER = ALL - {"thought"}


def openai_node(name: str) -> Stack:
    """Return a major version of the Node openai SDK."""
    return Stack(
        name,
        "node",
        "openai.mjs",
        (
            Variant("non-streamed", ALL, NODE_OPENAI),
            Variant("streamed", ALL, NODE_OPENAI_STREAM),
            Variant("helper", NODE_HELPER, NODE_OPENAI_STREAM),
            responses("responses", NODE_OPENAI),
            responses("responses streamed", NODE_OPENAI_STREAM),
            responses("responses helper", NODE_OPENAI_STREAM),
        ),
        tools=("tools", "responses tools"),
        agents=("tools helper",),
        shapes=("shape",),
        lists_models=True,
        has_shell=True,
    )


AI_SDK = ALL - {"files"}
AI_SDK_SHOWS = {
    "compatible": AI_SDK - {"cited", "pictures"},
    "openai": AI_SDK - {"thought", "pictures"},
    "openrouter": AI_SDK,
    "anthropic": AI_SDK - {"cited", "pictures"},
}
AI_SDK_RESPONSES = AI_SDK - {"cited", "pictures"}
AI_SDK_NON_STREAMED = failing("APICallError 400", "APICallError 500", "APICallError 503")
AI_SDK_OPENAI_STREAM = streaming(AI_SDK_NON_STREAMED, failing(*["APICallError 500"] * 3))


def ai_sdk(name: str, stream: Mapping[str, str], late: str, anthropic: Mapping[str, str]) -> Stack:
    """Return a major version of Vercel's AI SDK.

    `stream` holds the stream errors of two providers, `anthropic` those of the Anthropic provider,
    `late` the error of the Responses provider after the first output.
    """
    streams = {
        "compatible": streaming(AI_SDK_NON_STREAMED, stream),
        "openai": AI_SDK_OPENAI_STREAM,
        "openrouter": streaming(AI_SDK_NON_STREAMED, stream),
        "anthropic": streaming(AI_SDK_NON_STREAMED, anthropic),
    }
    providers = (*streams, "responses")
    return Stack(
        name,
        "node",
        "ai.mjs",
        (
            *(
                Variant(f"non-streamed {by}", shows, AI_SDK_NON_STREAMED)
                for by, shows in AI_SDK_SHOWS.items()
            ),
            *(
                Variant(f"streamed {by}", AI_SDK_SHOWS[by], raises)
                for by, raises in streams.items()
            ),
            responses("non-streamed responses", AI_SDK_NON_STREAMED, AI_SDK_RESPONSES),
            responses("streamed responses", AI_SDK_OPENAI_STREAM, AI_SDK_RESPONSES, late),
        ),
        tools=tuple(
            f"tools {how} {by}" for how in ("non-streamed", "streamed") for by in providers
        ),
        shapes=tuple(f"shape {by}" for by in providers),
        shows_calls=True,
    )


NODE = (
    openai_node("openai-6"),
    openai_node("openai-7"),
    # AI SDK 6 raises the error object of the event itself, which has no class.
    ai_sdk("ai-6", failing(*["Object"] * 3), "Object 500", failing(*["Object"] * 3)),
    # AI SDK 7 derives a status from the type of an Anthropic error.
    ai_sdk(
        "ai-7",
        failing("StreamProviderError", "StreamProviderError 500", "StreamProviderError"),
        "StreamProviderError 500",
        failing("StreamProviderError 400", "StreamProviderError 500", "StreamProviderError 529"),
    ),
    Stack(
        "anthropic",
        "node",
        "anthropic.mjs",
        (
            Variant("non-streamed", ANTHROPIC, NODE_ANTHROPIC),
            Variant("streamed", ANTHROPIC, NODE_ANTHROPIC_STREAM),
            Variant("helper", ANTHROPIC - {"files"}, NODE_ANTHROPIC_STREAM),
        ),
        tools=("tools",),
        agents=("tool runner",),
        shapes=("shape",),
        lists_models=True,
    ),
    Stack(
        "langchain",
        "node",
        "langchain.mjs",
        (
            Variant("non-streamed", LANGCHAIN | {"thought"}, NODE_OPENAI),
            Variant("streamed", LANGCHAIN | {"thought"}, NODE_OPENAI_STREAM),
            responses("responses", NODE_OPENAI, LANGCHAIN),
            responses("responses streamed", NODE_OPENAI_STREAM, LANGCHAIN),
        ),
        tools=("tools", "responses tools"),
        shapes=("shape",),
    ),
)

STACKS = (*PYTHON, *NODE)
