"""Conversations by chat completions: what one request leaves behind, the next one finds."""

from typing import Any

import openai
import pytest
from chat import answer, ask, asked, told
from model import NAME, Dictation, bash, of, submits

DONE = submits("Done.")
BY = {
    "a session in the body": {"extra_body": {"sandbox": {"session": "s"}}},
    "a header of ours": {"extra_headers": {"X-Sandbox-Session": "s"}},
    "a header of a chat UI": {"extra_headers": {"X-Chat-Id": "s"}},
    "vLLM's field": {"extra_body": {"session_id": "s"}},
    "metadata": {"metadata": {"session_id": "s"}},
}


def goes_on(client: Any, before: list[Any], said: Dictation, **named: Any) -> Any:
    """The next turn of a chat, as an app sends it that keeps all messages."""
    messages = [*before, *asked(said)["messages"]]
    return client.chat.completions.create(model=NAME, messages=messages, **named)


def turn(said: Dictation, completion: Any) -> list[Any]:
    """What was said in it, for the next."""
    return [*asked(said)["messages"], {"role": "assistant", "content": answer(completion)}]


@pytest.mark.parametrize("by", BY)
def test_the_second_turn_reads_what_the_first_one_wrote(client: Any, by: str) -> None:
    writes = Dictation(bash("echo one > f"), DONE)
    first = ask(client, writes, **BY[by])
    reads = Dictation(bash("cat f"), DONE)
    second = goes_on(client, turn(writes, first), reads, **BY[by])
    assert reads.observed()[-1] == of("one")
    assert told(second)["container_id"] == told(first)["container_id"]


def test_a_container_names_a_conversation(client: Any) -> None:
    box = client.containers.create(name="box")
    named: Any = {"extra_body": {"sandbox": {"container_id": box.id}}}
    first = ask(client, Dictation(bash("echo one > f"), DONE), **named)
    assert told(first)["container_id"] == box.id
    reads = Dictation(bash("cat f"), DONE)
    ask(client, reads, **named)
    assert reads.observed() == [of("one")]


def test_without_a_name_each_request_has_a_computer_of_its_own(client: Any) -> None:
    ask(client, Dictation(bash("echo one > f"), DONE))
    reads = Dictation(bash("test -e f || echo none"), DONE)
    ask(client, reads)
    assert reads.observed() == [of("none")]


def test_a_question_asked_otherwise_finds_the_files_as_they_were(client: Any) -> None:
    named: Any = {"extra_headers": {"X-Chat-Id": "s"}}
    root = Dictation(bash("echo root > f"), DONE)
    before = turn(root, ask(client, root, **named))
    for word in ("left", "right"):
        said = Dictation(bash(f"echo {word} >> f; cat f"), DONE)
        goes_on(client, before, said, **named)
        assert said.observed()[-1] == of(f"root\n{word}")


def test_a_deleted_conversation_begins_anew(client: Any) -> None:
    named: Any = {"extra_body": {"sandbox": {"session": "s"}}}
    first = ask(client, Dictation(bash("echo one > f"), DONE), **named)
    client.containers.delete(told(first)["container_id"])
    with pytest.raises(openai.NotFoundError):
        client.containers.delete(told(first)["container_id"])
    reads = Dictation(bash("test -e f || echo none"), DONE)
    ask(client, reads, **named)
    assert reads.observed() == [of("none")]


def test_a_session_is_its_key_s_own(connect: Any) -> None:
    named: Any = {"extra_body": {"sandbox": {"session": "s"}}}
    ask(connect(), Dictation(bash("echo one > f"), DONE), **named)
    reads = Dictation(bash("test -e f || echo none"), DONE)
    ask(connect(), reads, **named)
    assert reads.observed() == [of("none")]
