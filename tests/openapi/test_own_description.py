"""This server's description of itself: whatever it allows is answered as it says."""

from pathlib import Path

import anyio

from tests.openapi.drive import drive_own

EXAMPLES = 10
FEWEST_CASES = 300
LIMIT_S = 600


async def test_whatever_may_be_asked_is_answered_as_described(tmp_path: Path) -> None:
    with anyio.fail_after(LIMIT_S):
        outcome = await drive_own(
            *(tmp_path, "--generation-deterministic", "--max-examples", str(EXAMPLES))
        )
    assert outcome.passed, outcome.said
    assert outcome.cases > FEWEST_CASES
