"""The response object of /v1/responses."""

from dataclasses import replace

from proxy.agent.result import RunStats
from proxy.schemas.responses_response import finished_response, response_in_progress
from tests.fakes.results import SUBMITTED

RESULT = replace(SUBMITTED, stats=RunStats(wall_ms=2500))


def test_completed_at_is_created_at_plus_the_duration_of_the_run() -> None:
    response = finished_response(
        response_in_progress({"model": "m"}, "r1", created=1000), RESULT, []
    )
    assert (response["created_at"], response["completed_at"]) == (1000, 1002)
