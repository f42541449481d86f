"""GET /v1/capabilities: what this server can do, for clients that want to know before they ask."""

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from policies.routing import PLAIN_SUFFIX
from policies.steps import PROFILES
from proxy.api.connection import authorize, is_operator, model, services, while_connected
from proxy.api.json_response import JSON
from proxy.services import Services

router = APIRouter()

DISTRIBUTION = "llm-sandbox-proxy"


@router.get("/v1/capabilities")
async def capabilities(request: Request) -> JSON:
    parts = services(request)
    names = list(parts.profiles.named)
    if not is_operator(request):
        names = parts.profiles.open_to(authorize(request))
    served = await while_connected(request, model(request).models())
    return JSON(
        {
            "object": "capabilities",
            "version": version(DISTRIBUTION),
            "models": [entry["id"] for entry in served],
            **_of_the_house(parts, names),
            "endpoints": request.app.state.endpoints,
        }
    )


def _of_the_house(parts: Services, profiles: Sequence[str]) -> dict[str, Any]:
    profile = parts.profiles.default
    isolation = asdict(profile.isolation)
    egress = isolation.pop("egress")
    return {
        "steps": {"default": parts.steps, "profiles": list(PROFILES)},
        "tools": [tool.name for tool in parts.runs.agent.make_tools(profile)],
        "limits": asdict(profile.limits),
        "isolation": isolation,
        "egress": {"mode": egress["mode"]},
        "files": asdict(profile.artifacts),
        "responses": asdict(parts.store.responses.settings),
        "profiles": {name: parts.profiles.named[name].about for name in profiles},
        "profile": profile.name,
        "features": {
            "plain_suffix": PLAIN_SUFFIX,
            "passthrough": parts.model.passage is not None,
        },
    }
