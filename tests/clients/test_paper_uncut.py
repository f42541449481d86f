"""In the paper's manner a reply is taken as it comes, whatever it repeats."""

from dataclasses import replace
from pathlib import Path

from proxy.models.scripted import call, tool_reply
from tests.clients.test_paper import DONE, WORDS, answer, served
from tests.fakes.paper import paper


async def test_no_reply_is_cut_for_what_it_repeats(tmp_path: Path) -> None:
    words = replace(WORDS, system="You have a computer, and you may use it for all that you like.")
    thinking = "So it goes on. " * 500
    quoting = tool_reply(call("execute_bash", command="echo 1")) | {
        "content": f"{words.system} {thinking}",
        "reasoning": thinking,
    }
    async with served(tmp_path, [quoting, DONE], paper(words)) as (backend, client):
        assert (await answer(client))[2] == "submitted"
    said = backend.requests[1].body["messages"]
    assert said[-2]["content"] == quoting["content"]
    assert said[-1]["role"] == "tool"
