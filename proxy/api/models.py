"""GET /v1/models: the backend's models, each also as `<model>:plain`."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from policies.routing import PLAIN_SUFFIX
from proxy.api.connection import authorize, model
from proxy.api.json_response import JSON
from proxy.errors import NotFoundError

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> JSON:
    authorize(request)
    return JSON({"object": "list", "data": await _all(request)})


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> JSON:
    authorize(request)
    for entry in await _all(request):
        if entry.get("id") == model:
            return JSON(entry)
    raise NotFoundError(f"The model {model!r} does not exist.", code="model_not_found")


async def _all(request: Request) -> list[dict[str, Any]]:
    served = await model(request).models()
    return served + [{**entry, "id": f"{entry.get('id')}{PLAIN_SUFFIX}"} for entry in served]
