"""Files: uploads, files in messages, and files produced by runs."""

import base64
import io
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import pytest
from chat import answer, ask, sandbox_of
from model import Script, bash, stdout_observation, submits

TABLE = b"".join(b"%d\n" % number for number in range(10_000))
GIF = b"GIF89a;"
READ = submits("Read.")


def data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def file(**of_it: str) -> dict[str, Any]:
    return {"type": "file", "file": of_it}


def test_upload_is_listed_read_and_deleted(client: Any) -> None:
    made = client.files.create(file=("a.csv", b"n\n1\n"), purpose="user_data")
    assert (made.filename, made.bytes, made.status) == ("a.csv", 4, "processed")
    assert client.files.retrieve(made.id) == made
    assert list(client.files.list()) == [made]
    assert client.files.content(made.id).read() == b"n\n1\n"
    assert client.files.wait_for_processing(made.id) == made
    assert client.files.delete(made.id).deleted
    assert list(client.files.list()) == []
    with pytest.raises(openai.NotFoundError):
        client.files.content(made.id)


@pytest.mark.parametrize("form", ["bytes", "stream", "path", "with its type"])
def test_upload_is_accepted_in_every_form_and_streamed(
    client: Any, form: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(TABLE)
    forms: dict[str, Any] = {
        "bytes": TABLE,
        "stream": io.BytesIO(TABLE),
        "path": path,
        "with its type": ("a.csv", TABLE, "text/csv"),
    }
    made = client.files.create(file=forms[form], purpose="user_data")
    assert made.filename == ("a.csv" if form in ("path", "with its type") else "upload")
    with client.files.with_streaming_response.content(made.id) as response:
        assert b"".join(response.iter_bytes(1000)) == TABLE


@pytest.mark.parametrize("purpose", ["assistants", "batch", "evals", "fine-tune", "vision"])
def test_uploads_are_listed_by_purpose(client: Any, purpose: str) -> None:
    client.files.create(file=("a", b"a"), purpose="user_data")
    made = client.files.create(file=("b", b"b"), purpose=purpose)
    assert (made.purpose, list(client.files.list(purpose=purpose))) == (purpose, [made])


def test_uploads_are_listed_in_pages_in_both_orders(client: Any) -> None:
    for name in "abc":
        client.files.create(file=(name, b"x"), purpose="user_data")
    assert [each.filename for each in client.files.list(limit=1)] == ["c", "b", "a"]
    assert [each.filename for each in client.files.list(limit=2, order="asc")] == ["a", "b", "c"]


def test_upload_expires_at_the_requested_time(client: Any) -> None:
    until: Any = {"anchor": "created_at", "seconds": 3600}
    made = client.files.create(file=("a", b"x"), purpose="user_data", expires_after=until)
    assert made.expires_at == made.created_at + 3600


def test_unknown_purpose_is_refused(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("a", b"x"), purpose="fun")
    assert (caught.value.param, caught.value.code) == ("purpose", "invalid_value")


def test_upload_of_another_key_is_not_found(connect: Any) -> None:
    made = connect().files.create(file=("a", b"x"), purpose="user_data")
    other = connect()
    with pytest.raises(openai.NotFoundError):
        other.files.retrieve(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(other, Script(READ), file(file_id=made.id))
    assert caught.value.param == "messages[0].content[0].file.file_id"


def test_files_of_a_message_are_written_to_the_sandbox(client: Any) -> None:
    upload = client.files.create(file=("up.txt", b"uploaded"), purpose="user_data")
    script = Script(bash("cd documents; cat up.txt in.csv image-1.gif audio-1.wav"), READ)
    ask(
        client,
        script,
        file(file_id=upload.id),
        file(filename="in.csv", file_data=data_url("text/csv", b"n\n7\n")),
        {"type": "image_url", "image_url": {"url": data_url("image/gif", GIF)}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}},
    )
    assert script.observations() == [stdout_observation("uploadedn\n7\nGIF89a;RIFF")]
    user = script.requests()[0]["messages"][-1]["content"]
    shown = [part["image_url"]["url"] for part in user if part["type"] == "image_url"]
    assert shown == [data_url("image/gif", GIF)]
    notes = [part["text"] for part in user if part["type"] == "text"]
    assert notes[0] == "[Given file: /testbed/documents/up.txt (text/plain, 8 bytes)]"


def test_files_named_by_file_ids_are_written_to_the_sandbox(client: Any) -> None:
    upload = client.files.create(file=("up.txt", b"uploaded"), purpose="assistants")
    script = Script(bash("cat documents/up.txt"), READ)
    ask(client, script, extra_body={"sandbox": {"file_ids": [upload.id]}})
    assert script.observations() == [stdout_observation("uploaded")]


def test_error_for_invalid_file_data_names_the_field(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, Script(READ), file(filename="a", file_data="data:text/csv;base64,%"))
    assert caught.value.param == "messages[0].content[0].file.file_data"


def test_produced_file_is_linked_cited_and_opens_without_a_key(client: Any) -> None:
    script = Script(
        bash("echo 1 > output/t.csv; printf 'GIF89a;' > output/p.gif"),
        submits("Here: [t.csv](sandbox:/testbed/output/t.csv)."),
    )
    done = ask(client, script)
    files = {each["filename"]: each for each in sandbox_of(done)["files"]}
    assert {name: each["bytes"] for name, each in files.items()} == {"t.csv": 2, "p.gif": 7}
    url = files["t.csv"]["url"]
    assert answer(done) == f"Here: [t.csv]({url})."
    with urlopen(url) as opened:
        assert opened.read() == b"1\n"
    message = done.choices[0].message
    cited = {note.url_citation.title: note.url_citation.url for note in message.annotations}
    assert cited == {name: each["url"] for name, each in files.items()}
    (picture,) = message.model_extra["images"]
    assert picture["image_url"]["url"] == data_url("image/gif", GIF)


def test_produced_files_are_listed_in_the_last_chunk(client: Any) -> None:
    script = Script(bash("echo 1 > output/t.csv"), submits("Made."))
    *_, last = ask(client, script, stream=True)
    assert last.choices[0].finish_reason == "stop"
    (made,) = sandbox_of(last)["files"]
    with urlopen(made["url"]) as opened:
        assert opened.read() == b"1\n"
