"""The rows of captured tokens, for random histories of a run."""

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.limits import Limits
from policies.profile import AgentSettings, Profile
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.clients.chat_http import http_client, post_chat
from tests.clients.test_token_capture import CAPTURE, trajectory
from tests.fakes.backend import Item, Refusal, scripted_backend
from tests.fakes.server import running_proxy
from tests.fakes.tokens import logprob_of, prompt_text, reply_text, text_of_tokens, tokens_of

PROFILE = Profile(agent=AgentSettings(capture_tokens=True), limits=Limits(final_question=False))
BUSY = Refusal(503, "busy", headers={"retry-after": "0"})
COMMANDS = st.sampled_from(["echo one", "echo two >&2; exit 3", "cat missing", "printf ''"])
CALLS = st.one_of(
    st.builds(lambda command: call("execute_bash", command=command), COMMANDS),
    st.just(call("str_replace_editor", command="view", path="/nowhere")),
    st.just(call("unknown_tool", x=1)),
    # The arguments as text. Other runs repair these calls in the history.
    st.sampled_from(["", "[1]", "5", "null", '{"command": "ec', "echo 42"]).map(
        lambda written: {"name": "execute_bash", "arguments": written}
    ),
)


@st.composite
def turns(draw: st.DrawFn) -> Sequence[Item]:
    """Return the backend's responses of one turn: perhaps an error, then a reply with one call or
    several parallel ones, perhaps with text, and with reasoning that later prompts lack."""
    reply: Mapping[str, Any] = tool_reply(
        *draw(st.lists(CALLS, min_size=1, max_size=3)),
        content=draw(st.sampled_from(["", "Let me see.", "Ünïcode 🧮"])) or None,
    )
    if draw(st.booleans()):
        reply = {**reply, "reasoning": "I think."}
    return [BUSY, reply] if draw(st.integers(0, 3)) == 0 else [reply]


ENDS = st.sampled_from(
    [text_reply("It is 42."), tool_reply(call("submit", answer="It is 42."))],
)


@settings(max_examples=15, deadline=None)
@given(st.lists(turns(), max_size=5), ENDS)
def test_token_masks_of_a_run_mark_exactly_its_sampled_tokens(
    history: list[Sequence[Item]], end: Item
) -> None:
    anyio.run(check_run, [*itertools.chain(*history), end])


async def check_run(script: Sequence[Item]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        async with (
            scripted_backend(script, has_tokens=True) as backend,
            running_proxy(
                backend, "memory", Path(directory), profiles=Profiles.only(PROFILE)
            ) as url,
            http_client(url) as http,
        ):
            found = await trajectory(http, await post_chat(http, **CAPTURE))
    replies = [item for item in script if not isinstance(item, Refusal)]
    prompts = [
        prompt_text(request.body)
        for request, item in zip(backend.requests, script, strict=True)
        if not isinstance(item, Refusal)
    ]
    calls = [each for each in found["model_calls"] if each["reply"] is not None]
    assert len(calls) == len(replies)
    rows = [Row(segment) for segment in found["token_segments"]]
    for model_call, prompt in zip(calls, prompts, strict=True):
        sampled = reply_text(found["messages"][model_call["reply"]])
        rows[model_call["token_segment"]].expect(prompt, sampled)
    for row in rows:
        row.check()
    # A prompt does not continue the tokens before it if it lacks the reasoning among them.
    dropped = sum("reasoning" in reply for reply in replies[:-1])
    assert len(rows) == dropped + 1


class Row:
    """A token segment, and the calls that it should have."""

    def __init__(self, segment: Mapping[str, Any]) -> None:
        self._segment = segment
        self._first_prompt: str | None = None
        self._response = ""
        self._mask: list[int] = []

    def expect(self, prompt: str, sampled: str) -> None:
        """Add a call: its prompt begins with the row so far."""
        if self._first_prompt is None:
            self._first_prompt = prompt
        added = prompt.removeprefix(self._first_prompt + self._response)
        assert prompt == self._first_prompt + self._response + added
        self._response += added + sampled
        self._mask += [0] * len(tokens_of(added)) + [1] * len(tokens_of(sampled))

    def check(self) -> None:
        segment = self._segment
        assert text_of_tokens(segment["prompt_ids"]) == self._first_prompt
        assert text_of_tokens(segment["response_ids"]) == self._response
        assert segment["response_mask"] == self._mask
        assert segment["logprobs"] == [
            logprob_of(token) if mask else 0.0
            for token, mask in zip(segment["response_ids"], self._mask, strict=True)
        ]
