"""Containers and their files: of the client and of runs."""

import io
import zipfile
from typing import Any
from urllib.request import urlopen

import openai
import pytest
from chat import ask, sandbox_of
from model import Script, bash, stdout_observation, submits

READ = submits("Read.")


def test_container_is_created_listed_and_deleted(client: Any) -> None:
    after: Any = {"anchor": "last_active_at", "minutes": 20}
    made = client.containers.create(name="box", expires_after=after, memory_limit="1g")
    assert (made.name, made.status, made.memory_limit) == ("box", "running", "1g")
    assert made.expires_after.minutes == 20
    other = client.containers.create(name="other")
    assert client.containers.retrieve(made.id).id == made.id
    assert [each.id for each in client.containers.list(limit=1)] == [other.id, made.id]
    assert [each.id for each in client.containers.list(name="box")] == [made.id]
    client.containers.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.containers.retrieve(made.id)


def test_container_file_is_created_read_and_deleted(client: Any) -> None:
    box = client.containers.create(name="box")
    files = client.containers.files
    made = files.create(box.id, file=("a.txt", b"put in"))
    assert (made.path, made.source, made.bytes) == ("/testbed/documents/a.txt", "user", 6)
    assert files.retrieve(made.id, container_id=box.id).path == made.path
    assert [each.id for each in files.list(box.id)] == [made.id]
    assert files.content.retrieve(made.id, container_id=box.id).read() == b"put in"
    files.delete(made.id, container_id=box.id)
    assert list(files.list(box.id)) == []
    with pytest.raises(openai.NotFoundError):
        files.content.retrieve(made.id, container_id=box.id)


def test_uploads_are_copied_into_a_container(client: Any) -> None:
    first = client.files.create(file=("a.txt", b"a"), purpose="user_data")
    second = client.files.create(file=("b.txt", b"b"), purpose="user_data")
    box = client.containers.create(name="box", file_ids=[first.id])
    client.containers.files.create(box.id, file_id=second.id)
    client.files.delete(first.id)
    script = Script(bash("cd documents; cat a.txt b.txt"), READ)
    ask(client, script, extra_body={"sandbox": {"container_id": box.id}})
    assert script.observations() == [stdout_observation("ab")]


def test_run_output_is_read_from_its_container(client: Any) -> None:
    script = Script(
        bash("mkdir output/x; echo 1 > output/a.txt; echo 2 > output/x/b.txt"), submits("Made.")
    )
    done = ask(client, script)
    box = client.containers.retrieve(sandbox_of(done)["container_id"])
    files = list(client.containers.files.list(box.id, order="asc"))
    assert {(each.path, each.source) for each in files} == {
        ("/testbed/output/a.txt", "assistant"),
        ("/testbed/output/x/b.txt", "assistant"),
    }
    read = client.containers.files.content.retrieve
    assert {read(each.id, container_id=box.id).read() for each in files} == {b"1\n", b"2\n"}
    below = client.containers.files.list(box.id, extra_query={"path": "/testbed/output/x"})
    assert [each.path for each in below] == ["/testbed/output/x/b.txt"]


def test_all_files_are_downloaded_as_zip(client: Any) -> None:
    done = ask(client, Script(bash("echo 1 > output/a.txt"), submits("Made.")))
    box = client.containers.retrieve(sandbox_of(done)["container_id"])
    with urlopen(box.zip_url) as opened:
        archive = zipfile.ZipFile(io.BytesIO(opened.read()))
    (name,) = archive.namelist()
    assert (name.rpartition("/")[2], archive.read(name)) == ("a.txt", b"1\n")


def test_container_of_another_key_is_not_found(connect: Any) -> None:
    box = connect().containers.create(name="box")
    other = connect()
    assert list(other.containers.list()) == []
    with pytest.raises(openai.NotFoundError):
        other.containers.retrieve(box.id)
    with pytest.raises(openai.NotFoundError):
        other.containers.files.create(box.id, file=("a.txt", b"a"))
