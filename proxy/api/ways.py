"""Which way a request goes: what its client is allowed, and where that leads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from policies.profile import Profile
from policies.routing import Route, plain_name, route
from policies.tool_support import SUPPORTED, ToolVerdict
from proxy.api.connection import authorize, owner, services
from proxy.errors import ForbiddenError
from proxy.models.tool_support import no_tools_error
from proxy.wire.policy_asked import PolicyAsked, policy_asked

ROUTE_HEADER = "x-sandbox-route"
"""Names the reason why a request had no run."""
DETAIL_HEADER = "x-sandbox-route-detail"
"""Says what to change, where the model is given no tools."""


@dataclass(frozen=True, slots=True)
class Way:
    """Where one request goes, and the profile that holds for it."""

    route: Route
    profile: Profile
    verdict: ToolVerdict = SUPPORTED
    """On the model's tool support; its words explain a plain route."""

    @property
    def headers(self) -> dict[str, str]:
        """Return the `x-sandbox-route` headers of a plain answer; empty for a run."""
        if not self.is_plain:
            return {}
        reason: dict[str, str] = {ROUTE_HEADER: self.route.reason}
        words = self.verdict.words and self.verdict.header_words
        return {**reason, DETAIL_HEADER: words} if words else reason

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
    """Resolve the profile and the route of a request. Raises UnauthorizedError, BadRequestError,
    ForbiddenError, ToolsRefusedError."""
    asked = policy_asked(body, request.headers) if _asks(request, body) else PolicyAsked()
    profile = services(request).profiles.of(
        authorize(request), plain_name(body["model"]), asked.profile, asked.settings
    )
    decided = route(body, request.headers, profile)
    verdict = SUPPORTED
    if decided.kind == "sandbox":
        verdict = services(request).tool_verdicts.verdict_for(owner(request), decided.model)
        if verdict.reason:
            decided = route(body, request.headers, profile, verdict.reason)
    if decided.kind == "refused":
        if verdict.reason:
            raise no_tools_error(verdict)
        raise ForbiddenError(
            f"computer: always holds here (profile {profile.name!r}), and this request can only be"
            f" answered without one: {decided.sentence}.",
            param="sandbox.computer",
        )
    return Way(decided, profile, verdict)
