"""What clients send beside words: taken out of requests, made ready to lie in the sandbox."""

import asyncio
import hashlib
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from policies.context import moved_over
from policies.file_names import clean_type
from policies.passthrough import is_url, remote_urls
from policies.workspace import (
    Given,
    InputLimits,
    Kind,
    Modality,
    Placed,
    has_long_text,
    is_much,
    last_of_user,
    long_texts,
    plan,
)
from proxy.agent.model import Message
from proxy.agent.task import InputFile, Task
from proxy.errors import BadRequestError, FileTooLargeError
from proxy.fetch import Fetched, Fetcher, FetchError, Room, refuse_private_urls
from proxy.shown_files import ShownFiles
from proxy.store.records import NoUploads, Uploads
from proxy.text_lengths import TextLengths
from proxy.wire.content_parts import (
    FilePart,
    InlineData,
    Remote,
    Uploaded,
    beside,
    malformed,
    read,
)
from sandbox_runtime.errors import SandboxFileError

MAX_FETCHES = 32
"""The number of URLs of one request that are fetched: its last ones."""
FETCHES_AT_ONCE = 8
_PIECE_BYTES = 1 << 20
_MAX_WORDS_BYTES = 16 << 20

Pieces = AsyncGenerator[bytes, None]
WindowOf = Callable[[Task], Awaitable[int | None]]
"""How much the model of a request takes, in tokens, where that is known."""


@dataclass(frozen=True, slots=True)
class _Content:
    """What a part of a request holds, or why it cannot be had."""

    mime_type: str = ""
    bytes: int = 0
    read: Callable[[], Pieces] | None = None
    fault: str = ""
    filename: str = ""
    """Where the part itself has none."""
    shown: Mapping[str, Any] | None = None
    """What stands for it towards a model that takes it in."""
    fetched: Fetched | None = None
    """What came from its URL."""


class Inputs:
    """Takes files out of requests. `modalities` are what the model takes in beside text."""

    def __init__(
        self,
        *,
        max_total_mib: int = InputLimits().max_total_mib,
        modalities: tuple[Modality, ...] = ("image",),
        uploads: Uploads | None = None,
        fetcher: Fetcher | None = None,
        lengths: TextLengths | None = None,
        window: WindowOf | None = None,
        backend_fetches: bool = False,
    ) -> None:
        """`max_total_mib` is what any profile allows at most. Without a fetcher, nothing is
        fetched; without lengths, texts are not counted. `backend_fetches`: whether the backend may
        be given URLs, to fetch them from where it is."""
        self._max_total_mib = max_total_mib
        self._modalities = frozenset[Kind](modalities)
        self._uploads = uploads or NoUploads()
        self._fetcher = fetcher
        self._lengths = lengths
        self._window = window
        self.backend_fetches = backend_fetches
        """True if the backend may be given URLs."""

    async def receive(self, task: Task, owner: str, body: Mapping[str, Any]) -> Task:
        """The task, its files beside its messages; what is to be fetched is fetched when the run
        begins, for its client should not wait for that in silence.

        Raises BadRequestError, FileTooLargeError, BusyError.
        """
        messages, parts = read(task.messages)
        parts = [*beside(body), *parts]
        await self._refuse_others(messages, parts, owner)
        limits = task.profile.inputs
        sizes = await asyncio.to_thread(_measured, parts, limits) if parts else {}
        shown = ShownFiles(task.body)
        here = [await self._here(part, sizes, owner, shown) for part in parts]
        if any(isinstance(part.source, Remote) for part in parts):
            room = Room((limits.max_total_mib << 20) - sum(sizes.values()), owner, task.body)
            arrive = partial(self._arrive, messages, parts, here, room, shown)
            return replace(task, arriving=arrive)
        return await self._placed(task, messages, parts, here)

    async def _refuse_others(
        self, messages: Sequence[Message], parts: Sequence[FilePart], owner: str
    ) -> None:
        """Check the URLs that stand where only some backends look for them: in parts without a
        type, or in the model's own messages. Raises BadRequestError."""
        fetched = {part.source.url for part in parts if isinstance(part.source, Remote)}
        others = dict.fromkeys(url for url in remote_urls(messages) if is_url(url))
        if urls := [url for url in others if url not in fetched]:
            await self.refuse_private(urls, owner)

    async def _arrive(
        self,
        messages: Sequence[Message],
        parts: Sequence[FilePart],
        here: Sequence[_Content],
        room: Room,
        shown: ShownFiles,
        task: Task,
    ) -> Task:
        fetched = await self._fetched(parts, room, task.profile.inputs)
        contents = [
            await self._shown(part, fetched[part.source.url], shown)
            if isinstance(part.source, Remote)
            else content
            for part, content in zip(parts, here, strict=True)
        ]
        return await self._placed(replace(task, arriving=None), messages, parts, contents)

    async def _placed(
        self,
        task: Task,
        messages: Sequence[Message],
        parts: Sequence[FilePart],
        contents: Sequence[_Content],
    ) -> Task:
        given = [self._given(part, content) for part, content in zip(parts, contents, strict=True)]
        over = await self._moved_over(task, messages)
        near = long_texts(messages, over) if self._lengths else ()
        counted: Mapping[str, int] = {}
        if self._lengths and near:
            counted = await self._lengths.counted(task.model, near, task.credentials)
        work = partial(
            plan,
            messages,
            given,
            over_tokens=over,
            counted=counted,
            without_notes=last_of_user(messages) if _is_posed(task) else None,
        )
        workspace = await asyncio.to_thread(work) if is_much(messages) else work()
        inputs = [_input_file(placed, parts, contents) for placed in workspace.files]
        if inputs:
            inputs = await asyncio.to_thread(_digested, inputs)
        return replace(
            task,
            messages=workspace.messages,
            inputs=[*task.inputs, *inputs],
            documents_tokens=workspace.tokens_kept_out,
            file_notes=workspace.notes,
        )

    async def _moved_over(self, task: Task, messages: Sequence[Message]) -> int | None:
        """From how many tokens on a text becomes files; nobody waits for the model's window where
        that is no matter."""
        limit = task.profile.inputs.move_text_over_tokens
        if limit is None or self._window is None or not has_long_text(messages):
            return limit
        return moved_over(limit, await self._window(task))

    async def lost(self, owner: str, file_ids: Iterable[str]) -> set[str]:
        """Those of the owner's uploads that are kept no more."""
        return {each for each in file_ids if await self._uploads.find(owner, each) is None}

    async def _here(
        self, part: FilePart, sizes: Mapping[str, int], owner: str, shown: ShownFiles
    ) -> _Content:
        """What need not be fetched; for the rest nothing yet."""
        match part.source:
            case InlineData() as data:
                pieces = partial(_inline_pieces, data)
                content = _Content(part.mime_type, sizes[part.identity], pieces)
                return replace(content, shown=part.part)
            case Uploaded(file_id=file_id):
                return await self._uploaded(part, owner, file_id, shown)
        return _Content()

    def _given(self, part: FilePart, content: _Content) -> Given:
        return Given(
            at=part.at,
            kind=part.kind,
            identity=part.identity,
            filename=part.filename or content.filename,
            mime_type=content.mime_type,
            bytes=content.bytes,
            shown=content.shown if part.kind in self._modalities else None,
            fault=content.fault,
        )

    # Inside the request

    @property
    def max_body_bytes(self) -> int:
        """How large a request may be: its files in base64, and words beside them."""
        return (self._max_total_mib << 20) * 4 // 3 + _MAX_WORDS_BYTES

    # On the web

    async def refuse_private(self, urls: Sequence[str], owner: str) -> None:
        """See `refuse_private_urls`. Nothing is checked if the backend may be given any URL."""
        if self.backend_fetches:
            return
        await refuse_private_urls(self._fetcher or Fetcher(), urls, owner)

    async def _shown(self, part: FilePart, fetched: _Content, shown: ShownFiles) -> _Content:
        """Return what was fetched with what the model is shown of it: its bytes, never its URL,
        which the backend would fetch from inside the network."""
        if self.backend_fetches:
            return replace(fetched, shown=part.part)
        if fetched.fetched is None or part.kind not in self._modalities:
            return fetched
        data = fetched.fetched.data
        return replace(fetched, shown=await shown.fetched(part, fetched.mime_type, data))

    async def _fetched(
        self, parts: Sequence[FilePart], room: Room, limits: InputLimits
    ) -> dict[str, _Content]:
        """Return what each URL leads to; the newest first, so that they find room."""
        named = (part.source.url for part in reversed(parts) if isinstance(part.source, Remote))
        urls = list(dict.fromkeys(named))
        at_once = asyncio.Semaphore(FETCHES_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            tasks = {
                url: group.create_task(self._fetch(url, at_once, room, limits))
                for url in urls[:MAX_FETCHES]
            }
        beyond = f"was not fetched: only the newest {MAX_FETCHES} URLs of a request are"
        older = {url: _Content(fault=f"{url[:200]} {beyond}") for url in urls[MAX_FETCHES:]}
        return {url: task.result() for url, task in tasks.items()} | older

    async def _fetch(
        self, url: str, at_once: asyncio.Semaphore, room: Room, limits: InputLimits
    ) -> _Content:
        try:
            if self._fetcher is None or not limits.fetch_urls:
                raise FetchError("URLs are not fetched here")
            async with at_once:
                file = await self._fetcher.fetch(
                    url, max_bytes=limits.max_file_mib << 20, room=room
                )
        except FetchError as error:
            return _Content(fault=f"{url[:200]} was not fetched: {error}")
        read = partial(_pieces, file.data)
        return _Content(clean_type(file.mime_type), len(file.data), read, fetched=file)

    # Sent beforehand

    async def _uploaded(
        self, part: FilePart, owner: str, file_id: str, shown: ShownFiles
    ) -> _Content:
        upload = await self._uploads.find(owner, file_id)
        if upload is None:
            raise BadRequestError(
                f"Invalid '{part.param}': no file {file_id!r} was found.",
                param=part.param,
                code="file_not_found",
            )
        mime_type = clean_type(upload.mime_type)
        picture = None
        if part.kind == "image" and "image" in self._modalities:
            picture = await shown.uploaded(part, upload, mime_type)
        read = partial(_file_pieces, upload.path)
        return _Content(mime_type, upload.bytes, read, filename=upload.filename, shown=picture)


def _is_posed(task: Task) -> bool:
    """Whether the user's last message is posed as a problem, with the notes on its files after
    it."""
    return task.profile.manner.kind == "paper" and task.resumes is None


def _input_file(
    placed: Placed, parts: Sequence[FilePart], contents: Sequence[_Content]
) -> InputFile:
    if isinstance(placed.source, str):
        text = placed.source.encode(errors="replace")  # half a surrogate pair is no text
        return InputFile(placed.path, placed.source, partial(_pieces, text))
    read = contents[placed.source].read
    assert read is not None
    return InputFile(placed.path, parts[placed.source].identity, read)


def _digested(files: Sequence[InputFile]) -> list[InputFile]:
    """The same, fit to be noted in a workspace: what tells data from other data is the data."""
    return [
        replace(
            file, identity=hashlib.sha256(file.identity.encode(errors="surrogatepass")).hexdigest()
        )
        for file in files
    ]


async def _inline_pieces(data: InlineData) -> Pieces:
    for piece in data.pieces():
        yield piece


async def _pieces(data: bytes) -> Pieces:
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


async def _file_pieces(path: Path) -> Pieces:
    try:
        file = await asyncio.to_thread(path.open, "rb")
    except OSError as error:
        raise SandboxFileError(f"the upload is gone: {error.strerror}") from error
    with file:
        while piece := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield piece


def _measured(parts: Sequence[FilePart], limits: InputLimits) -> dict[str, int]:
    """How large each file inside the request is, by its identity. Raises BadRequestError,
    FileTooLargeError."""
    sizes: dict[str, int] = {}
    room = limits.max_total_mib << 20
    for part in parts:
        if not isinstance(part.source, InlineData) or part.identity in sizes:
            continue
        try:
            size = sizes[part.identity] = part.source.measure()
        except ValueError as error:
            raise malformed(part.param, error) from error
        room -= size
        if size > limits.max_file_mib << 20 or room < 0:
            raise FileTooLargeError(
                f"Invalid file data: '{part.param}'. A file inside a request may have"
                f" {limits.max_file_mib} MiB, and all together {limits.max_total_mib} MiB.",
                param=part.param,
            )
    return sizes
