"""What the web framework says, in OpenAI's words."""

from pathlib import Path

import httpx

from proxy.app import routed
from proxy.models.scripted import ScriptedModel
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services


async def test_a_field_that_the_framework_refuses_is_named(tmp_path: Path) -> None:
    async def typed(limit: int) -> int:
        return limit

    app = routed(make_services(ScriptedModel([]), MemorySandboxes(), tmp_path))
    app.add_api_route("/typed", typed)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        answer = await client.get("/typed", params={"limit": "many"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "integer" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": "limit", "code": "invalid_value"}
