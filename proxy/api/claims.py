"""What a request stands for: whose it is, which work it asks for, and until when."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from policies.sessions import named
from proxy.agent.task import StatusHold
from proxy.api.dependencies import owner, services
from proxy.api.routing import COMPUTER_HEADER, PROFILE_HEADER, PROMPT_HEADER
from proxy.runs.run import Claim
from proxy.wire.terms import DOCUMENTS_HEADER, Terms

WORK_HEADERS = (PROFILE_HEADER, COMPUTER_HEADER, PROMPT_HEADER, DOCUMENTS_HEADER)
NOT_THE_WORK = ("stream", "stream_options")
"""What says how the answer is told, and not what is asked for."""


def claim(request: Request, body: Mapping[str, Any], terms: Terms, written: bytes) -> Claim:
    """The request's. With a key of the client's own, a stream may join a whole run and the other
    way round; the SDKs' retries are the same to the byte."""
    if terms.idempotency_key is not None:
        work = {key: value for key, value in body.items() if key not in NOT_THE_WORK}
        written = json.dumps(work, sort_keys=True).encode()
    chat = named(request.headers, body)
    return Claim(
        owner=owner(request),
        fingerprint=hashlib.sha256(
            f"{request.url.path}\n{chat}\n{_terms(request)}\n".encode(errors="surrogatepass")
            + written
        ).hexdigest(),
        key=terms.idempotency_key,
        retry_count=terms.retry_count,
        stream=bool(body.get("stream")),
        detach=(terms.on_disconnect or services(request).on_disconnect) == "detach",
    )


def _terms(request: Request) -> str:
    """What headers say of the work, which else stands in the body."""
    return "\n".join(request.headers.get(name, "") for name in WORK_HEADERS)


def deadline_s(request: Request, terms: Terms, claim: Claim) -> float | None:
    """When the run must have answered: where the client hears of it meanwhile, or may leave without
    ending it, its patience is no bound."""
    hears = claim.stream or services(request).nonstream_keep_alive_s is not None
    return terms.deadline_s if hears or claim.detach else terms.hangs_up_s


def status_hold(request: Request, terms: Terms, claim: Claim) -> StatusHold | None:
    """The hold on the status of a streamed response: over in good time before the client hangs
    up."""
    if not claim.stream:
        return None
    hold_s = services(request).status_hold_s
    if terms.patience_s is not None:
        hold_s = min(hold_s, terms.patience_s / 2)
    return StatusHold(hold_s)
