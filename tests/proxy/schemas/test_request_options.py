"""Request options in the body and in headers."""

from typing import Any

import pytest

from proxy.errors import BadRequestError
from proxy.schemas.request_options import RequestOptions, read_request_options


@pytest.mark.parametrize(
    ("sandbox", "headers", "options"),
    [
        (None, {}, RequestOptions()),
        ({"steps": "off"}, {"x-sandbox-steps": "items"}, RequestOptions(steps="off")),
        ({}, {"x-sandbox-steps": "items"}, RequestOptions(steps="items")),
        ({"usage": "last_call"}, {}, RequestOptions(usage="last_call")),
        ({"offload_documents": False}, {}, RequestOptions(offload_documents=False)),
        ({}, {"x-sandbox-offload-documents": "off"}, RequestOptions(offload_documents=False)),
        ({"deadline_s": 90}, {}, RequestOptions(deadline_s=90)),
        ({}, {"x-sandbox-deadline": "90.5"}, RequestOptions(deadline_s=90.5)),
        ({"deadline_s": 90}, {"x-sandbox-deadline": "60"}, RequestOptions(deadline_s=60)),
        ({"on_disconnect": "detach"}, {}, RequestOptions(on_disconnect="detach")),
        ({}, {"x-sandbox-on-disconnect": "cancel"}, RequestOptions(on_disconnect="cancel")),
        (
            {"on_disconnect": "detach"},
            {"x-sandbox-on-disconnect": "cancel"},
            RequestOptions(on_disconnect="detach"),
        ),
        ({}, {"idempotency-key": "k"}, RequestOptions(idempotency_key="k")),
        ({}, {"idempotency-key": ""}, RequestOptions()),
        (
            {},
            {"x-stainless-retry-count": "2", "x-stainless-read-timeout": "600"},
            RequestOptions(retry_count=2, read_timeout_s=600),
        ),
        ({}, {"x-stainless-timeout": "600"}, RequestOptions(read_timeout_s=600)),
    ],
)
def test_options_are_read_from_body_and_headers(
    sandbox: Any, headers: dict[str, str], options: RequestOptions
) -> None:
    assert read_request_options({"sandbox": sandbox}, headers) == options


@pytest.mark.parametrize("word", ["", "never", "nan", "inf", "-1", "0"])
def test_invalid_read_timeout_is_ignored(word: str) -> None:
    assert read_request_options({}, {"x-stainless-read-timeout": word}) == RequestOptions()


@pytest.mark.parametrize("word", ["", "one", "-1", "1.5", "٣"])
def test_invalid_retry_count_is_ignored(word: str) -> None:
    assert read_request_options({}, {"x-stainless-retry-count": word}) == RequestOptions()


@pytest.mark.parametrize("value", ["", "soon", 0, -1, True, "nan", "inf", [], 10**400])
def test_invalid_deadline_is_refused(value: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_request_options({"sandbox": {"deadline_s": value}}, {})
    assert (caught.value.param, caught.value.code) == ("sandbox.deadline_s", "invalid_value")


@pytest.mark.parametrize(
    ("options", "client_timeout_s"),
    [
        (RequestOptions(), None),
        (RequestOptions(deadline_s=90), 90),
        (RequestOptions(read_timeout_s=600), 600),
        (RequestOptions(deadline_s=90, read_timeout_s=600), 90),
        (RequestOptions(deadline_s=900, read_timeout_s=600), 600),
    ],
)
def test_client_timeout_is_the_earlier_of_deadline_and_read_timeout(
    options: RequestOptions, client_timeout_s: float | None
) -> None:
    assert options.client_timeout_s == client_timeout_s
