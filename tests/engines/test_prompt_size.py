"""What the proxy adds to a prompt is counted by a real tokenizer, in a real template."""

import pytest

from policies.profile import Profile
from policies.prompts import SandboxContents, system_prompt
from sandbox_runtime.images import MODULES, PROGRAMS
from sandbox_runtime.tools import make_tools
from tests.engines.servers import ENGINE, model_server

pytestmark = pytest.mark.engine
MAX_TOKENS = 800


async def test_words_and_tools_take_800_tokens_at_most() -> None:
    words = system_prompt(Profile(), SandboxContents((*PROGRAMS, *MODULES)))
    user = {"role": "user", "content": "Hi"}
    async with model_server(tools=ENGINE.with_tools, slots=1) as server:
        without = await server.prompt_tokens({"messages": [user]})
        told = await server.prompt_tokens(
            {
                "messages": [{"role": "system", "content": words}, user],
                "tools": [tool.schema for tool in make_tools()],
            }
        )
    assert 0 < told - without <= MAX_TOKENS
