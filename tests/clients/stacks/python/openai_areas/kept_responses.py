"""Responses that are kept: gone on from, asked for again, made in the background, deleted."""

from typing import Any

import openai
import pytest
from model import NAME, Dictation, bash, held, of, says, submits


def ask(client: Any, said: Dictation, **asked: Any) -> Any:
    return client.responses.create(model=NAME, input=said.words, **asked)


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def over(client: Any, response_id: str) -> Any:
    """The response once it is at work no more."""
    while (found := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        pass
    return found


def test_a_response_is_retrieved_as_it_was_made(client: Any) -> None:
    said = Dictation(bash("echo 42"), submits("42."))
    made = ask(client, said, metadata={"a": "b"})
    again = client.responses.retrieve(made.id, include=["reasoning.encrypted_content"])
    assert again == made
    assert (again.output_text, again.metadata) == ("42.", {"a": "b"})


def test_a_response_that_is_not_stored_is_not_found(client: Any) -> None:
    made = ask(client, Dictation(says("42.")), store=False)
    assert made.output_text == "42."
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_deleted_response_is_gone(client: Any) -> None:
    made = ask(client, Dictation(says("42.")))
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)


def test_another_key_s_response_is_not_found(connect: Any) -> None:
    made = ask(connect(), Dictation(says("42.")))
    with pytest.raises(openai.NotFoundError):
        connect().responses.retrieve(made.id)


def test_the_next_response_knows_what_was_said_and_finds_the_files(client: Any) -> None:
    first_said = Dictation(bash("echo one > f"), submits("Written."))
    first = ask(client, first_said, instructions="Be brief.")
    said = Dictation(bash("cat f"), submits("One."))
    second = ask(client, said, previous_response_id=first.id)
    assert (second.previous_response_id, second.output_text) == (first.id, "One.")
    assert said.observed() == [of("one")]
    system, *before = said.asked()[0]["messages"]
    assert [(each["role"], each["content"]) for each in before] == [
        ("user", first_said.words),
        ("assistant", "Written."),
        ("user", said.words),
    ]
    assert "Be brief." not in system["content"]


def test_two_that_go_on_from_one_response_have_a_copy_each(client: Any) -> None:
    root = ask(client, Dictation(bash("echo root > f"), submits("Begun.")))
    seen = []
    for word in ("left", "right"):
        said = Dictation(bash(f"echo {word} >> f; cat f"), submits("Done."))
        ask(client, said, previous_response_id=root.id)
        seen += said.observed()
    assert seen == [of("root\nleft"), of("root\nright")]


def test_the_items_of_the_input_are_listed_in_parts(client: Any) -> None:
    said = Dictation(says("Hello."))
    first = ask(client, said)
    follows = Dictation(says("Again."))
    second = ask(client, follows, previous_response_id=first.id)
    items = client.responses.input_items
    assert texts(items.list(second.id, order="asc", limit=1)) == [
        *(said.words, "Hello.", follows.words)
    ]
    page = items.list(second.id, limit=1)
    assert (texts(page.data), page.has_more) == ([follows.words], True)


def test_a_response_in_the_background_is_asked_for_until_it_is_made(client: Any) -> None:
    said = Dictation(bash("echo 42"), held(submits("42.")))
    made = ask(client, said, background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    said.asked(2)
    assert client.responses.retrieve(made.id).status == "in_progress"
    said.release()
    ended = over(client, made.id)
    assert (ended.status, ended.output_text) == ("completed", "42.")


def test_a_response_in_the_background_is_cancelled(client: Any) -> None:
    said = Dictation(held(says("Never said.")))
    made = ask(client, said, background=True)
    said.asked(1)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).output_text == ""


def test_only_a_response_in_the_background_is_cancelled(client: Any) -> None:
    made = ask(client, Dictation(says("42.")))
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)


def test_a_stream_that_was_left_is_taken_up_where_it_was(client: Any) -> None:
    said = Dictation(bash("echo 42"), held(submits("42.")))
    heard = []
    stream = ask(client, said, background=True, stream=True)
    for event in stream:
        heard.append(event)
        if event.type == "response.in_progress":
            break
    stream.close()
    said.asked(2)
    said.release()
    response_id, last = heard[0].response.id, heard[-1].sequence_number
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=last))
    whole = list(client.responses.retrieve(response_id, stream=True))
    assert [*heard, *rest] == whole
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert whole[-1].response.output_text == "42."


def test_the_stream_helper_takes_up_a_response_in_the_background(client: Any) -> None:
    said = Dictation(bash("echo 42"), submits("42."))
    made = ask(client, said, background=True)
    over(client, made.id)
    with client.responses.stream(response_id=made.id) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert (final.id, final.output_text) == (made.id, "42.")
