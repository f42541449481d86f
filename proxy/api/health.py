"""GET /health: this process answers."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

router = APIRouter()


@router.api_route("/health", methods=["GET", "HEAD"])
async def health() -> JSONResponse:
    return JSONResponse({"status": "ok"})
