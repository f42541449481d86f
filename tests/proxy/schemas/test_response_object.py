"""The object of /v1/responses, as it is told and as it is kept."""

from dataclasses import replace

from proxy.agent.result import RunStats
from proxy.schemas.responses_response import finished_response, response_in_progress
from tests.fakes.results import SUBMITTED

RESULT = replace(SUBMITTED, stats=RunStats(wall_ms=2500))


def test_a_response_was_completed_at_one_time_however_often_that_is_told() -> None:
    told = finished_response(response_in_progress({"model": "m"}, "r1", created=1000), RESULT, [])
    assert (told["created_at"], told["completed_at"]) == (1000, 1002)
