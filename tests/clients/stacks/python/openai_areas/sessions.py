"""Sessions over chat completions: files of one request are visible to the next."""

from typing import Any

import openai
import pytest
from chat import answer, ask, chat_request, sandbox_of
from model import NAME, Script, bash, stdout_observation, submits

DONE = submits("Done.")
BY = {
    "a session in the body": {"extra_body": {"sandbox": {"session": "s"}}},
    "a header of ours": {"extra_headers": {"X-Sandbox-Session": "s"}},
    "a header of a chat UI": {"extra_headers": {"X-Chat-Id": "s"}},
    "vLLM's field": {"extra_body": {"session_id": "s"}},
    "metadata": {"metadata": {"session_id": "s"}},
}


def next_turn(client: Any, before: list[Any], script: Script, **named: Any) -> Any:
    """Send the next turn of a chat, with all earlier messages."""
    messages = [*before, *chat_request(script)["messages"]]
    return client.chat.completions.create(model=NAME, messages=messages, **named)


def turn(script: Script, completion: Any) -> list[Any]:
    """Return the messages of a finished turn."""
    return [*chat_request(script)["messages"], {"role": "assistant", "content": answer(completion)}]


@pytest.mark.parametrize("by", BY)
def test_second_turn_reads_files_of_the_first(client: Any, by: str) -> None:
    writes = Script(bash("echo one > f"), DONE)
    first = ask(client, writes, **BY[by])
    reads = Script(bash("cat f"), DONE)
    second = next_turn(client, turn(writes, first), reads, **BY[by])
    assert reads.observations()[-1] == stdout_observation("one")
    assert sandbox_of(second)["container_id"] == sandbox_of(first)["container_id"]


def test_container_id_names_a_session(client: Any) -> None:
    box = client.containers.create(name="box")
    named: Any = {"extra_body": {"sandbox": {"container_id": box.id}}}
    first = ask(client, Script(bash("echo one > f"), DONE), **named)
    assert sandbox_of(first)["container_id"] == box.id
    reads = Script(bash("cat f"), DONE)
    ask(client, reads, **named)
    assert reads.observations() == [stdout_observation("one")]


def test_requests_without_a_session_have_separate_sandboxes(client: Any) -> None:
    ask(client, Script(bash("echo one > f"), DONE))
    reads = Script(bash("test -e f || echo none"), DONE)
    ask(client, reads)
    assert reads.observations() == [stdout_observation("none")]


def test_run_of_an_edited_question_has_the_files_from_before_the_question(client: Any) -> None:
    named: Any = {"extra_headers": {"X-Chat-Id": "s"}}
    root = Script(bash("echo root > f"), DONE)
    before = turn(root, ask(client, root, **named))
    for word in ("left", "right"):
        script = Script(bash(f"echo {word} >> f; cat f"), DONE)
        next_turn(client, before, script, **named)
        assert script.observations()[-1] == stdout_observation(f"root\n{word}")


def test_deleted_session_starts_without_files(client: Any) -> None:
    named: Any = {"extra_body": {"sandbox": {"session": "s"}}}
    first = ask(client, Script(bash("echo one > f"), DONE), **named)
    client.containers.delete(sandbox_of(first)["container_id"])
    with pytest.raises(openai.NotFoundError):
        client.containers.delete(sandbox_of(first)["container_id"])
    reads = Script(bash("test -e f || echo none"), DONE)
    ask(client, reads, **named)
    assert reads.observations() == [stdout_observation("none")]


def test_sessions_of_the_same_name_under_two_keys_have_separate_files(connect: Any) -> None:
    named: Any = {"extra_body": {"sandbox": {"session": "s"}}}
    ask(connect(), Script(bash("echo one > f"), DONE), **named)
    reads = Script(bash("test -e f || echo none"), DONE)
    ask(connect(), reads, **named)
    assert reads.observations() == [stdout_observation("none")]
