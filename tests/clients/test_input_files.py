"""Files in requests of the openai SDK: written to the sandbox, and described to the model."""

import base64
import re
from pathlib import Path
from typing import Any

import anyio
import openai
import pytest
from openai.types.chat import ChatCompletion

from policies.isolation import Isolation
from policies.profile import Profile
from policies.workspace import INPUT_DIR, InputLimits
from proxy.inputs import InputLoader
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.profiles import Profiles
from tests.clients.openai_errors import openai_client, request_error
from tests.fakes.backend import ScriptedBackend, by_history, scripted_backend
from tests.fakes.server import KINDS, REAL_KINDS, EachKey, Kind, running_proxy
from tests.fakes.uploads import DirectoryUploads

CSV, PNG, WAV = b"n,square\n1,1\n", b"\x89PNG pixels", b"RIFF sound"
SUBMIT = tool_reply(call("submit", answer="done"))
QUESTION = {"type": "text", "text": "What is it?"}
BOOK = "".join(f"Line {number} of the book.\n" for number in range(3000))


def data_url(mime_type: str, data: bytes) -> str:
    return f"data:{mime_type};base64,{base64.b64encode(data).decode()}"


def file_part(data: bytes = CSV, **file: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"file_data": base64.b64encode(data).decode(), **file}}


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}


def print_files_script(*names: str) -> Any:
    """Return a script that prints the files and then submits."""
    command = "; ".join(f"cat {INPUT_DIR}/{name}; echo" for name in names)
    return by_history([tool_reply(call("execute_bash", command=command)), SUBMIT])


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


async def complete(url: str, messages: list[Any], key: str = "none", **body: Any) -> ChatCompletion:
    async with openai_client(url, key) as client:
        with anyio.fail_after(30):
            completion = await client.chat.completions.create(
                model="fake-model", messages=messages, extra_body=body
            )
    assert isinstance(completion, ChatCompletion)
    return completion


def user_content(backend: ScriptedBackend, number: int = 0) -> Any:
    """Return the content of the first user message in a backend request."""
    messages = backend.requests[number].body["messages"]
    return next(each["content"] for each in messages if each["role"] == "user")


def first_observation(backend: ScriptedBackend) -> str:
    """Return the output of the first command."""
    (tool,) = (each for each in backend.requests[1].body["messages"] if each["role"] == "tool")
    return str(tool["content"]).replace("Exit code: 0\n[stdout]\n", "")


def texts_of(content: Any) -> list[str]:
    return [part["text"] for part in content if part["type"] == "text"]


@pytest.mark.parametrize("kind", KINDS)
async def test_file_of_each_content_part_type_is_in_the_sandbox_and_a_note_gives_its_path(
    kind: Kind, tmp_path: Path
) -> None:
    image = image_part(data_url("image/png", PNG))
    parts = [
        QUESTION,
        {"type": "file", "file": {"filename": "a b.csv", "file_data": data_url("text/csv", CSV)}},
        file_part(filename="../b.csv"),
        image,
        {"type": "input_audio", "input_audio": {"data": file_data(WAV), "format": "wav"}},
        image_part(data_url("application/pdf", b"%PDF")),
        {"type": "input_file", "filename": "c.txt", "file_data": data_url("text/plain", b"c")},
        {"type": "video_url", "video_url": {"url": data_url("video/mp4", b"mp4")}},
        {"type": "audio_url", "audio_url": {"url": data_url("audio/mpeg", b"mp3")}},
        {"type": "input_text", "text": "Say."},
    ]
    names = ["a_b.csv", "b.csv", "image-1.png", "audio-1.wav", "file-1.pdf", "c.txt"]
    names += ["video-1.mp4", "audio-2.mp3"]
    async with (
        scripted_backend(print_files_script(*names)) as backend,
        running_proxy(backend, kind, tmp_path) as url,
    ):
        await complete(url, user(*parts))
    content = user_content(backend)
    notes = [
        re.fullmatch(r"\[.*?(/testbed/\S+) \((\S+), (\d+) bytes\)\]", t) for t in texts_of(content)
    ]
    assert [found.groups() for found in notes if found] == [
        (f"{INPUT_DIR}/a_b.csv", "text/csv", "13"),
        (f"{INPUT_DIR}/b.csv", "text/csv", "13"),
        (f"{INPUT_DIR}/image-1.png", "image/png", "11"),
        (f"{INPUT_DIR}/audio-1.wav", "audio/wav", "10"),
        (f"{INPUT_DIR}/file-1.pdf", "application/pdf", "4"),
        (f"{INPUT_DIR}/c.txt", "text/plain", "1"),
        (f"{INPUT_DIR}/video-1.mp4", "video/mp4", "3"),
        (f"{INPUT_DIR}/audio-2.mp3", "audio/mpeg", "3"),
    ]
    assert [content[0], content[3], content[-1]] == [
        QUESTION,
        image,
        {"type": "text", "text": "Say."},
    ]
    assert {part["type"] for part in content} == {"text", "image_url"}
    shown = first_observation(backend).encode().replace("\ufffd".encode(), b"\x89")
    assert shown.rstrip() == b"\n".join([CSV, CSV, PNG, WAV, b"%PDF", b"c", b"mp4", b"mp3"])


def file_data(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_model_modalities_decide_which_parts_are_sent(tmp_path: Path) -> None:
    image = {"type": "input_image", "image_url": data_url("image/png", PNG), "detail": "low"}
    audio = {"type": "input_audio", "input_audio": {"data": file_data(WAV), "format": "wav"}}
    async with scripted_backend(by_history([SUBMIT])) as backend:
        for inputs in (
            InputLoader(),
            InputLoader(modalities=()),
            InputLoader(modalities=("audio",)),
        ):
            async with running_proxy(backend, "memory", tmp_path, inputs=inputs) as url:
                await complete(url, user(image, audio))
    sees, reads, hears = (user_content(backend, number) for number in range(3))
    as_chat = {"type": "image_url", "image_url": {"url": image["image_url"], "detail": "low"}}
    assert [part for part in sees if part["type"] != "text"] == [as_chat]
    assert [part["type"] for part in reads] == ["text", "text"]
    assert [part for part in hears if part["type"] != "text"] == [audio]


async def test_svg_image_becomes_a_file_only(tmp_path: Path) -> None:
    drawing = image_part("data:image/svg+xml;utf8,<svg/>")
    async with (
        scripted_backend(by_history([SUBMIT])) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        await complete(url, user(drawing))
    note = f"[Given file: {INPUT_DIR}/file-1.svg (image/svg+xml, 6 bytes)]"
    assert user_content(backend) == [{"type": "text", "text": note}]


async def test_request_with_the_plain_suffix_keeps_its_files_in_the_message(tmp_path: Path) -> None:
    messages = user(QUESTION, file_part(filename="a.csv"), {"type": "input_text", "text": BOOK})
    async with (
        scripted_backend([text_reply("Hi.")]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        await client.chat.completions.create(model="fake-model:plain", messages=messages)
    assert backend.requests[0].body["messages"] == messages


async def test_continued_conversation_with_files_keeps_its_prompt_prefix(tmp_path: Path) -> None:
    first = user(QUESTION, file_part(filename="a.csv"), image_part(data_url("image/png", PNG)))
    second = [
        *first,
        {"role": "assistant", "content": "A table."},
        *user(file_part(b"other", filename="a.csv"), image_part(data_url("image/png", PNG))),
    ]
    async with (
        scripted_backend(lambda body: SUBMIT) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
    ):
        await complete(url, first)
        await complete(url, second)
    before, after = (seen.body["messages"] for seen in backend.requests)
    assert after[: len(before)] == before
    paths = re.findall(r"/testbed/documents/\S+", str(after[1:]))
    assert [path.rpartition("/")[2] for path in paths] == [
        "a.csv",
        "image-1.png",
        "a-2.csv",
        "image-1.png",
    ]


@pytest.mark.parametrize("kind", REAL_KINDS)
async def test_long_text_of_a_prompt_is_moved_to_a_file_that_the_prompt_names(
    kind: Kind, tmp_path: Path
) -> None:
    command = f"wc -c < {INPUT_DIR}/message-1.txt; sed -n 1501p {INPUT_DIR}/message-1.txt"
    script = by_history([tool_reply(call("execute_bash", command=command)), SUBMIT])
    async with scripted_backend(script) as backend, running_proxy(backend, kind, tmp_path) as url:
        await complete(url, [{"role": "user", "content": f"{BOOK}\nWho wrote it?"}])
    content = user_content(backend)
    assert f"is the file {INPUT_DIR}/message-1.txt:" in content
    assert content.startswith("Line 0 of the book.\n")
    assert content.endswith("\nWho wrote it?")
    assert len(content) < 3000
    assert first_observation(backend).split("\n")[:2] == [
        str(len(BOOK) + 14),
        "Line 1500 of the book.",
    ]


@pytest.mark.parametrize(
    ("part", "field", "words"),
    [
        (file_part(file_data="data:text/csv;base64,Y"), "file.file_data", "cut off"),
        (file_part(file_data="a,b"), "file.file_data", "not of base64"),
        (file_part(file_data="data:text/csv"), "file.file_data", "no comma"),
        (image_part("data:image/png;base64,%"), "image_url", "not of base64"),
        (image_part("notaurl"), "image_url", "expected a URL (https://...) or a data URL"),
        (image_part("https:/host/a.png"), "image_url", "got 'https:/host/a.png'"),
        (image_part("https:///a.png"), "image_url", "expected a URL"),
        (image_part("//host/a.png"), "image_url", "expected a URL"),
        (image_part(""), "image_url", "got ''"),
        ({"type": "input_image", "image_url": "notaurl"}, "image_url", "got 'notaurl'"),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}}, "video_url", "got 'a.mp4'"),
        ({"type": "file", "file": {"filename": "a.csv"}}, "file.file_id", "Missing required"),
        ({"type": "file", "file": {"file_id": "file-x"}}, "file.file_id", "no file 'file-x'"),
        ({"type": "input_file", "file_id": "file-x"}, "file_id", "no file 'file-x'"),
    ],
)
async def test_error_names_the_content_part_that_is_invalid(
    part: dict[str, Any], field: str, words: str, tmp_path: Path
) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        error = await request_error(client, messages=user(QUESTION, part))
    assert isinstance(error, openai.BadRequestError)
    assert error.param == f"messages[0].content[1].{field}"
    assert words in error.message
    assert backend.requests == []


async def test_files_over_the_single_or_total_limit_are_refused_with_413(tmp_path: Path) -> None:
    profiles = Profiles.only(Profile(inputs=InputLimits(max_file_mib=1, max_total_mib=2)))
    mebibyte = bytes(1 << 20)
    async with (
        scripted_backend([SUBMIT]) as backend,
        running_proxy(backend, "memory", tmp_path, profiles=profiles) as url,
        openai_client(url) as client,
    ):
        alone = await request_error(client, messages=user(file_part(mebibyte + b".")))
        more = [file_part(mebibyte), file_part(mebibyte[1:] + b"."), file_part(b"..")]
        together = await request_error(client, messages=user(*more))
        await complete(url, user(*more[:2], more[0]))
    for error, place in ((alone, 0), (together, 2)):
        assert (error.status_code, error.code) == (413, "file_too_large")
        assert error.param == f"messages[0].content[{place}].file.file_data"


@pytest.mark.parametrize(
    ("file_ids", "param"), [("file-1", "sandbox.file_ids"), ([1], "sandbox.file_ids[0]")]
)
async def test_file_ids_that_are_no_strings_are_refused(
    file_ids: Any, param: str, tmp_path: Path
) -> None:
    async with (
        scripted_backend([]) as backend,
        running_proxy(backend, "memory", tmp_path) as url,
        openai_client(url) as client,
    ):
        error = await request_error(client, extra_body={"sandbox": {"file_ids": file_ids}})
    assert (error.status_code, error.param) == (400, param)


async def test_uploads_are_found_only_with_the_key_that_sent_them(tmp_path: Path) -> None:
    uploads = DirectoryUploads(tmp_path)
    csv, png = uploads.add("mine", "a.csv", CSV), uploads.add("mine", "p.png", PNG)
    messages = user(
        QUESTION,
        {"type": "file", "file": {"file_id": csv}},
        {"type": "input_image", "file_id": png, "detail": "high"},
    )
    beside = {"file_ids": [uploads.add("mine", "notes.txt", b"n"), csv]}
    async with (
        scripted_backend(print_files_script("a.csv", "p.png", "notes.txt")) as backend,
        running_proxy(
            backend, "memory", tmp_path, inputs=InputLoader(uploads=uploads), keyring=EachKey()
        ) as url,
        openai_client(url, "theirs") as other,
    ):
        await complete(url, messages, "mine", sandbox=beside)
        error = await request_error(other, messages=messages)
        foreign = await request_error(other, extra_body={"sandbox": beside})
    assert (error.status_code, error.param) == (400, "messages[0].content[1].file.file_id")
    assert (foreign.status_code, foreign.param) == (400, "sandbox.file_ids[0]")
    shown = {"url": data_url("image/png", PNG), "detail": "high"}
    assert user_content(backend) == [
        QUESTION,
        {"type": "text", "text": f"[Given file: {INPUT_DIR}/a.csv (text/csv, 13 bytes)]"},
        {"type": "image_url", "image_url": shown},
        {
            "type": "text",
            "text": f"[The image above is the file {INPUT_DIR}/p.png (image/png, 11 bytes)]",
        },
        {
            "type": "text",
            "text": f"[Given file: {INPUT_DIR}/notes.txt (text/plain, 1 bytes)]\n"
            f"[Given file: {INPUT_DIR}/a.csv (text/csv, 13 bytes)]",
        },
    ]
    assert "sandbox" not in backend.requests[0].body
    assert first_observation(backend).rstrip().endswith("pixels\nn")


async def test_file_that_exceeds_the_sandbox_disk_is_reported_to_the_model(tmp_path: Path) -> None:
    parts = [file_part(bytes(3 << 20), filename="big.bin"), file_part(filename="a.csv")]
    script = by_history([tool_reply(call("execute_bash", command="ls documents")), SUBMIT])
    small = Isolation(disk_mib=1)
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "bubblewrap", tmp_path, small) as url,
    ):
        await complete(url, user(*parts))
    note, *rest = first_observation(backend).split("\n")
    assert note.startswith(f"[the given file {INPUT_DIR}/big.bin is not in the sandbox: ")
    assert "No space left" in note
    assert rest[0] == "a.csv"
