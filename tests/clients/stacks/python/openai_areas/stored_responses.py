"""Stored responses: continued, retrieved, in the background, deleted."""

from typing import Any

import openai
import pytest
from model import NAME, Script, bash, held, says, stdout_observation, submits


def ask(client: Any, script: Script, **asked: Any) -> Any:
    return client.responses.create(model=NAME, input=script.prompt, **asked)


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def wait_until_finished(client: Any, response_id: str) -> Any:
    """Poll a response until it has finished, and return it."""
    while (found := client.responses.retrieve(response_id)).status in ("queued", "in_progress"):
        pass
    return found


def test_response_can_be_retrieved(client: Any) -> None:
    script = Script(bash("echo 42"), submits("42."))
    made = ask(client, script, metadata={"a": "b"})
    again = client.responses.retrieve(made.id, include=["reasoning.encrypted_content"])
    assert again == made
    assert (again.output_text, again.metadata) == ("42.", {"a": "b"})


def test_unstored_response_is_not_found(client: Any) -> None:
    made = ask(client, Script(says("42.")), store=False)
    assert made.output_text == "42."
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_deleted_response_is_not_found(client: Any) -> None:
    made = ask(client, Script(says("42.")))
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)


def test_response_of_another_key_is_not_found(connect: Any) -> None:
    made = ask(connect(), Script(says("42.")))
    with pytest.raises(openai.NotFoundError):
        connect().responses.retrieve(made.id)


def test_continued_response_has_messages_and_files(client: Any) -> None:
    first_script = Script(bash("echo one > f"), submits("Written."))
    first = ask(client, first_script, instructions="Be brief.")
    script = Script(bash("cat f"), submits("One."))
    second = ask(client, script, previous_response_id=first.id)
    assert (second.previous_response_id, second.output_text) == (first.id, "One.")
    assert script.observations() == [stdout_observation("one")]
    system, *before = script.requests()[0]["messages"]
    assert [(each["role"], each["content"]) for each in before] == [
        ("user", first_script.prompt),
        ("assistant", "Written."),
        ("user", script.prompt),
    ]
    assert "Be brief." not in system["content"]


def test_two_branches_of_a_response_have_separate_files(client: Any) -> None:
    root = ask(client, Script(bash("echo root > f"), submits("Begun.")))
    seen = []
    for word in ("left", "right"):
        script = Script(bash(f"echo {word} >> f; cat f"), submits("Done."))
        ask(client, script, previous_response_id=root.id)
        seen += script.observations()
    assert seen == [stdout_observation("root\nleft"), stdout_observation("root\nright")]


def test_input_items_are_listed_in_pages(client: Any) -> None:
    script = Script(says("Hello."))
    first = ask(client, script)
    follows = Script(says("Again."))
    second = ask(client, follows, previous_response_id=first.id)
    items = client.responses.input_items
    assert texts(items.list(second.id, order="asc", limit=1)) == [
        *(script.prompt, "Hello.", follows.prompt)
    ]
    page = items.list(second.id, limit=1)
    assert (texts(page.data), page.has_more) == ([follows.prompt], True)


def test_background_response_is_polled_until_completed(client: Any) -> None:
    script = Script(bash("echo 42"), held(submits("42.")))
    made = ask(client, script, background=True)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    script.requests(2)
    assert client.responses.retrieve(made.id).status == "in_progress"
    script.release()
    ended = wait_until_finished(client, made.id)
    assert (ended.status, ended.output_text) == ("completed", "42.")


def test_background_response_can_be_cancelled(client: Any) -> None:
    script = Script(held(says("Never said.")))
    made = ask(client, script, background=True)
    script.requests(1)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).output_text == ""


def test_foreground_response_cannot_be_cancelled(client: Any) -> None:
    made = ask(client, Script(says("42.")))
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(made.id)


def test_stream_resumes_after_the_last_received_event(client: Any) -> None:
    script = Script(bash("echo 42"), held(submits("42.")))
    heard = []
    stream = ask(client, script, background=True, stream=True)
    for event in stream:
        heard.append(event)
        if event.type == "response.in_progress":
            break
    stream.close()
    script.requests(2)
    script.release()
    response_id, last = heard[0].response.id, heard[-1].sequence_number
    rest = list(client.responses.retrieve(response_id, stream=True, starting_after=last))
    whole = list(client.responses.retrieve(response_id, stream=True))
    assert [*heard, *rest] == whole
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert whole[-1].response.output_text == "42."


def test_stream_helper_reads_a_background_response(client: Any) -> None:
    script = Script(bash("echo 42"), submits("42."))
    made = ask(client, script, background=True)
    wait_until_finished(client, made.id)
    with client.responses.stream(response_id=made.id) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert (final.id, final.output_text) == (made.id, "42.")
