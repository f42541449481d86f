"""The context window of a real server: detection, errors and moved texts."""

import pytest

from tests.engines.conftest import Served
from tests.engines.measured_requests import ask, post, request
from tests.engines.prompts import book
from tests.engines.servers import ENGINE

pytestmark = pytest.mark.engine
WINDOW = 2048


async def test_context_length_error_states_the_context_window(served: Served) -> None:
    body = request("Hello.")
    body["messages"].insert(0, {"role": "system", "content": book(400)})
    response = await post(served.url, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert ENGINE.window_in(error) == WINDOW


@pytest.mark.parametrize(("lines", "is_moved"), [(60, False), (160, True)], ids=["less", "more"])
async def test_text_longer_than_half_the_context_window_becomes_a_file(
    lines: int, is_moved: bool, served: Served
) -> None:
    text = f"<document title='a.txt'>\n{book(lines)}</document>\nSay yes."
    form = ENGINE.one_of(["yes", "no"])
    body = request(text, sandbox={"limits": {"max_turns": 1}}, **form)
    answer = await ask(served.url, served.server, body)
    assert answer.status == 200, answer.body
    assert (answer.body["usage"]["sandbox"]["documents_tokens"] > 0) is is_moved
