"""FastAPI's errors, in OpenAI's format."""

from pathlib import Path

import httpx
from fastapi.routing import APIRoute

from proxy.api.middleware import RequestMiddleware
from proxy.app import build_app
from proxy.models.scripted import ScriptedModel
from tests.fakes.memory_sandbox import MemorySandboxes
from tests.fakes.server import make_services


async def test_fastapi_validation_error_is_an_openai_error_with_its_param(tmp_path: Path) -> None:
    async def typed(limit: int) -> int:
        return limit

    services = make_services(ScriptedModel([]), MemorySandboxes(), tmp_path)
    app = build_app(services)
    app.router.routes.append(APIRoute("/typed", typed))
    transport = httpx.ASGITransport(RequestMiddleware(app, services))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        response = await client.get("/typed", params={"limit": "many"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert "integer" in error.pop("message")
    assert error == {"type": "invalid_request_error", "param": "limit", "code": "invalid_value"}
