"""The files of a request: taken out of its messages, and made ready for the sandbox.

`Inputs` finds the files inside the request, among the client's uploads and on the web, and replaces
them in the messages by their paths. `ModelMedia` is what the model is shown of them, and
`TextLengths` counts the tokens of long texts, which become files as well.
"""

import asyncio
import base64
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
    GivenFile,
    InputLimits,
    Kind,
    Modality,
    PlacedFile,
    has_long_text,
    is_much,
    last_of_user,
    long_texts,
    plan,
)
from proxy.agent.model import Credentials, Message, Model
from proxy.agent.task import AgentInput, InputFile, PendingInput
from proxy.body_memory import BodyReservation
from proxy.errors import BadRequestError, FileTooLargeError
from proxy.fetch import ByteBudget, Fetched, Fetcher, FetchError, refuse_private_urls
from proxy.schemas.content_parts import (
    FilePart,
    InlineData,
    Remote,
    Uploaded,
    beside,
    malformed,
    read,
    shown_type,
    with_url,
)
from proxy.store.records import NoUploads, Upload, Uploads
from sandbox_runtime.errors import SandboxFileError

MAX_FETCHES = 32
"""How many URLs of one request are downloaded: its last ones."""
FETCHES_AT_ONCE = 8
MAX_SHOWN_BYTES = 20 << 20
"""The largest file that the model is shown; a larger one is in the sandbox only."""
MAX_ALL_SHOWN_BYTES = 50 << 20
"""The limit for all files of a request that the model is shown, each counted as often as it is
named; OpenAI accepts 50 MB. Files beyond it are in the sandbox only."""
COUNT_S = 2.0
"""How long a request waits for the token counts of its texts, before estimates are used."""
MAX_COUNTED = 8
"""How many texts of one request are counted."""
_MAX_KNOWN_COUNTS = 1000
_PIECE_BYTES = 1 << 20
_MAX_TEXT_BYTES = 16 << 20

Pieces = AsyncGenerator[bytes, None]
WindowOf = Callable[[str, str, Credentials | None], Awaitable[int | None]]
"""Returns the context window of a model in tokens, or None if it is not known. The arguments are
the model, the client's owner, and the client's own credentials for the backend, if any."""


@dataclass(frozen=True, slots=True)
class InputContext:
    """What `Inputs` has to know of a request beside its messages."""

    owner: str
    model: str
    credentials: Credentials | None
    limits: InputLimits
    body: BodyReservation | None
    """Counts the memory that the files take."""
    present: Sequence[InputFile]
    """The files that are in the container already, beside its workspace."""
    notes_follow: bool
    """True if the notes on the files of the user's last message stay out of that message."""


@dataclass(frozen=True, slots=True)
class _FileContent:
    """The content of a file part, or the reason why there is none."""

    mime_type: str = ""
    bytes: int = 0
    read: Callable[[], Pieces] | None = None
    fault: str = ""
    filename: str = ""
    """The name if the part itself has none."""
    shown: Mapping[str, Any] | None = None
    """The part that a model receives which accepts this kind of file."""
    fetched: Fetched | None = None
    """The downloaded file, if the part has a URL."""


class Inputs:
    """Takes files out of requests. `modalities` are the kinds of files that the model accepts."""

    def __init__(
        self,
        *,
        max_total_mib: int = InputLimits().max_total_mib,
        modalities: tuple[Modality, ...] = ("image",),
        uploads: Uploads | None = None,
        fetcher: Fetcher | None = None,
        lengths: "TextLengths | None" = None,
        window: WindowOf | None = None,
        backend_fetches: bool = False,
    ) -> None:
        """`max_total_mib` is the highest limit of any profile. Without `fetcher`, nothing is
        downloaded; without `lengths`, texts are not counted. `backend_fetches` allows the backend
        to download any URL from inside its own network."""
        self._max_total_mib = max_total_mib
        self._modalities = frozenset[Kind](modalities)
        self._uploads = uploads or NoUploads()
        self._fetcher = fetcher
        self._lengths = lengths
        self._window = window
        self.backend_fetches = backend_fetches
        """True if the backend may download any URL."""

    async def load(
        self, given: Sequence[Message], body: Mapping[str, Any], context: InputContext
    ) -> AgentInput | PendingInput:
        """Return the messages without their files, and the files, which are also named in other
        fields of the body. Downloads begin with the run, so that the client of a stream does not
        wait for them without an answer.

        Raises BadRequestError, FileTooLargeError, BusyError.
        """
        messages, parts = read(given)
        parts = [*beside(body), *parts]
        await self._check_other_urls(messages, parts, context.owner)
        limits = context.limits
        sizes = await asyncio.to_thread(_measured, parts, limits) if parts else {}
        media = ModelMedia(context.body)
        local = [await self._local_content(part, sizes, context.owner, media) for part in parts]
        if not any(isinstance(part.source, Remote) for part in parts):
            return await self._place(messages, parts, local, context)
        left = (limits.max_total_mib << 20) - sum(sizes.values())
        room = ByteBudget(left, context.owner, context.body)
        download = partial(self._download, messages, parts, local, room, media, context)
        return PendingInput(given, context.present, download)

    async def _check_other_urls(
        self, messages: Sequence[Message], parts: Sequence[FilePart], owner: str
    ) -> None:
        """Check URLs in places where only some backends read them: in parts without a type, or in
        the model's own messages. Raises BadRequestError."""
        fetched = {part.source.url for part in parts if isinstance(part.source, Remote)}
        others = dict.fromkeys(url for url in remote_urls(messages) if is_url(url))
        if urls := [url for url in others if url not in fetched]:
            await self.refuse_private(urls, owner)

    async def _download(
        self,
        messages: Sequence[Message],
        parts: Sequence[FilePart],
        local: Sequence[_FileContent],
        room: ByteBudget,
        media: "ModelMedia",
        context: InputContext,
    ) -> AgentInput:
        """Return the messages and the files, the downloaded ones among them."""
        fetched = await self._fetch_all(parts, room, context.limits)
        contents = [
            await self._with_shown(part, fetched[part.source.url], media)
            if isinstance(part.source, Remote)
            else content
            for part, content in zip(parts, local, strict=True)
        ]
        return await self._place(messages, parts, contents, context)

    async def _place(
        self,
        messages: Sequence[Message],
        parts: Sequence[FilePart],
        contents: Sequence[_FileContent],
        context: InputContext,
    ) -> AgentInput:
        """Return the messages with a path in the sandbox for each file and for each long text."""
        given = [self._given(part, content) for part, content in zip(parts, contents, strict=True)]
        over = await self._text_limit(messages, context)
        near = long_texts(messages, over) if self._lengths else ()
        counted: Mapping[str, int] = {}
        if self._lengths and near:
            counted = await self._lengths.counted(context.model, near, context.credentials)
        work = partial(
            plan,
            messages,
            given,
            over_tokens=over,
            counted=counted,
            without_notes=last_of_user(messages) if context.notes_follow else None,
        )
        workspace = await asyncio.to_thread(work) if is_much(messages) else work()
        inputs = [_input_file(placed, parts, contents) for placed in workspace.files]
        if inputs:
            inputs = await asyncio.to_thread(_with_digest_identities, inputs)
        return AgentInput(
            messages=workspace.messages,
            files=[*context.present, *inputs],
            notes=workspace.notes,
            documents_tokens=workspace.tokens_kept_out,
        )

    async def _text_limit(self, messages: Sequence[Message], context: InputContext) -> int | None:
        """Return above how many tokens a text becomes files. The model's window is asked for only
        if a text is long enough for it to matter."""
        limit = context.limits.move_text_over_tokens
        if limit is None or self._window is None or not has_long_text(messages):
            return limit
        window = await self._window(context.model, context.owner, context.credentials)
        return moved_over(limit, window)

    async def missing_uploads(self, owner: str, file_ids: Iterable[str]) -> set[str]:
        """Return those ids that are not, or no longer, uploads of the owner."""
        return {each for each in file_ids if await self._uploads.find(owner, each) is None}

    async def _local_content(
        self, part: FilePart, sizes: Mapping[str, int], owner: str, media: "ModelMedia"
    ) -> _FileContent:
        """Return the content of a part that needs no download, and an empty one of others."""
        match part.source:
            case InlineData() as data:
                pieces = partial(_inline_pieces, data)
                size = sizes[part.identity]
                return _FileContent(part.mime_type, size, pieces, shown=part.part)
            case Uploaded(file_id=file_id):
                return await self._uploaded(part, owner, file_id, media)
        return _FileContent()

    def _given(self, part: FilePart, content: _FileContent) -> GivenFile:
        return GivenFile(
            at=part.at,
            kind=part.kind,
            identity=part.identity,
            filename=part.filename or content.filename,
            mime_type=content.mime_type,
            bytes=content.bytes,
            shown=content.shown if part.kind in self._modalities else None,
            fault=content.fault,
        )

    @property
    def max_body_bytes(self) -> int:
        """How large a request body may be: its files in base64, and its texts."""
        return (self._max_total_mib << 20) * 4 // 3 + _MAX_TEXT_BYTES

    # Files on the web

    async def refuse_private(self, urls: Sequence[str], owner: str) -> None:
        """See `refuse_private_urls`. Nothing is checked if the backend may be given any URL."""
        if self.backend_fetches:
            return
        await refuse_private_urls(self._fetcher or Fetcher(), urls, owner)

    async def _with_shown(
        self, part: FilePart, fetched: _FileContent, media: "ModelMedia"
    ) -> _FileContent:
        """Return a downloaded file with what the model is shown of it: the bytes, never the URL,
        which the backend would download from inside its network."""
        if self.backend_fetches:
            return replace(fetched, shown=part.part)
        if fetched.fetched is None or part.kind not in self._modalities:
            return fetched
        data = fetched.fetched.data
        return replace(fetched, shown=await media.fetched(part, fetched.mime_type, data))

    async def _fetch_all(
        self, parts: Sequence[FilePart], room: ByteBudget, limits: InputLimits
    ) -> dict[str, _FileContent]:
        """Return the file of each URL. The newest are downloaded first, before the size limit is
        reached."""
        named = (part.source.url for part in reversed(parts) if isinstance(part.source, Remote))
        urls = list(dict.fromkeys(named))
        at_once = asyncio.Semaphore(FETCHES_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            tasks = {
                url: group.create_task(self._fetch(url, at_once, room, limits))
                for url in urls[:MAX_FETCHES]
            }
        beyond = f"was not fetched: only the newest {MAX_FETCHES} URLs of a request are"
        older = {url: _FileContent(fault=f"{url[:200]} {beyond}") for url in urls[MAX_FETCHES:]}
        return {url: task.result() for url, task in tasks.items()} | older

    async def _fetch(
        self, url: str, at_once: asyncio.Semaphore, room: ByteBudget, limits: InputLimits
    ) -> _FileContent:
        try:
            if self._fetcher is None or not limits.fetch_urls:
                raise FetchError("URLs are not fetched here")
            async with at_once:
                file = await self._fetcher.fetch(
                    url, max_bytes=limits.max_file_mib << 20, room=room
                )
        except FetchError as error:
            return _FileContent(fault=f"{url[:200]} was not fetched: {error}")
        read = partial(_pieces, file.data)
        return _FileContent(clean_type(file.mime_type), len(file.data), read, fetched=file)

    # Uploads

    async def _uploaded(
        self, part: FilePart, owner: str, file_id: str, media: "ModelMedia"
    ) -> _FileContent:
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
            picture = await media.uploaded(part, upload, mime_type)
        read = partial(_file_pieces, upload.path)
        return _FileContent(mime_type, upload.bytes, read, filename=upload.filename, shown=picture)


def _input_file(
    placed: PlacedFile, parts: Sequence[FilePart], contents: Sequence[_FileContent]
) -> InputFile:
    if isinstance(placed.source, str):
        text = placed.source.encode(errors="replace")  # half a surrogate pair is no text
        return InputFile(placed.path, placed.source, partial(_pieces, text))
    read = contents[placed.source].read
    assert read is not None
    return InputFile(placed.path, parts[placed.source].identity, read)


def _with_digest_identities(files: Sequence[InputFile]) -> list[InputFile]:
    """Return the files with a digest for their identity, which may be the data itself, because a
    workspace stores the identities of its files."""
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
    """Return the bytes of each file inside the request, by its identity. Raises BadRequestError,
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


class ModelMedia:
    """The files of one request that its model is shown, as parts with data URLs. Each is encoded
    once, however often the request names it, but counted each time, because the backend's request
    contains it each time."""

    def __init__(self, body: BodyReservation | None) -> None:
        """`body` counts the memory that the files take."""
        self._body = body
        self._bytes_left = MAX_ALL_SHOWN_BYTES
        self._urls: dict[tuple[str, str], str] = {}

    async def fetched(self, part: FilePart, mime_type: str, data: bytes) -> dict[str, Any] | None:
        """Return a part that names an image, sound or video by its URL with a data URL instead.
        Return None if the data is none of these, or too large. Raises BusyError."""
        known_type = shown_type(part, mime_type)
        if known_type is None:
            return None
        url = await self._data_url(part, known_type, len(data), lambda: data)
        return None if url is None else with_url(part, url)

    async def uploaded(self, part: FilePart, upload: Upload, mime_type: str) -> Any:
        """Return an uploaded image as an `image_url` part, or None if it is too large. Raises
        BusyError."""
        try:
            url = await self._data_url(part, mime_type, upload.bytes, upload.path.read_bytes)
        except OSError:
            return None  # the upload has just expired: the sandbox reports it
        if url is None:
            return None
        written = part.part or {}
        detail = {"detail": written["detail"]} if written.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": url, **detail}}

    async def _data_url(
        self, part: FilePart, mime_type: str, size: int, read: Callable[[], bytes]
    ) -> str | None:
        if size > min(MAX_SHOWN_BYTES, self._bytes_left):
            return None
        self._bytes_left -= size
        head = f"data:{mime_type};base64,"
        key = (part.identity, mime_type)
        if self._body:
            copies = 1 if key in self._urls else 2  # the backend's request, and the string itself
            self._body.take(copies * (len(head) + (size + 2) // 3 * 4))
        if key not in self._urls:
            self._urls[key] = await asyncio.to_thread(_encoded, head, read)
        return self._urls[key]


def _encoded(head: str, read: Callable[[], bytes]) -> str:
    return head + base64.b64encode(read()).decode()


class TextLengths:
    """Counts the tokens of texts with the model's own tokenizer, if the backend offers it. Each
    text is counted once, because a client sends its conversation again with each request."""

    def __init__(self, model: Model, patience_s: float = COUNT_S) -> None:
        self._model = model
        self._patience_s = patience_s
        self._known: dict[tuple[str, bytes], int] = {}

    async def counted(
        self, model: str, texts: Iterable[str], credentials: Credentials | None = None
    ) -> dict[str, int]:
        """Return the token counts of those texts that are counted in time. `credentials` are the
        client's own for the backend."""
        backend = self._model.for_client(credentials) if credentials else self._model
        found: dict[str, int] = {}
        unknown: dict[str, tuple[str, bytes]] = {}
        for text in dict.fromkeys(texts):
            key = (model, hashlib.sha256(text.encode(errors="surrogatepass")).digest())
            if (count := self._known.get(key)) is None:
                unknown[text] = key
            else:
                found[text] = count
        try:
            async with asyncio.timeout(self._patience_s):
                for text in list(unknown)[:MAX_COUNTED]:
                    count = await backend.count_tokens(model, text)
                    if count is not None:
                        found[text] = self._remember(unknown[text], count)
        except TimeoutError:
            pass  # an estimate serves the client better than a longer wait
        return found

    def _remember(self, key: tuple[str, bytes], count: int) -> int:
        while len(self._known) >= _MAX_KNOWN_COUNTS:
            del self._known[next(iter(self._known))]
        self._known[key] = count
        return count
