"""The server's answers, validated against its own description."""

from pathlib import Path

import anyio

from tests.openapi.drive import drive_own

EXAMPLES = 10
FEWEST_CASES = 300
LIMIT_S = 600


async def test_answers_to_generated_requests_match_the_proxys_openapi_description(
    tmp_path: Path,
) -> None:
    with anyio.fail_after(LIMIT_S):
        outcome = await drive_own(
            *(tmp_path, "--generation-deterministic", "--max-examples", str(EXAMPLES))
        )
    assert outcome.passed, outcome.output
    assert outcome.cases > FEWEST_CASES
