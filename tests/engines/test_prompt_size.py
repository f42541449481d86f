"""What the proxy adds to a prompt is counted by a real tokenizer, in a real template."""

import httpx
import pytest

from policies.profile import Profile
from policies.prompts import Equipment, system_prompt
from sandbox_runtime.image_check import MODULES, PROGRAMS
from sandbox_runtime.tools import make_tools
from tests.engines.servers import WITH_TOOLS, ModelServer, model_server

pytestmark = pytest.mark.engine
MAX_TOKENS = 800


async def test_words_and_tools_take_800_tokens_at_most() -> None:
    words = system_prompt(Profile(), Equipment((*PROGRAMS, *MODULES)))
    user = {"role": "user", "content": "Hi"}
    async with model_server(template=WITH_TOOLS, slots=1) as server:
        without = await tokens(server, {"messages": [user]})
        told = await tokens(
            server,
            {
                "messages": [{"role": "system", "content": words}, user],
                "tools": [tool.schema for tool in make_tools()],
            },
        )
    assert 0 < told - without <= MAX_TOKENS


async def tokens(server: ModelServer, body: dict[str, object]) -> int:
    """How many the model is given for that request."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        made = (await client.post("/apply-template", json=body)).raise_for_status().json()
        pieces = {"content": made["prompt"]}
        return len(
            (await client.post("/tokenize", json=pieces)).raise_for_status().json()["tokens"]
        )
