"""The tasks of `examples/paper`: each script plays in a real sandbox and produces its files."""

import contextlib
import io
import os
import re
import struct
import sys
import wave
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import anyio
import pytest
import yaml

from proxy.models.scripted import read_scripts
from sandbox_runtime.backends.docker_sdk import connect
from sandbox_runtime.errors import SandboxStartError
from tests.e2e.proxy_process import environment
from tests.fakes.backend import by_history, scripted_backend
from tests.fakes.server import running_proxy
from tests.sandbox_runtime.image.containers import full_image

PAPER = Path(__file__).parents[1] / "examples" / "paper"
RUN = PAPER / "run.py"
PATHS = sorted(PAPER.glob("*.yaml"))
TASKS: dict[str, dict[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in PATHS
}
PLAIN = ("biomedicine", "instructions", "long_context", "mathematics", "travel")
"""The tasks whose scripts need only Python's standard library and run without the full image."""
TIMEOUT_S = 120
LINK = re.compile(r"\[([^\]]+)\]\(http[^)]+\)")


# The files of the tasks


def test_paper_examples_have_ten_tasks_named_as_their_files() -> None:
    assert len(TASKS) == 10
    assert [task["name"] for task in TASKS.values()] == list(TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_paper_example_task_has_a_prompt_expectations_and_a_script(name: str) -> None:
    task = TASKS[name]
    assert set(task) - {"documents"} == {"name", "prompt", "expect", "replies"}
    assert len(task["prompt"]) > 100
    assert all(list(PAPER.glob(glob)) for glob in task.get("documents", []))
    assert task["expect"]["answer"]
    for file in task["expect"].get("files", []):
        assert file["format"] in PARSERS
        assert set(file) <= {"name", "format", "contains"}
    read_scripts({"replies": task["replies"]}, name)


@pytest.mark.parametrize("name", TASKS)
def test_script_of_a_paper_example_writes_its_answer_to_the_answer_file(name: str) -> None:
    *steps, last = TASKS[name]["replies"]
    assert not [step for step in TASKS[name]["replies"] if step.get("content")]
    assert last["tool_calls"] == [{"name": "submit"}]
    calls = [call for step in steps for call in step["tool_calls"]]
    assert {call["name"] for call in calls} <= {"execute_bash", "str_replace_editor"}
    assert "output/answer.txt" in str(calls)


# The tasks in sandboxes


@pytest.mark.parametrize("name", PLAIN)
async def test_paper_example_task_succeeds_at_a_running_proxy(name: str, tmp_path: Path) -> None:
    script = by_history(TASKS[name]["replies"])
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "bubblewrap", tmp_path / "state") as url,
    ):
        answer = await run(name, tmp_path, OPENAI_BASE_URL=f"{url}/v1")
    check(name, answer, tmp_path)


@pytest.fixture(scope="module")
def image() -> str:
    try:
        client, _ = connect()
    except SandboxStartError as error:
        if os.environ.get("REQUIRE_DOCKER"):
            raise
        pytest.skip(str(error))
    with contextlib.closing(client):
        return full_image(client)


@pytest.mark.docker
@pytest.mark.parametrize("name", TASKS)
async def test_script_of_a_paper_example_succeeds_in_the_full_image(
    name: str, image: str, tmp_path: Path
) -> None:
    settings = {
        "LLM_SANDBOX_SANDBOX__BACKEND": "docker",
        "LLM_SANDBOX_SANDBOX__DOCKER__IMAGE": image,
    }
    answer = await run(name, tmp_path, "--scripted", **settings)
    check(name, answer, tmp_path)


async def run(name: str, folder: Path, *options: str, **variables: str) -> str:
    """Run the task in `folder` and return the answer, with the names of files for links."""
    with anyio.fail_after(TIMEOUT_S):
        done = await anyio.run_process(
            [sys.executable, str(RUN), name, *options],
            check=False,
            cwd=folder,
            env=environment(folder, OPENAI_API_KEY="none", **variables),
        )
    assert (done.returncode, done.stderr.decode()) == (0, "")
    lines = done.stdout.decode().splitlines()
    assert lines[0] == f"== {name}"
    return LINK.sub(r"\1", "\n".join(line for line in lines[1:] if not line.startswith("saved ")))


def check(name: str, answer: str, folder: Path) -> None:
    """Compare the answer and the produced files with what the task expects."""
    expect = TASKS[name]["expect"]
    assert [text for text in expect["answer"] if text not in answer] == [], answer
    output = folder / "paper-output" / name
    saved = {path.name for path in output.iterdir()} if output.exists() else set()
    assert saved == {file["name"] for file in expect.get("files", [])}
    for file in expect.get("files", []):
        text = PARSERS[file["format"]]((output / file["name"]).read_bytes())
        assert [each for each in file.get("contains", []) if each not in text] == []
    if name == "instructions":
        check_rules(answer)


def check_rules(text: str) -> None:
    """Check the rules that the prompt of the task `instructions` gives."""
    lines = [line.removesuffix(".").split(" ") for line in text.split("\n")]
    assert all(line.endswith(".") for line in text.split("\n"))
    assert [len(words) for words in lines] == [7, 7, 7]
    assert [words[0][0] for words in lines] == ["S", "E", "A"]
    assert all(word.isalpha() for words in lines for word in words)
    assert max(Counter(text.lower().replace(".", "").split()).values()) == 1
    assert all(any(len(word) >= 9 for word in words) for words in lines)


# File formats: each parser fails if the data is not of the format, and returns the text of the file
# or, of a binary file, its size or length


def parse_svg(data: bytes) -> str:
    root = ElementTree.fromstring(data)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root) > 0
    return " ".join(root.itertext())


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.declaration = ""
        self.text = ""

    def handle_decl(self, decl: str) -> None:
        self.declaration = decl

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        # A page that works without a network loads nothing.
        assert not [value for key, value in attrs if key in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self.ends[tag] += 1

    def handle_data(self, data: str) -> None:
        self.text += data


def parse_html(data: bytes) -> str:
    page = _Page()
    page.feed(data.decode())
    page.close()
    assert page.declaration.lower() == "doctype html"
    assert page.tags["svg"] == 1
    assert all(page.tags[tag] == page.ends[tag] for tag in ("html", "svg", "table", "text"))
    return page.text


def parse_png(data: bytes) -> str:
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    pixels = b""
    kinds = []
    at = 8
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size)[0] == zlib.crc32(kind + content)
        kinds.append(kind)
        pixels += content if kind == b"IDAT" else b""
        at += 12 + size
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    width, height = struct.unpack_from(">II", data, 16)
    plain = zlib.decompress(pixels)
    assert len(set(plain)) > 2
    assert len(plain) % height == 0
    return f"{width} x {height} pixels"


def boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the boxes of an MP4 file, or of a box in it."""
    at = 0
    while at < len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        assert 8 <= size <= len(data) - at
        yield kind, data[at + 8 : at + size]
        at += size


def parse_mp4(data: bytes) -> str:
    assert data[4:8] == b"ftyp"
    top = dict(boxes(data))
    assert len(top[b"mdat"]) > 0
    header = dict(boxes(top[b"moov"]))[b"mvhd"]
    scale, duration = struct.unpack_from(">II", header, 12)
    return f"{duration / scale:.1f} s"


def parse_midi(data: bytes) -> str:
    assert data[:8] == b"MThd\0\0\0\x06"
    _, tracks, _ = struct.unpack_from(">HHH", data, 8)
    found = []
    at = 14
    while at < len(data):
        kind, size = struct.unpack_from(">4sI", data, at)
        found.append(kind)
        at += 8 + size
        assert data[at - 3 : at] == b"\xff\x2f\x00"  # the end of a track
    assert at == len(data)
    assert found == [b"MTrk"] * tracks
    return f"{tracks} tracks"


def parse_wav(data: bytes) -> str:
    with wave.open(io.BytesIO(data)) as sound:
        assert sound.getnframes() > 0
        frames = sound.readframes(sound.getnframes())
        assert len(frames) == sound.getnframes() * sound.getnchannels() * sound.getsampwidth()
        assert any(frames)
        return f"{sound.getframerate()} Hz, {sound.getnchannels()} channels"


PARSERS: Mapping[str, Callable[[bytes], str]] = {
    "html": parse_html,
    "midi": parse_midi,
    "mp4": parse_mp4,
    "png": parse_png,
    "svg": parse_svg,
    "wav": parse_wav,
}
