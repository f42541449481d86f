"""The command `run`, and the code that it shares with the command `demo`.

Both commands are clients of a proxy: they send one request, print the steps as they arrive, and
download the produced files. They start a temporary server in their own process, unless `run` gets
the URL of a running proxy.
"""

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import httpx
import openai
import uvicorn

from policies.headers import ResponseHeader
from policies.sessions import TrajectoryFormat
from proxy.api.dependencies import Services
from proxy.app import Lifespan, create_app
from proxy.config import ConfigError
from proxy.keys import Key, Keyring

MAX_INPUT_FILES = 1000
"""Maximum number of files of `--input-dir`: one request may have no more."""
FILES_DIRECTORY = "files"
"""Directory of the produced files, in `--output-dir`."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


# The server


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the command, which stops the server itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def temporary_server(
    services: Services, lifespan: Lifespan
) -> AsyncIterator[tuple[str, str]]:
    """Serve on a free port of this machine. Yield the URL, up to /v1, and a key. The server
    requires the key, so that other users of the machine cannot use it. Raises ConfigError if the
    server cannot start."""
    secret = f"sk-{secrets.token_hex(24)}"
    services = replace(services, keyring=Keyring([(secret, Key())]))
    app = create_app(services, lifespan)
    server = _Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        if serving.done():
            raise ConfigError("the temporary server cannot start")
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1", secret
    finally:
        server.should_exit = True
        await serving


# The request


@dataclass(slots=True)
class Answer:
    """A streamed answer as far as it has arrived."""

    text: str = ""
    run_id: str | None = None
    """The id of the run; None if the request was answered without a run, or refused."""
    files: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """The produced files, as in `sandbox.files`."""


Print = Callable[[str], None]
"""Prints a piece of text."""


def print_dimmed(stream: TextIO, text: str) -> None:
    """Print reasoning or steps, dimmed if the stream is a terminal."""
    stream.write(f"{DIM}{text}{PLAIN}" if stream.isatty() else text)
    stream.flush()


async def ask(
    client: openai.AsyncOpenAI,
    answer: Answer,
    model: str | None,
    question: str,
    sandbox: Mapping[str, Any],
    print_step: Print,
    print_answer: Print | None = None,
) -> None:
    """Send a question, print its steps as they arrive, and read the answer into `answer`. With
    `print_answer`, also print the answer as it arrives, after a line break. `model` is None for the
    first model of the proxy. Raises openai.APIError."""
    name = model or (await client.models.list()).data[0].id
    try:
        response = await client.chat.completions.with_raw_response.create(
            model=name,
            messages=[{"role": "user", "content": question}],
            stream=True,
            extra_body={"sandbox": sandbox},
        )
    except openai.APIStatusError as error:  # the run may have failed before its first output
        answer.run_id = error.response.headers.get(ResponseHeader.RUN)
        raise
    answer.run_id = response.headers.get(ResponseHeader.RUN)
    async for chunk in response.parse():
        delta = chunk.choices[0].delta if chunk.choices else None
        if thinking := getattr(delta, "reasoning_content", None):
            print_step(thinking)
        if delta and delta.content:
            if print_answer:
                print_answer(delta.content if answer.text else f"\n{delta.content}")
            answer.text += delta.content
        extra = (chunk.model_extra or {}).get("sandbox") or {}
        answer.files = extra.get("files", answer.files)


async def download(files: Sequence[Mapping[str, Any]], directory: Path) -> list[Path]:
    """Write the produced files into a directory. Return their paths, in the same order. Raises
    httpx.HTTPError, OSError."""
    paths = []
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    async with httpx.AsyncClient(timeout=60) as client:
        for file in files:
            target = directory / _file_name(file)
            async with client.stream("GET", file["url"]) as response:
                response.raise_for_status()
                with await asyncio.to_thread(target.open, "wb") as writer:
                    async for piece in response.aiter_bytes():
                        await asyncio.to_thread(writer.write, piece)
            paths.append(target)
    return paths


def _file_name(file: Mapping[str, Any]) -> str:
    return Path(file["filename"]).name


# sandbox-proxy run


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of `sandbox-proxy run`."""

    prompt: str
    model: str | None
    inputs: Sequence[Path]
    """Paths of the files to upload; see `input_files`."""
    output_dir: Path | None
    trajectory_format: TrajectoryFormat = "native"


async def run_with_temporary_server(
    services: Services, lifespan: Lifespan, options: RunOptions
) -> int:
    """Run the prompt on a temporary server. See `run_prompt`."""
    async with temporary_server(services, lifespan) as (base_url, key):
        return await run_prompt(base_url, key, options)


async def run_prompt(
    base_url: str, key: str, options: RunOptions, profile: str | None = None
) -> int:
    """Send one request to a proxy, with the input files. Print the steps to stderr and the answer
    to stdout. Write the trajectory and the produced files into the output directory. `profile` is
    the profile that the request names, if any. Return 0 if there is an answer, else 1."""
    try:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            return await _run_with_files(client, options, profile)
    except openai.APIError as error:
        sys.stderr.write(f"sandbox-proxy: {base_url}: {error.message}\n")
    except (httpx.HTTPError, OSError) as error:
        sys.stderr.write(f"sandbox-proxy: {error}\n")
    return 1


def input_files(directory: Path | None) -> list[Path]:
    """Return the files of an input directory, sorted by name. Raises ConfigError."""
    if directory is None:
        return []
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"--input-dir: {directory}: {error.strerror}") from error
    if below := [path for path in paths if path.is_dir()]:
        raise ConfigError(
            f"--input-dir: {below[0]} is a directory, and only files are sent. Put its files into"
            " an archive"
        )
    if odd := [path for path in paths if not path.is_file()]:
        raise ConfigError(f"--input-dir: {odd[0]} is not a file, and only files are sent")
    if len(paths) > MAX_INPUT_FILES:
        raise ConfigError(f"--input-dir: {len(paths)} files; at most {MAX_INPUT_FILES} are sent")
    return paths


def create_output_dir(directory: Path | None) -> None:
    """Create an output directory if it is missing. Raises ConfigError."""
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output-dir: {directory}: {error.strerror}") from error


async def _run_with_files(
    client: openai.AsyncOpenAI, options: RunOptions, profile: str | None
) -> int:
    """Upload the input files, run the prompt and delete the uploads."""
    file_ids: list[str] = []
    try:
        for path in options.inputs:
            upload = await client.files.create(file=path, purpose="user_data")
            file_ids.append(upload.id)
        sandbox: dict[str, Any] = {"capture": "messages", "file_ids": file_ids}
        if profile:
            sandbox["profile"] = profile
        return await _ask_and_save(client, options, sandbox)
    finally:
        for file_id in file_ids:
            with contextlib.suppress(openai.APIError):  # the upload expires by itself
                await client.files.delete(file_id)


async def _ask_and_save(
    client: openai.AsyncOpenAI, options: RunOptions, sandbox: Mapping[str, Any]
) -> int:
    answer = Answer()
    try:
        await _ask_and_print(client, options, sandbox, answer)
    except openai.APIError:
        if answer.run_id:
            await _try_to_write_trajectory(client, options, answer.run_id)
        raise
    if options.output_dir:
        if answer.run_id:
            await _write_trajectory(client, options, answer.run_id)
        else:
            sys.stderr.write("No trajectory: the request was answered without a sandbox.\n")
        for path in await download(answer.files, options.output_dir / FILES_DIRECTORY):
            _print_path(path)
    return 0 if answer.text else 1


async def _try_to_write_trajectory(
    client: openai.AsyncOpenAI, options: RunOptions, run_id: str
) -> None:
    """Write the trajectory of a run that has failed. Print an error instead of raising it, so that
    it does not hide the error of the run."""
    try:
        await _write_trajectory(client, options, run_id)
    except openai.APIError as error:
        sys.stderr.write(f"No trajectory: {error.message}\n")
    except OSError as error:
        sys.stderr.write(f"No trajectory: {error}\n")


async def _ask_and_print(
    client: openai.AsyncOpenAI, options: RunOptions, sandbox: Mapping[str, Any], answer: Answer
) -> None:
    """Send the prompt and print the answer. In the printed answer, the paths of the downloaded
    files replace the links to them, because a temporary server ends with the command."""
    print_step = partial(print_dimmed, sys.stderr)
    await ask(client, answer, options.model, options.prompt, sandbox, print_step)
    directory = options.output_dir / FILES_DIRECTORY if options.output_dir else Path()
    text = answer.text
    for file in answer.files:
        text = text.replace(file["url"], str(directory / _file_name(file)))
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def _write_trajectory(client: openai.AsyncOpenAI, options: RunOptions, run_id: str) -> None:
    if options.output_dir is None:
        return
    path = f"/runs/{run_id}/trajectory?format={options.trajectory_format}"
    trajectory = await client.get(path, cast_to=dict[str, Any])
    target = options.output_dir / "trajectory.json"
    text = json.dumps(trajectory, indent=2)
    await asyncio.to_thread(target.write_text, text, encoding="utf-8")
    _print_path(target)


def _print_path(path: Path) -> None:
    sys.stderr.write(f"{path}  {path.stat().st_size} bytes\n")
