"""The `files` resource of the unmodified openai SDK."""

import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest

from policies.sessions import FileLimits
from proxy.keys import Keyring
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.server import EachKey, running_proxy, single_key
from tests.stores import blob_files, stored_blobs

MIB = 1 << 20
LIMITS = FileLimits(max_file_mib=1, quota_mib=2)
KEY = "sk-mine"


@asynccontextmanager
async def files_server(state_dir: Path, **changes: Any) -> AsyncIterator[str]:
    """Serve with a keyring that accepts each key as its own owner."""
    settings = {"file_limits": LIMITS, "keyring": EachKey(), **changes}
    with anyio.fail_after(20):
        async with (
            scripted_backend(by_history([])) as backend,
            running_proxy(backend, "memory", state_dir, **settings) as url,
        ):
            yield url


@asynccontextmanager
async def sdk_client(url: str, key: str = KEY) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        yield client


async def test_file_is_uploaded_listed_read_and_deleted(tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        made = await client.files.create(file=("a.csv", b"n\n1\n"), purpose="user_data")
        again = await client.files.retrieve(made.id)
        listed = [file async for file in client.files.list()]
        content = await client.files.content(made.id)
        gone = await client.files.delete(made.id)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.files.retrieve(made.id)
    assert made.to_dict() == {
        "id": made.id,
        "object": "file",
        "bytes": 4,
        "created_at": made.created_at,
        "expires_at": made.created_at + 30 * 24 * 3600,
        "filename": "a.csv",
        "purpose": "user_data",
        "status": "processed",
    }
    assert again == made
    assert listed == [made]
    assert content.content == b"n\n1\n"
    assert content.response.headers["content-disposition"] == 'attachment; filename="a.csv"'
    assert content.response.headers["x-content-type-options"] == "nosniff"
    assert gone.to_dict() == {"id": made.id, "object": "file", "deleted": True}
    assert missing.value.body == {
        "message": f"No such File object: {made.id}",
        "type": "invalid_request_error",
        "param": "id",
        "code": "not_found",
    }
    assert stored_blobs(tmp_path) == {}


async def test_uploads_survive_a_restart(tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        made = await client.files.create(file=("a.txt", b"hello"), purpose="assistants")
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).content == b"hello"


async def test_upload_of_another_key_is_not_found(tmp_path: Path) -> None:
    async with (
        files_server(tmp_path) as url,
        sdk_client(url) as mine,
        sdk_client(url, "sk-other") as other,
    ):
        made = await mine.files.create(file=("a.txt", b"a"), purpose="user_data")
        assert [file async for file in other.files.list()] == []
        for work in (other.files.retrieve, other.files.content, other.files.delete):
            with pytest.raises(openai.NotFoundError):
                await work(made.id)
        assert (await mine.files.content(made.id)).content == b"a"


@pytest.mark.parametrize(
    "purpose", ["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
)
async def test_every_openai_purpose_is_accepted(purpose: Any, tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        made = await client.files.create(file=b"bytes without a name", purpose=purpose)
        listed = [file async for file in client.files.list(purpose=purpose)]
        others = [file async for file in client.files.list(purpose="something else")]
    assert (made.purpose, made.filename) == (purpose, "upload")
    assert (listed, others) == ([made], [])


async def test_uploads_are_listed_in_pages_in_both_orders(tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        for name in "abcde":
            await client.files.create(file=(name, b"x"), purpose="user_data")
        newest = [file.filename async for file in client.files.list(limit=2)]
        oldest = [file.filename async for file in client.files.list(limit=2, order="asc")]
        part = await client.files.list(limit=2)
        body = part.to_dict()
    assert (newest, oldest) == (list("edcba"), list("abcde"))
    assert [file.filename for file in part.data] == ["e", "d"]
    assert {key: body[key] for key in ("object", "first_id", "last_id", "has_more")} == {
        "object": "list",
        "first_id": part.data[0].id,
        "last_id": part.data[1].id,
        "has_more": True,
    }


async def test_uploads_can_be_deleted_while_listing(tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        for name in "abcde":
            await client.files.create(file=(name, b"x"), purpose="user_data")
        async for file in client.files.list(limit=2):
            await client.files.delete(file.id)
        assert [file async for file in client.files.list()] == []


async def test_upload_expires_at_the_requested_time(tmp_path: Path) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        made = await client.files.create(
            file=("a", b"x"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
    assert made.expires_at == made.created_at + 3600


async def test_upload_expiry_is_capped_by_the_server_limit(tmp_path: Path) -> None:
    limits = FileLimits(retention_hours=2)
    async with files_server(tmp_path, file_limits=limits) as url, sdk_client(url) as client:
        made = await client.files.create(
            file=("a", b"x"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 2592000},
        )
    assert made.expires_at == made.created_at + 7200


async def test_file_over_the_limit_is_refused_with_413(
    tmp_path: Path,
) -> None:
    async with files_server(tmp_path) as url, sdk_client(url) as client:
        whole = await client.files.create(file=io.BytesIO(b"x" * MIB), purpose="user_data")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=io.BytesIO(b"x" * 2 * MIB), purpose="user_data")
    assert whole.bytes == MIB
    assert refused.value.status_code == 413
    assert refused.value.body == {
        "message": "The file is larger than 1 MiB, the most that is allowed.",
        "type": "invalid_request_error",
        "param": "file",
        "code": "file_too_large",
    }
    assert list(map(len, stored_blobs(tmp_path).values())) == [MIB]


async def test_storage_quota_is_per_key_and_deletion_frees_space(tmp_path: Path) -> None:
    megabyte = b"x" * MIB
    async with (
        files_server(tmp_path) as url,
        sdk_client(url) as client,
        sdk_client(url, "sk-other") as other,
    ):
        first, _ = [
            await client.files.create(file=("a", megabyte), purpose="user_data") for _ in "12"
        ]
        with pytest.raises(openai.BadRequestError) as full:
            await client.files.create(file=("b", b"x"), purpose="user_data")
        assert len(stored_blobs(tmp_path)) == 2
        await other.files.create(file=("b", b"x"), purpose="user_data")
        await client.files.delete(first.id)
        await client.files.create(file=("b", megabyte), purpose="user_data")
    assert (full.value.code, full.value.param) == ("storage_quota_exceeded", "file")


async def test_file_over_the_quota_is_not_written_to_disk(tmp_path: Path) -> None:
    limits = FileLimits(max_file_mib=8, quota_mib=2)
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    sizes: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        yield part
        for _ in range(6):
            yield bytes(MIB)
            sizes.extend(path.stat().st_size for path in blob_files(tmp_path).iterdir())
        yield b"\r\n--x--\r\n"

    length = len(part) + 6 * MIB + len(b"\r\n--x--\r\n")
    headers = {"content-type": "multipart/form-data; boundary=x", "content-length": str(length)}
    async with files_server(tmp_path, file_limits=limits) as url, httpx.AsyncClient() as client:
        refused = await client.post(f"{url}/v1/files", content=body(), headers=headers)
    assert refused.json()["error"]["code"] == "storage_quota_exceeded"
    assert sizes == []


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "purpose", "missing_required_parameter"),
        ({"purpose": "fun"}, "purpose", "invalid_value"),
        (
            {"purpose": "batch", "expires_after[anchor]": "never"},
            "expires_after.anchor",
            "invalid_value",
        ),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at"},
            "expires_after.seconds",
            "missing_required_parameter",
        ),
        (
            {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "soon",
            },
            "expires_after.seconds",
            "invalid_type",
        ),
        (
            {
                "purpose": "batch",
                "expires_after[anchor]": "created_at",
                "expires_after[seconds]": "60",
            },
            "expires_after.seconds",
            "integer_below_min_value",
        ),
        ({"purpose": "batch", "expires_after": "soon"}, "expires_after", "invalid_type"),
        (
            {"purpose": "batch", "expires_after": '{"anchor": "created_at", "seconds": 60}'},
            "expires_after.seconds",
            "integer_below_min_value",
        ),
        (
            {"purpose": "batch", "expires_after": "{}"},
            "expires_after.anchor",
            "missing_required_parameter",
        ),
        ({"purpose": "batch", "x": "y" * 70_000}, "x", None),
    ],
)
async def test_upload_error_names_the_invalid_field(
    fields: dict[str, str], param: str, code: str | None, tmp_path: Path
) -> None:
    async with files_server(tmp_path) as url, httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/v1/files", data=fields, files={"file": ("a", b"x")})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["type"] == "invalid_request_error"
    assert stored_blobs(tmp_path) == {}


FORM = "multipart/form-data; boundary=b"
PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx'


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("", b""),
        ("multipart/form-data", PART),
        (FORM, b""),
        (FORM, b"not a form"),
        (FORM, PART),
        (FORM, PART + b"\r\n--b--\r\n"),
        (FORM, PART + b"\r\n" + PART + b"\r\n--b--\r\n"),
        (FORM, b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'),
        (FORM, b"--b\r\n" + b"X: y\r\n" * 1000),
        (f"multipart/form-data; boundary={'b' * 1000}", PART),
    ],
)
async def test_malformed_upload_form_is_refused(
    content_type: str, body: bytes, tmp_path: Path
) -> None:
    async with files_server(tmp_path) as url, httpx.AsyncClient() as client:
        headers = {"content-type": content_type}
        answer = await client.post(f"{url}/v1/files", content=body, headers=headers)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert stored_blobs(tmp_path) == {}


async def test_file_may_precede_the_form_fields(tmp_path: Path) -> None:
    field = b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    async with files_server(tmp_path) as url, httpx.AsyncClient() as client:
        answer = await client.post(
            f"{url}/v1/files", content=PART + field, headers={"content-type": FORM}
        )
    assert (answer.status_code, answer.json()["purpose"]) == (200, "batch")


@pytest.mark.parametrize(
    ("query", "param", "code"),
    [
        ("limit=0", "limit", "integer_below_min_value"),
        ("limit=10001", "limit", "integer_above_max_value"),
        ("limit=ten", "limit", "invalid_type"),
        ("limit=" + "9" * 5000, "limit", "invalid_type"),
        ("order=up", "order", "invalid_value"),
        ("after=file-unknown", "after", "invalid_value"),
    ],
)
async def test_invalid_upload_list_query_is_refused(
    query: str, param: str, code: str, tmp_path: Path
) -> None:
    async with files_server(tmp_path) as url, httpx.AsyncClient() as client:
        answer = await client.get(f"{url}/v1/files?{query}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)


async def test_wrong_key_can_neither_read_nor_store_uploads(tmp_path: Path) -> None:
    async with (
        files_server(tmp_path, keyring=single_key(KEY)) as url,
        sdk_client(url, "sk-wrong") as client,
    ):
        for work in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.AuthenticationError):
                await work("file-1")
        with pytest.raises(openai.AuthenticationError):
            await client.files.list()
        with pytest.raises(openai.AuthenticationError):
            await client.files.create(file=("a", b"x"), purpose="user_data")
    assert stored_blobs(tmp_path) == {}


async def test_aborted_upload_leaves_no_blob(tmp_path: Path) -> None:
    begun = anyio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield PART
        yield b"x" * (MIB // 2)
        begun.set()
        await anyio.sleep_forever()

    async with (
        files_server(tmp_path) as url,
        httpx.AsyncClient(headers={"content-type": FORM}) as client,
        anyio.create_task_group() as tasks,
    ):

        async def upload() -> None:
            await client.post(f"{url}/v1/files", content=half())

        tasks.start_soon(upload)
        await begun.wait()
        tasks.cancel_scope.cancel()
    assert stored_blobs(tmp_path) == {}


@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/files"), ("POST", "/v1/files/file-1")])
async def test_unsupported_upload_methods_return_openai_errors(
    method: str, path: str, tmp_path: Path
) -> None:
    async with files_server(tmp_path) as url, httpx.AsyncClient() as client:
        answer = await client.request(method, url + path)
    assert answer.status_code == 405
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_all_keys_of_an_open_server_share_one_quota(tmp_path: Path) -> None:
    """Made-up keys once had a quota each, so their total had no limit."""
    keys = [f"sk-made-up-{number}" for number in range(LIMITS.quota_mib + 2)]
    refused: list[openai.BadRequestError] = []
    async with files_server(tmp_path, keyring=Keyring()) as url:
        for key in keys:
            async with sdk_client(url, key) as client:
                try:
                    await client.files.create(file=("a", b"x" * MIB), purpose="user_data")
                except openai.BadRequestError as error:
                    refused.append(error)
    assert [error.code for error in refused] == ["storage_quota_exceeded"] * 2
