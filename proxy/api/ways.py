"""Which way a request goes: what its client is allowed, and where that leads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from policies.profile import Profile
from policies.routing import Route, plain_name, route
from proxy.api.connection import authorize, services
from proxy.errors import ForbiddenError
from proxy.wire.policy_asked import PolicyAsked, policy_asked


@dataclass(frozen=True, slots=True)
class Way:
    """A request's."""

    route: Route
    profile: Profile

    @property
    def is_plain(self) -> bool:
        """Whether it leads straight to the backend."""
        return self.route.kind == "plain"


def _asks(request: Request, body: Mapping[str, Any]) -> bool:
    """Whether a request may say anything of policies; most do not, and are not looked through."""
    if body.get("sandbox") is not None:
        return True
    return any(name[:10] == b"x-sandbox-" for name, _ in request.scope["headers"])


def way_of(request: Request, body: Mapping[str, Any]) -> Way:
    """Decide. Raises UnauthorizedError, BadRequestError, ForbiddenError."""
    asked = policy_asked(body, request.headers) if _asks(request, body) else PolicyAsked()
    profile = services(request).profiles.of(
        authorize(request), plain_name(body["model"]), asked.profile, asked.settings
    )
    decided = route(body, request.headers, profile)
    if decided.kind == "refused":
        raise ForbiddenError(
            f"computer: always holds here (profile {profile.name!r}), and this request can only be"
            f" answered without one: {decided.reason}.",
            param="sandbox.computer",
        )
    return Way(decided, profile)
