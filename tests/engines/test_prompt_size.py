"""The size of the proxy's prompt and tools, counted with a real tokenizer and chat template."""

import pytest

from policies.profile import Profile
from policies.prompts import SandboxContents, system_prompt
from sandbox_runtime.images import MODULES, PROGRAMS
from sandbox_runtime.tools import make_tools
from tests.engines.servers import ENGINE, model_server

pytestmark = pytest.mark.engine
MAX_TOKENS = 800


async def test_prompt_and_tools_take_at_most_800_tokens() -> None:
    prompt = system_prompt(Profile(), SandboxContents((*PROGRAMS, *MODULES)))
    user = {"role": "user", "content": "Hi"}
    async with model_server(tools=ENGINE.with_tools, slots=1) as server:
        without = await server.prompt_tokens({"messages": [user]})
        with_prompt = await server.prompt_tokens(
            {
                "messages": [{"role": "system", "content": prompt}, user],
                "tools": [tool.schema for tool in make_tools()],
            }
        )
    assert 0 < with_prompt - without <= MAX_TOKENS
