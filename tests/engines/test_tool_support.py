"""Detection of tool support at a real model server."""

from contextlib import aclosing

import pytest

from proxy.models.openai_http import OpenAIHTTPModel
from proxy.models.tool_support import MAX_TOKENS, ToolProbe
from tests.engines.conftest import Served
from tests.engines.engine import MODEL

pytestmark = pytest.mark.engine
DEFAULT_INSTRUCTION = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The default instruction of both chat templates, the model's own and the one with tools."""


async def test_tool_support_verdict_matches_the_server(served: Served) -> None:
    before = await served.server.token_counts()
    model = OpenAIHTTPModel(f"{served.server.url}/v1", api_key=None, timeout_s=60)
    async with aclosing(model):
        probe = ToolProbe(model)
        version = await probe.engine_version()
        verdict = await probe.verdict(MODEL, version)
        assert await probe.models() == [MODEL]
        default = await probe.default_instruction(MODEL, version)
    spent = await served.server.token_counts() - before
    assert version is not None
    assert default == DEFAULT_INSTRUCTION
    assert verdict is not None
    assert verdict.reason == served.server.tools.reason
    assert spent.completion <= 2 * MAX_TOKENS
