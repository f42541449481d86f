"""How a request wants to be served, read from its body and headers."""

from typing import Any

import pytest

from proxy.errors import BadRequestError
from proxy.schemas.request_options import RequestOptions, read_terms


@pytest.mark.parametrize(
    ("ours", "headers", "terms"),
    [
        (None, {}, RequestOptions()),
        ({"steps": "off"}, {"x-sandbox-steps": "off"}, RequestOptions()),
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
            RequestOptions(retry_count=2, patience_s=600),
        ),
        ({}, {"x-stainless-timeout": "600"}, RequestOptions(patience_s=600)),
    ],
)
def test_each_is_read(ours: Any, headers: dict[str, str], terms: RequestOptions) -> None:
    assert read_terms({"sandbox": ours}, headers) == terms


@pytest.mark.parametrize("word", ["", "never", "nan", "inf", "-1", "0"])
def test_what_a_library_says_and_nobody_understands_is_left_alone(word: str) -> None:
    assert read_terms({}, {"x-stainless-read-timeout": word}) == RequestOptions()


@pytest.mark.parametrize("word", ["", "one", "-1", "1.5", "٣"])
def test_a_retry_count_that_is_none_is_left_alone(word: str) -> None:
    assert read_terms({}, {"x-stainless-retry-count": word}) == RequestOptions()


@pytest.mark.parametrize("value", ["", "soon", 0, -1, True, "nan", "inf", [], 10**400])
def test_a_deadline_must_be_a_time(value: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        read_terms({"sandbox": {"deadline_s": value}}, {})
    assert (caught.value.param, caught.value.code) == ("sandbox.deadline_s", "invalid_value")


@pytest.mark.parametrize(
    ("terms", "client_timeout_s"),
    [
        (RequestOptions(), None),
        (RequestOptions(deadline_s=90), 90),
        (RequestOptions(patience_s=600), 600),
        (RequestOptions(deadline_s=90, patience_s=600), 90),
        (RequestOptions(deadline_s=900, patience_s=600), 600),
    ],
)
def test_who_hears_nothing_hangs_up_at_the_nearer_end(
    terms: RequestOptions, client_timeout_s: float | None
) -> None:
    assert terms.client_timeout_s == client_timeout_s
