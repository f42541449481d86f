"""Which web pages may ask, for a browser looks before it hands a page our answer (CORS)."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_EVERYTHING = ("*",)


class WebPages:
    """Answers browsers: every page may ask that has the key; where none is needed, only pages of
    this machine, for any other could use what its visitor alone can reach."""

    def __init__(self, app: ASGIApp, *, needs_key: bool) -> None:
        self._app = app
        self._for_pages = CORSMiddleware(
            app,
            allow_origins=_EVERYTHING if needs_key else (),
            allow_origin_regex=None if needs_key else LOCAL_PAGES,
            allow_methods=_EVERYTHING,
            allow_headers=_EVERYTHING,
            expose_headers=_EVERYTHING,
            allow_private_network=True,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Other clients are spared the cost, which is a call more for each piece of a stream.
        app = self._for_pages if _of_a_page(scope) else self._app
        await app(scope, receive, send)


def _of_a_page(scope: Scope) -> bool:
    return scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"])
