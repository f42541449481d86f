"""Decides whether a request gets a sandbox, and which profile applies. The inputs are the client's
key, the body with its `sandbox` object, the `x-sandbox-` headers and the model's tool support."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.headers import ResponseHeader
from policies.profile import Capture, Profile
from policies.redaction import SecretFinder
from policies.routing import Route, backend_model_name, choose_route, is_allowed_upstream
from policies.tool_support import SUPPORTED, ToolVerdict
from proxy.api.dependencies import ModelRequest
from proxy.errors import BadRequestError, ForbiddenError, no_tools_error
from proxy.schemas.request_options import NO_POLICY, RequestedPolicy, read_requested_policy


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """The route of a request, and its profile."""

    route: Route
    profile: Profile
    verdict: ToolVerdict = SUPPORTED
    """The verdict on the model's tool support. If the model does not support tools, the verdict's
    message explains why the route is plain."""
    upstream: str | None = None
    """The base URL to which the model calls of a run are sent; None: the backend's."""
    capture: Capture = "none"
    """The part of a run that is kept as its trajectory."""

    @property
    def headers(self) -> dict[str, str]:
        """The `x-sandbox-route` headers of a response without a sandbox; none with a sandbox."""
        if not self.is_plain:
            return {}
        reason: dict[str, str] = {ResponseHeader.ROUTE: self.route.reason}
        detail = self.verdict.message and self.verdict.header_value
        return {**reason, ResponseHeader.ROUTE_DETAIL: detail} if detail else reason

    @property
    def is_plain(self) -> bool:
        """True if the request gets no sandbox. The request is relayed to the backend, or becomes a
        run with a single model call (`/v1/responses` and `/v1/messages` without `:plain`)."""
        return self.route.kind == "plain"


def resolve_route(request: ModelRequest, body: Mapping[str, Any]) -> RoutingDecision:
    """Return the route and the profile of a request. `body` is the request's body, or its
    translation into a chat completion. Raises BadRequestError, ForbiddenError,
    ToolsRefusedError."""
    services, requested = request.services, _requested_policy(request, body)
    profile = services.profiles.select(
        request.key, backend_model_name(body["model"]), requested.profile, requested.settings
    )
    decided = choose_route(body, request.headers, profile)
    capture = requested.capture or _default_capture(decided, profile)
    verdict = SUPPORTED
    # A run that captures tokens is for a model that still learns to use the tools.
    if decided.kind == "sandbox" and capture != "tokens":
        verdict = services.tool_verdicts.verdict_for(request.owner, decided.model)
        if verdict.reason:
            decided = choose_route(body, request.headers, profile, verdict.reason)
    if decided.kind == "refused":
        if verdict.reason:
            raise no_tools_error(verdict)
        raise ForbiddenError(
            f"enabled: always holds here (profile {profile.name!r}), and this request can only be"
            f" answered without a sandbox: {decided.explanation}.",
            param="sandbox.enabled",
        )
    if requested.capture == "tokens":
        _check_token_capture(decided, profile)
    if requested.upstream is not None:
        _check_upstream(requested.upstream, decided, services.upstreams)
    return RoutingDecision(decided, profile, verdict, requested.upstream, capture)


def _requested_policy(request: ModelRequest, body: Mapping[str, Any]) -> RequestedPolicy:
    # Fast path: most requests name no policy, and reading all headers takes time.
    if body.get("sandbox") is None and not any(
        name[:10] == b"x-sandbox-" for name, _ in request.headers.raw
    ):
        return NO_POLICY
    return read_requested_policy(body, request.headers)


def _default_capture(route: Route, profile: Profile) -> Capture:
    """Return the capture of a request that sets none."""
    default = profile.agent.capture
    if default != "tokens" or (route.kind == "sandbox" and not SecretFinder(profile.redaction)):
        return default
    return "messages"


def _check_token_capture(route: Route, profile: Profile) -> None:
    """Raise an error if a request with `sandbox.capture: tokens` is not allowed."""
    param = "sandbox.capture"
    if not profile.agent.allows_token_capture:
        raise ForbiddenError(
            f"The profile {profile.name!r} does not allow sandbox.capture: tokens"
            " (agent.capture_tokens).",
            param=param,
        )
    if SecretFinder(profile.redaction):
        raise BadRequestError(
            f"The profile {profile.name!r} redacts secrets, and token ids cannot be redacted.",
            param=param,
        )
    if route.kind != "sandbox":
        raise BadRequestError(
            "sandbox.capture: tokens needs a sandbox, and this request gets none:"
            f" {route.explanation}.",
            param=param,
        )


def _check_upstream(url: str, route: Route, allowed_urls: Sequence[str]) -> None:
    """Raise an error if the server does not allow a request's `sandbox.upstream`, or if the request
    gets no sandbox."""
    param = "sandbox.upstream"
    if not is_allowed_upstream(url, allowed_urls):
        raise ForbiddenError(
            "The server does not allow this URL for model calls (backend.upstreams).", param=param
        )
    if route.kind != "sandbox":
        raise BadRequestError(
            f"sandbox.upstream needs a sandbox, and this request gets none: {route.explanation}.",
            param=param,
        )
