"""/v1/capabilities and /v1/models: the server's features and the models it offers."""

from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx

from policies.artifacts import ArtifactLimits
from policies.isolation import Isolation
from policies.limits import Limits
from policies.sessions import ResponseSettings
from proxy.agent.model import Model
from proxy.models.scripted import ScriptedModel
from tests.fakes.backend import scripted_backend
from tests.fakes.server import make_services, model_client, open_sandboxes, serve

LISTED = {"id": "fake-model", "object": "model", "created": 0, "owned_by": "vllm"}


async def get(model: Model, path: str, tmp_path: Path, **changes: Any) -> httpx.Response:
    async with (
        open_sandboxes("memory", tmp_path) as sandboxes,
        serve(make_services(model, sandboxes, tmp_path, **changes)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        return await client.get(path)


async def test_capabilities_list_limits_endpoints_and_features(tmp_path: Path) -> None:
    model = ScriptedModel([], name="script")
    answer = await get(model, "/v1/capabilities", tmp_path, steps="off")
    capabilities = answer.json()
    endpoints = capabilities.pop("endpoints")
    modes = capabilities["steps"].pop("modes")
    assert capabilities["steps"].pop("profiles") == modes
    isolation = asdict(Isolation())
    del isolation["network"]
    assert capabilities == {
        "object": "capabilities",
        "version": version("llm-sandbox-proxy"),
        "models": ["script"],
        "backend_error": None,
        "steps": {"default": "off"},
        "tools": ["str_replace_editor", "execute_bash", "submit"],
        "limits": asdict(Limits()),
        "isolation": isolation,
        "egress": {"mode": "none"},
        "files": {**asdict(ArtifactLimits()), "deny_types": []},
        "responses": asdict(ResponseSettings()),
        "profiles": {"default": ""},
        "profile": "default",
        "features": {"plain_suffix": ":plain", "passthrough": False},
    }
    assert {"off", "reasoning"} <= set(modes)
    assert {"POST /v1/chat/completions", "GET /v1/models/{model:path}"} <= set(endpoints)


async def test_capabilities_report_passthrough_of_an_http_backend(tmp_path: Path) -> None:
    async with scripted_backend([]) as backend:
        model = model_client(backend)
        answer = await get(model, "/v1/capabilities", tmp_path)
        await model.aclose()
    assert answer.json()["features"]["passthrough"] is True


async def test_model_listing_keeps_backend_fields_with_and_without_plain_suffix(
    tmp_path: Path,
) -> None:
    async with scripted_backend([]) as backend:
        model = model_client(backend)
        listing = (await get(model, "/v1/models", tmp_path)).json()
        plain = (await get(model, "/v1/models/fake-model:plain", tmp_path)).json()
        await model.aclose()
    whole = {**LISTED, "max_model_len": 1_000_000}
    assert listing == {"object": "list", "data": [whole, {**whole, "id": "fake-model:plain"}]}
    assert plain == {**whole, "id": "fake-model:plain"}
