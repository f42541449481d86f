"""The `containers` resource of the unmodified openai SDK."""

import io
import zipfile
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from policies.sessions import FileLimits
from proxy.models.scripted import call, tool_reply
from tests.clients.test_files_sdk import KEY, MIB, files_server, sdk_client
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.server import EachKey, running_proxy, single_key
from tests.stores import stored_blobs

WITH_KEY = {"authorization": f"Bearer {KEY}"}
WORK = by_history(
    [
        tool_reply(
            call(
                "str_replace_editor", command="create", path="/testbed/output/a.txt", file_text="a"
            ),
            call(
                "str_replace_editor", command="create", path="/testbed/output/x/b.md", file_text="b"
            ),
            call("submit", answer="Done."),
        )
    ]
)
MESSAGES: list[Any] = [{"role": "user", "content": "Files, please."}]


async def test_container_is_created_listed_and_deleted(tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        made = await client.containers.create(
            name="mine",
            expires_after={"anchor": "last_active_at", "minutes": 20},
            memory_limit="4g",
            network_policy={"type": "allowlist", "allowed_domains": ["pypi.org"]},
        )
        plain = await client.containers.create(name="plain")
        listed = [each.id async for each in client.containers.list()]
        named = [each.id async for each in client.containers.list(name="mine")]
        again = await client.containers.retrieve(made.id)
        await client.containers.delete(made.id)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.containers.retrieve(made.id)
        left = [each.id async for each in client.containers.list()]
    fields = made.to_dict()
    assert str(fields.pop("zip_url")).startswith(f"{url}/v1/containers/{made.id}/files/content?")
    assert fields == {
        "id": made.id,
        "object": "container",
        "name": "mine",
        "created_at": made.created_at,
        "status": "running",
        "last_active_at": made.created_at,
        "expires_after": {"anchor": "last_active_at", "minutes": 20},
        "memory_limit": "4g",
        "network_policy": {"type": "allowlist", "allowed_domains": ["pypi.org"]},
    }
    assert plain.expires_after is not None
    assert (plain.expires_after.minutes, plain.memory_limit) == (24 * 60, None)
    assert (again.id, again.name, again.created_at) == (made.id, "mine", made.created_at)
    assert (listed, named, left) == ([plain.id, made.id], [made.id], [plain.id])
    assert missing.value.body == {
        "message": f"Container with id '{made.id}' not found.",
        "type": "invalid_request_error",
        "param": "container_id",
        "code": "not_found",
    }


async def test_deletion_responses_have_openai_shape(tmp_path: Path) -> None:
    async with (
        files_server(tmp_path) as url,
        sdk_client(url) as client,
        httpx.AsyncClient() as http,
    ):
        made = await client.containers.create(name="mine")
        file = await client.containers.files.create(made.id, file=("a.txt", b"a"))
        place = f"{url}/v1/containers/{made.id}"
        answers = [
            (await http.delete(each, headers=WITH_KEY)).json()
            for each in (f"{place}/files/{file.id}", place)
        ]
    assert answers == [
        {"id": file.id, "object": "container.file.deleted", "deleted": True},
        {"id": made.id, "object": "container.deleted", "deleted": True},
    ]


async def test_container_file_is_created_listed_read_and_deleted(tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        box = await client.containers.create(name="mine")
        files = client.containers.files
        made = await files.create(box.id, file=("my data.csv", b"n\n1\n"))
        again = await files.retrieve(made.id, container_id=box.id)
        listed = [file.id async for file in files.list(box.id)]
        content = await files.content.retrieve(made.id, container_id=box.id)
        await files.delete(made.id, container_id=box.id)
        with pytest.raises(openai.NotFoundError):
            await files.retrieve(made.id, container_id=box.id)
        with pytest.raises(openai.NotFoundError):
            await files.content.retrieve(made.id, container_id=box.id)
        left = [file async for file in files.list(box.id)]
    fields = made.to_dict()
    assert str(fields.pop("url")).startswith(
        f"{url}/v1/containers/{box.id}/files/{made.id}/content?"
    )
    assert fields == {
        "id": made.id,
        "object": "container.file",
        "container_id": box.id,
        "created_at": made.created_at,
        "bytes": 4,
        "path": "/testbed/documents/my data.csv",
        "source": "user",
    }
    assert (again.path, listed, left) == (made.path, [made.id], [])
    assert content.content == b"n\n1\n"


async def test_copy_of_an_upload_in_a_container_outlives_the_upload(tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        upload = await client.files.create(file=("a.txt", b"a"), purpose="user_data")
        box = await client.containers.create(name="mine", file_ids=[upload.id])
        second = await client.containers.files.create(box.id, file_id=upload.id)
        await client.files.delete(upload.id)
        paths = [file.path async for file in client.containers.files.list(box.id, order="asc")]
        content = await client.containers.files.content.retrieve(second.id, container_id=box.id)
    assert paths == ["/testbed/documents/a.txt", "/testbed/documents/a-2.txt"]
    assert content.content == b"a"


async def test_run_output_is_listed_in_its_container(tmp_path: Path) -> None:
    async with (
        scripted_backend(WORK) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=EachKey()) as url,
        sdk_client(url) as client,
        sdk_client(url, "sk-other") as other,
    ):
        done = await client.chat.completions.create(model="fake-model", messages=MESSAGES)
        box = await client.containers.retrieve(done.sandbox["container_id"])
        files = [file async for file in client.containers.files.list(box.id, order="asc")]
        put = await client.containers.files.create(box.id, file=("more.txt", b"more"))
        everybodys = [each async for each in other.containers.list()]
        with pytest.raises(openai.NotFoundError):
            await other.containers.files.content.retrieve(files[0].id, container_id=box.id)
    assert [(file.path, file.source) for file in files] == [
        ("/testbed/output/a.txt", "assistant"),
        ("/testbed/output/x/b.md", "assistant"),
    ]
    assert [file.id for file in files] == [each["id"] for each in done.sandbox["files"]]
    assert put.source == "user"
    assert everybodys == []


async def test_container_file_list_can_be_limited_to_a_directory(tmp_path: Path) -> None:
    async with (
        scripted_backend(WORK) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        sdk_client(url) as client,
    ):
        done = await client.chat.completions.create(model="fake-model", messages=MESSAGES)
        found = {}
        for path in ("/testbed/output", "/testbed/output/x/", "/testbed/output/a", "/"):
            page = await client.containers.files.list(
                done.sandbox["container_id"], extra_query={"path": path}
            )
            found[path] = sorted(file.path for file in page.data)
    both = ["/testbed/output/a.txt", "/testbed/output/x/b.md"]
    assert found == {
        "/testbed/output": both,
        "/testbed/output/x/": both[1:],
        "/testbed/output/a": [],
        "/": both,
    }


async def test_container_files_are_downloaded_as_zip_with_the_link_or_the_key(
    tmp_path: Path,
) -> None:
    async with (
        scripted_backend(WORK) as backend,
        running_proxy(backend, "memory", tmp_path, keyring=single_key(KEY)) as url,
        sdk_client(url) as client,
        httpx.AsyncClient() as browser,
    ):
        done = await client.chat.completions.create(model="fake-model", messages=MESSAGES)
        box = await client.containers.retrieve(done.sandbox["container_id"])
        bare = f"{url}/v1/containers/{box.id}/files/content?format=zip"
        by_link = await browser.get(str(box.to_dict()["zip_url"]))
        by_key = await browser.get(bare, headers=WITH_KEY)
        part = await browser.get(f"{bare}&path=/testbed/output/x", headers=WITH_KEY)
        refused = await browser.get(bare)
        odd = await browser.get(bare.replace("zip", "tar"), headers=WITH_KEY)
        unknown = await browser.get(bare.replace(box.id, "cntr_1"), headers=WITH_KEY)
    whole = {"output/a.txt": b"a", "output/x/b.md": b"b"}
    assert unzipped(by_link) == unzipped(by_key) == whole
    assert unzipped(part) == {"output/x/b.md": b"b"}
    assert by_link.headers["content-type"] == "application/zip"
    assert by_link.headers["content-disposition"] == f'attachment; filename="{box.id}.zip"'
    assert by_link.headers["x-content-type-options"] == "nosniff"
    assert [each.status_code for each in (refused, odd, unknown)] == [401, 400, 404]


def unzipped(answer: httpx.Response) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


async def test_container_of_another_key_is_not_found(tmp_path: Path) -> None:
    async with (
        files_server(tmp_path) as url,
        sdk_client(url) as mine,
        sdk_client(url, "sk-other") as other,
    ):
        box = await mine.containers.create(name="mine")
        file = await mine.containers.files.create(box.id, file=("a.txt", b"a"))
        upload = await mine.files.create(file=("a.txt", b"a"), purpose="user_data")
        own = await other.containers.create(name="other")
        files = other.containers.files
        for work in (
            lambda: other.containers.retrieve(box.id),
            lambda: other.containers.delete(box.id),
            lambda: files.create(box.id, file=("b.txt", b"b")),
            lambda: files.create(own.id, file_id=upload.id),
            lambda: files.retrieve(file.id, container_id=box.id),
            lambda: files.retrieve(file.id, container_id=own.id),
            lambda: files.delete(file.id, container_id=box.id),
            lambda: files.content.retrieve(file.id, container_id=box.id),
            lambda: other.containers.create(name="x", file_ids=[upload.id]),
        ):
            with pytest.raises(openai.NotFoundError):
                await work()
        with pytest.raises(openai.NotFoundError):
            await files.list(box.id)
        assert [each.id async for each in other.containers.list()] == [own.id]
        assert [each.id async for each in mine.containers.files.list(box.id)] == [file.id]


async def test_container_files_count_against_the_storage_quota(tmp_path: Path) -> None:
    limits = FileLimits(max_file_mib=1, quota_mib=1)
    async with files_server(tmp_path, file_limits=limits) as url, sdk_client(url) as client:
        upload = await client.files.create(file=("a", b"x" * (MIB // 2 + 1)), purpose="user_data")
        box = await client.containers.create(name="mine")
        with pytest.raises(openai.BadRequestError) as full:
            await client.containers.files.create(box.id, file_id=upload.id)
        with pytest.raises(openai.BadRequestError):
            await client.containers.create(name="second", file_ids=[upload.id])
        with pytest.raises(openai.APIStatusError) as large:
            await client.containers.files.create(box.id, file=("b", b"x" * (MIB + 1)))
        await client.containers.files.create(box.id, file=("b", b"x" * (MIB // 2 - 1)))
        assert [each.id async for each in client.containers.list()] == [box.id]
        await client.containers.delete(box.id)
        again = await client.containers.create(name="third", file_ids=[])
        await client.containers.files.create(again.id, file=("b", b"x" * (MIB // 2 - 1)))
    assert full.value.code == "storage_quota_exceeded"
    assert (large.value.status_code, large.value.code) == (413, "file_too_large")
    assert len(stored_blobs(tmp_path)) == 2


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "name", "missing_required_parameter"),
        ([], None, None),
        ({"name": 1}, "name", "invalid_type"),
        ({"name": "x" * 513}, "name", "string_above_max_length"),
        ({"name": "x", "memory_limit": "2g"}, "memory_limit", "invalid_value"),
        ({"name": "x", "memory_limit": []}, "memory_limit", "invalid_type"),
        ({"name": "x", "expires_after": 20}, "expires_after", "invalid_type"),
        ({"name": "x", "expires_after": {}}, "expires_after.anchor", "missing_required_parameter"),
        (
            {"name": "x", "expires_after": {"anchor": "last_active_at"}},
            "expires_after.minutes",
            "missing_required_parameter",
        ),
        (
            {"name": "x", "expires_after": {"anchor": "last_active_at", "minutes": 0}},
            "expires_after.minutes",
            "integer_below_min_value",
        ),
        (
            {"name": "x", "expires_after": {"anchor": "last_active_at", "minutes": 10**30}},
            "expires_after.minutes",
            "integer_above_max_value",
        ),
        ({"name": "x", "file_ids": "file-1"}, "file_ids", "invalid_type"),
        ({"name": "x", "file_ids": ["f"] * 101}, "file_ids", "array_above_max_length"),
        (
            {"name": "x", "expires_after": {"anchor": "last_active_at", "minutes": "5"}},
            "expires_after.minutes",
            "invalid_type",
        ),
        ({"name": "x", "skills": [{"type": "inline"}]}, "skills", "unsupported_parameter"),
        ({"name": "x", "skills": {}}, "skills", "unsupported_parameter"),
        ({"name": "x", "network_policy": "open"}, "network_policy", "invalid_type"),
        ({"name": "x", "network_policy": {}}, "network_policy.type", "missing_required_parameter"),
        ({"name": "x", "network_policy": {"type": "open"}}, "network_policy.type", "invalid_value"),
        (
            {"name": "x", "network_policy": {"type": "allowlist", "allowed_domains": []}},
            "network_policy.allowed_domains",
            "empty_array",
        ),
        (
            {"name": "x", "network_policy": {"type": "disabled", "domain_secrets": [1]}},
            "network_policy.domain_secrets",
            "unsupported_parameter",
        ),
    ],
)
async def test_container_error_names_the_invalid_field(
    body: object, param: str | None, code: str | None, tmp_path: Path
) -> None:
    async with files_server(tmp_path) as url, httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/v1/containers", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


async def test_lone_surrogate_in_a_container_request_causes_no_server_error(tmp_path: Path) -> None:
    headers = {"content-type": "application/json"}
    async with files_server(tmp_path) as url, httpx.AsyncClient(headers=headers) as client:
        made = await client.post(f"{url}/v1/containers", content=rb'{"name": "a\ud800"}')
        missing = await client.post(
            f"{url}/v1/containers", content=rb'{"name": "a", "file_ids": ["\ud800"]}'
        )
    assert (made.status_code, made.json()["name"]) == (200, "a?")
    assert missing.status_code == 404


@pytest.mark.parametrize("body", [b"{}", b"[]", b"no JSON", b'{"file_id": 1}'])
async def test_container_file_without_content_is_refused(body: bytes, tmp_path: Path) -> None:
    headers = {"content-type": "application/json", **WITH_KEY}
    async with (
        files_server(tmp_path) as url,
        sdk_client(url) as client,
        httpx.AsyncClient() as http,
    ):
        box = await client.containers.create(name="mine")
        place = f"{url}/v1/containers/{box.id}/files"
        answer = await http.post(place, content=body, headers=headers)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_container_file_accepts_either_content_or_an_upload_id(
    tmp_path: Path,
) -> None:
    async with (
        files_server(tmp_path) as url,
        sdk_client(url) as client,
        httpx.AsyncClient() as http,
    ):
        upload = await client.files.create(file=("a.txt", b"a"), purpose="user_data")
        box = await client.containers.create(name="mine")
        place = f"{url}/v1/containers/{box.id}/files"
        given = {"file": ("b.txt", b"b")}, {"file_id": (None, upload.id)}
        answers = [
            await http.post(place, files=files, headers=WITH_KEY)
            for files in (*given, given[0] | given[1])
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert answers[1].json()["path"] == "/testbed/documents/a.txt"
    assert answers[2].json()["error"]["param"] == "file_id"


async def test_invalid_container_list_query_is_refused(tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, httpx.AsyncClient() as client:
        answers = [
            await client.get(f"{url}/v1/containers?{query}")
            for query in ("limit=0", "limit=101", "order=up", "after=cntr_unknown")
        ]
    assert [answer.status_code for answer in answers] == [400] * 4
    params = [answer.json()["error"]["param"] for answer in answers]
    assert params == ["limit", "limit", "order", "after"]


async def test_containers_can_be_deleted_while_listing(tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        for name in "abcde":
            await client.containers.create(name=name)
        async for box in client.containers.list(limit=2):
            await client.containers.delete(box.id)
        assert [box async for box in client.containers.list()] == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PUT", ""),
        ("PATCH", "/cntr_1"),
        ("PUT", "/cntr_1/files"),
        ("POST", "/cntr_1/files/cfile_1"),
    ],
)
async def test_unsupported_container_methods_return_openai_errors(
    method: str, path: str, tmp_path: Path
) -> None:
    async with files_server(tmp_path) as url, httpx.AsyncClient() as client:
        answer = await client.request(method, f"{url}/v1/containers{path}")
    assert answer.status_code == 405
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
