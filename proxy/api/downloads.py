"""Files on their way out: what a browser may do with them."""

from collections.abc import Iterator

from starlette.responses import FileResponse, StreamingResponse

from policies.file_names import shown_name
from proxy.files import StoredFile

SHOWN_BY_BROWSERS = ("image/png", "image/jpeg", "image/gif", "image/webp", "text/plain")
"""What cannot act on this origin when it is opened; all else, HTML and SVG too, is a download."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "Referrer-Policy": "no-referrer",  # a link is all that it takes to open a file
    "Cache-Control": "private, max-age=3600",
}


def download(file: StoredFile) -> FileResponse:
    """A file, shown in the browser where that is harmless."""
    shown = file.mime_type in SHOWN_BY_BROWSERS
    return FileResponse(
        file.path,
        media_type=file.mime_type,
        filename=shown_name(file.filename),
        content_disposition_type="inline" if shown else "attachment",
        headers=HEADERS,
    )


def zip_download(pieces: Iterator[bytes], filename: str) -> StreamingResponse:
    """An archive that is made while it is sent."""
    disposition = f'attachment; filename="{filename}"'
    headers = {**HEADERS, "Content-Disposition": disposition}
    return StreamingResponse(pieces, media_type="application/zip", headers=headers)
