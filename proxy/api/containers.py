"""GET /v1/containers/…/files/…/content: a produced file, for whoever has the link or the key."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse

from proxy.api.connection import has_key, services
from proxy.errors import NotFoundError, UnauthorizedError

router = APIRouter()

SHOWN_BY_BROWSERS = ("image/png", "image/jpeg", "image/gif", "image/webp", "text/plain")
"""What cannot act on this origin when it is opened; all else, HTML and SVG too, is a download."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "Cache-Control": "private, max-age=3600",
}


@router.api_route("/v1/containers/{container_id}/files/{file_id}/content", methods=["GET", "HEAD"])
async def file_content(request: Request, container_id: str, file_id: str) -> FileResponse:
    files = services(request).files
    expires, signature = request.query_params.get("exp", ""), request.query_params.get("sig", "")
    if not files.is_signed(container_id, file_id, expires, signature) and not has_key(request):
        raise UnauthorizedError("This link has expired or is not one of ours.")
    stored = files.find(container_id, file_id)
    if stored is None:
        raise NotFoundError(f"No file {file_id!r} in container {container_id!r}.")
    shown = stored.mime_type in SHOWN_BY_BROWSERS
    return FileResponse(
        stored.path,
        media_type=stored.mime_type,
        filename=stored.filename,
        content_disposition_type="inline" if shown else "attachment",
        headers=HEADERS,
    )
