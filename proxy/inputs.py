"""The input files of a request.

`InputLoader` finds the files in the request, among the client's uploads and on the web, and
replaces them in the messages by their paths in the sandbox. `MediaPartBuilder` encodes the files
that are also sent to the model. `TextTokenCounter` counts the tokens of long texts, which become
files as well.
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
from typing import Any

from policies.context import offload_threshold
from policies.file_names import normalize_mime_type
from policies.large_json import PIECE_SIZE, Steps
from policies.passthrough import is_url, remote_urls
from policies.workspace import (
    FileToWrite,
    InputLimits,
    Kind,
    Modality,
    ReceivedFile,
    has_long_text,
    is_slow_to_plan,
    last_user_index,
    plan_workspace,
    text_digest,
    texts_to_count,
)
from proxy import stepwise
from proxy.agent.model import Credentials, Message, Model
from proxy.agent.task import AgentInput, InputFile, PendingInput
from proxy.body_memory import BodyReservation
from proxy.errors import BadRequestError, FileTooLargeError
from proxy.fetch import ByteBudget, FetchedFile, Fetcher, FetchError, refuse_private_urls
from proxy.schemas.content_parts import (
    FilePart,
    InlineData,
    RemoteFile,
    UploadedFile,
    extract_files,
    local_file_error,
    malformed_data_error,
    media_type_to_show,
    replace_url,
    uploads_in_sandbox_field,
)
from proxy.store.records import EmptyUploadLookup, Upload, UploadLookup
from sandbox_runtime.errors import FileMissingError

MAX_FETCHES = 32
"""Maximum number of URLs of one request that are downloaded. The last URLs take precedence."""
MAX_CONCURRENT_FETCHES = 8
MAX_SHOWN_BYTES = 20 << 20
"""Maximum size of a file that the model receives. A larger file is in the sandbox only."""
MAX_ALL_SHOWN_BYTES = 50 << 20
"""Maximum total size of the files that the model receives with one request. A file counts once for
each part that names it. OpenAI accepts 50 MB. Files beyond the limit are in the sandbox only."""
COUNT_S = 2.0
"""Seconds to wait for the token counts of a request's texts, before estimates are used."""
MAX_COUNTED_TEXTS = 8
"""Maximum number of texts of one request whose tokens the backend counts. Cached counts are not
limited."""
_MAX_CACHED_COUNTS = 1000
_PIECE_BYTES = _PIECE_CHARS = 1 << 20
_MAX_TEXT_BYTES = 16 << 20

Pieces = AsyncGenerator[bytes, None]
FindWindow = Callable[[str, str, Credentials | None], Awaitable[int | None]]
"""Returns the context window of a model in tokens, or None if it is not known. The arguments are
the model, the owner of the request (see `dependencies.get_owner`), and the client's own credentials
for the backend, if any."""


@dataclass(frozen=True, slots=True)
class InputContext:
    """The properties of a request, apart from its messages, that `InputLoader` needs."""

    owner: str
    model: str
    credentials: Credentials | None
    limits: InputLimits
    reservation: BodyReservation | None
    """Reserves the memory of the files."""
    container_files: Sequence[InputFile]
    """The stored files of the run's container that the sandbox needs: the client's files and,
    if no state of the workspace is saved, the produced files too."""
    style_adds_notes: bool
    """True if the run's style itself adds the notes on the files of the user's last message. The
    notes are then not inserted into that message."""


@dataclass(frozen=True, slots=True)
class _FileContent:
    """The content of a file part, or the reason why it has none."""

    mime_type: str = ""
    bytes: int = 0
    read: Callable[[], Pieces] | None = None
    fault: str = ""
    filename: str = ""
    """The name of an uploaded file, for a part that does not name its file."""
    content_part: Mapping[str, Any] | None = None
    """The content part for a model that accepts this kind of file."""
    fetched_file: FetchedFile | None = None
    """The downloaded file of a part with a URL."""


class InputLoader:
    """Extracts the files of requests. `modalities` are the kinds of files that the model
    accepts."""

    def __init__(
        self,
        *,
        max_total_mib: int = InputLimits().max_total_mib,
        modalities: tuple[Modality, ...] = ("image",),
        uploads: UploadLookup | None = None,
        fetcher: Fetcher | None = None,
        token_counter: "TextTokenCounter | None" = None,
        find_window: FindWindow | None = None,
        backend_fetches_urls: bool = False,
    ) -> None:
        """`max_total_mib` is the highest limit of any profile. Without `fetcher`, no file is
        downloaded. Without `token_counter`, no text is counted."""
        self._max_total_mib = max_total_mib
        self._modalities = frozenset[Kind](modalities)
        self._uploads = uploads or EmptyUploadLookup()
        self._fetcher = fetcher
        self._token_counter = token_counter
        self._planning = asyncio.Lock()
        self._find_window = find_window
        self.backend_fetches_urls = backend_fetches_urls
        """True if the backend may download any http or https URL, from inside its own network."""

    async def load(
        self, messages_with_files: Sequence[Message], body: Mapping[str, Any], context: InputContext
    ) -> AgentInput | PendingInput:
        """Return the messages with sandbox paths in place of their files, and the files of the
        messages and of other fields of the body. If files have to be downloaded, return a
        PendingInput: the run downloads them, so that a stream can start earlier.

        Raises BadRequestError, FileTooLargeError, BodyTooLargeError, BusyError.
        """
        messages, parts = extract_files(messages_with_files)
        parts = [*uploads_in_sandbox_field(body), *parts]
        await self._check_unfetched_urls(messages, parts, context.owner)
        limits = context.limits
        sizes: Mapping[str, int] = {}
        if parts:
            parts = await asyncio.to_thread(_with_identities, parts)
            sizes = await stepwise.run(_measure_inline_files(parts, limits))
        media = MediaPartBuilder(context.reservation)
        local_contents = [
            await self._local_content(part, sizes, context.owner, media) for part in parts
        ]
        if not any(isinstance(part.source, RemoteFile) for part in parts):
            return await self._replace_files_by_paths(messages, parts, local_contents, context)
        bytes_left = (limits.max_total_mib << 20) - sum(sizes.values())
        budget = ByteBudget(bytes_left, context.owner, context.reservation)
        download = partial(
            self._download_and_replace_files,
            messages,
            parts,
            local_contents,
            budget,
            media,
            context,
        )
        return PendingInput(messages_with_files, context.container_files, download)

    async def _check_unfetched_urls(
        self, messages: Sequence[Message], parts: Sequence[FilePart], owner: str
    ) -> None:
        """Check the URLs that only some backends download: the URLs in parts without a type and in
        assistant messages. Raises BadRequestError as `refuse_unsafe_urls` does."""
        fetched = {part.source.url for part in parts if isinstance(part.source, RemoteFile)}
        others = dict.fromkeys(url for url in remote_urls(messages) if is_url(url))
        if urls := [url for url in others if url not in fetched]:
            await self.refuse_unsafe_urls(urls, owner)

    async def _download_and_replace_files(
        self,
        messages: Sequence[Message],
        parts: Sequence[FilePart],
        local_contents: Sequence[_FileContent],
        budget: ByteBudget,
        media: "MediaPartBuilder",
        context: InputContext,
    ) -> AgentInput:
        """Download the files, and return the messages and all files."""
        fetched = await self._fetch_all(parts, budget, context.limits)
        contents = [
            await self._with_content_part(part, fetched[part.source.url], media)
            if isinstance(part.source, RemoteFile)
            else content
            for part, content in zip(parts, local_contents, strict=True)
        ]
        return await self._replace_files_by_paths(messages, parts, contents, context)

    async def _replace_files_by_paths(
        self,
        messages: Sequence[Message],
        parts: Sequence[FilePart],
        contents: Sequence[_FileContent],
        context: InputContext,
    ) -> AgentInput:
        """Return the messages with a sandbox path in place of each file and each long text."""
        files = [
            self._received_file(part, content)
            for part, content in zip(parts, contents, strict=True)
        ]
        over = await self._text_threshold_tokens(messages, context)
        near = texts_to_count(messages, over) if self._token_counter else ()
        counted: Mapping[str, int] = {}
        if self._token_counter and near:
            counted = await self._token_counter.token_counts(
                context.model, near, context.credentials
            )
        work = partial(
            plan_workspace,
            messages,
            files,
            threshold_tokens=over,
            token_counts=counted,
            index_without_notes=last_user_index(messages) if context.style_adds_notes else None,
        )
        if is_slow_to_plan(messages):
            # One at a time, because all these threads and the event loop share the GIL.
            async with self._planning:
                workspace = await asyncio.to_thread(work)
        else:
            workspace = work()
        inputs: list[InputFile] = []
        if workspace.files:
            inputs = await asyncio.to_thread(_input_files, workspace.files, parts, contents)
        return AgentInput(
            messages=workspace.messages,
            files=[*context.container_files, *inputs],
            notes=workspace.notes,
            documents_tokens=workspace.tokens_saved,
        )

    async def _text_threshold_tokens(
        self, messages: Sequence[Message], context: InputContext
    ) -> int | None:
        """Return the number of tokens above which a text is moved to files, or None for no limit.
        The model's context window is looked up only if a text is long."""
        limit = context.limits.offload_text_over_tokens
        if limit is None or self._find_window is None or not has_long_text(messages):
            return limit
        window = await self._find_window(context.model, context.owner, context.credentials)
        return offload_threshold(limit, window)

    async def missing_uploads(self, owner: str, file_ids: Iterable[str]) -> set[str]:
        """Return the ids that are not stored uploads of the owner."""
        return {each for each in file_ids if await self._uploads.find(owner, each) is None}

    async def _local_content(
        self, part: FilePart, sizes: Mapping[str, int], owner: str, media: "MediaPartBuilder"
    ) -> _FileContent:
        """Return the content of a part, or an empty content if it must be downloaded."""
        match part.source:
            case InlineData() as data:
                pieces = partial(_inline_pieces, data)
                size = sizes[part.identity]
                return _FileContent(part.mime_type, size, pieces, content_part=part.content_part)
            case UploadedFile(file_id=file_id):
                return await self._upload_content(part, owner, file_id, media)
        return _FileContent()

    def _received_file(self, part: FilePart, content: _FileContent) -> ReceivedFile:
        return ReceivedFile(
            position=part.position,
            kind=part.kind,
            identity=part.identity,
            filename=part.filename or content.filename,
            mime_type=content.mime_type,
            bytes=content.bytes,
            content_part=content.content_part if part.kind in self._modalities else None,
            error=content.fault,
        )

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request body: the files in base64, and the texts."""
        return (self._max_total_mib << 20) * 4 // 3 + _MAX_TEXT_BYTES

    # Files on the web

    async def refuse_unsafe_urls(self, urls: Sequence[str], owner: str) -> None:
        """Raise BadRequestError for a URL that is not http or https, such as a path, and for a URL
        that `refuse_private_urls` refuses. If the backend may download any URL, the second check is
        left out."""
        for url in urls:
            if not url.lower().startswith(("http:", "https:")):
                raise local_file_error(url)
        if self.backend_fetches_urls:
            return
        await refuse_private_urls(self._fetcher or Fetcher(), urls, owner)

    async def _with_content_part(
        self, part: FilePart, content: _FileContent, media: "MediaPartBuilder"
    ) -> _FileContent:
        """Return the content of a downloaded file, with a content part if the model accepts its
        kind. The part contains the bytes in place of the URL, because the backend would download
        the URL from inside its network. If the backend may do so, the part is unchanged."""
        if self.backend_fetches_urls:
            return replace(content, content_part=part.content_part)
        if content.fetched_file is None or part.kind not in self._modalities:
            return content
        data = content.fetched_file.data
        return replace(
            content, content_part=await media.downloaded_part(part, content.mime_type, data)
        )

    async def _fetch_all(
        self, parts: Sequence[FilePart], budget: ByteBudget, limits: InputLimits
    ) -> dict[str, _FileContent]:
        """Return the content of each URL, or the reason why it has none. The newest URLs are
        downloaded first, so that they take precedence under the size limit."""
        newest = (
            part.source.url for part in reversed(parts) if isinstance(part.source, RemoteFile)
        )
        urls = list(dict.fromkeys(newest))
        semaphore = asyncio.Semaphore(MAX_CONCURRENT_FETCHES)
        async with asyncio.TaskGroup() as group:
            tasks = {
                url: group.create_task(self._fetch(url, semaphore, budget, limits))
                for url in urls[:MAX_FETCHES]
            }
        beyond = f"was not fetched: only the newest {MAX_FETCHES} URLs of a request are"
        older = {url: _FileContent(fault=f"{url[:200]} {beyond}") for url in urls[MAX_FETCHES:]}
        return {url: task.result() for url, task in tasks.items()} | older

    async def _fetch(
        self, url: str, semaphore: asyncio.Semaphore, budget: ByteBudget, limits: InputLimits
    ) -> _FileContent:
        try:
            if self._fetcher is None or not limits.fetch_urls:
                raise FetchError("URLs are not fetched here")
            async with semaphore:
                file = await self._fetcher.fetch(
                    url, max_bytes=limits.max_file_mib << 20, budget=budget
                )
        except FetchError as error:
            return _FileContent(fault=f"{url[:200]} was not fetched: {error}")
        read = partial(_pieces, file.data)
        mime_type = normalize_mime_type(file.mime_type)
        return _FileContent(mime_type, len(file.data), read, fetched_file=file)

    # Uploads

    async def _upload_content(
        self, part: FilePart, owner: str, file_id: str, media: "MediaPartBuilder"
    ) -> _FileContent:
        upload = await self._uploads.find(owner, file_id)
        if upload is None:
            raise BadRequestError(
                f"Invalid '{part.param}': no file {file_id!r} was found.",
                param=part.param,
                code="file_not_found",
            )
        mime_type = normalize_mime_type(upload.mime_type)
        picture = None
        if part.kind == "image" and "image" in self._modalities:
            picture = await media.uploaded_image_part(part, upload, mime_type)
        return _FileContent(
            mime_type, upload.bytes, upload.read, filename=upload.filename, content_part=picture
        )


def _input_files(
    files: Sequence[FileToWrite], parts: Sequence[FilePart], contents: Sequence[_FileContent]
) -> list[InputFile]:
    found = []
    for file in files:
        source = file.source
        if isinstance(source, str):
            found.append(InputFile(file.path, text_digest(source), partial(_text_pieces, source)))
            continue
        read = contents[source].read
        assert read is not None
        found.append(InputFile(file.path, parts[source].identity, read))
    return found


async def _text_pieces(text: str) -> Pieces:
    for start in range(0, len(text), _PIECE_CHARS):
        piece = text[start : start + _PIECE_CHARS]
        yield piece.encode(errors="replace")  # UTF-8 cannot encode a lone surrogate


async def _inline_pieces(data: InlineData) -> Pieces:
    for piece in data.pieces():
        yield piece


async def _pieces(data: bytes) -> Pieces:
    if len(data) <= _PIECE_BYTES:
        yield data
        return
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]


def _with_identities(parts: Sequence[FilePart]) -> list[FilePart]:
    return [part.with_identity() for part in parts]


def _measure_inline_files(parts: Sequence[FilePart], limits: InputLimits) -> Steps[dict[str, int]]:
    """Return the size of each file in the request body, by the identity of the file. The work is
    divided into steps (see `Steps`); several small files share a step. Raises BadRequestError,
    FileTooLargeError."""
    sizes: dict[str, int] = {}
    bytes_left = limits.max_total_mib << 20
    chars_in_step = 0
    for part in parts:
        if not isinstance(part.source, InlineData) or part.identity in sizes:
            continue
        try:
            size = sizes[part.identity] = yield from part.source.measure()
        except ValueError as error:
            raise malformed_data_error(part.param, error) from error
        bytes_left -= size
        if size > limits.max_file_mib << 20 or bytes_left < 0:
            raise FileTooLargeError(
                f"Invalid file data: '{part.param}'. A file inside a request may have"
                f" {limits.max_file_mib} MiB, and all together {limits.max_total_mib} MiB.",
                param=part.param,
            )
        chars_in_step += len(part.source.text)
        if chars_in_step > PIECE_SIZE:
            chars_in_step = 0
            yield
    return sizes


class MediaPartBuilder:
    """Makes content parts with data URLs of the files that the model receives with one request. A
    file is encoded once. Its size counts for each part that names it, because the backend's request
    repeats the file for each part."""

    def __init__(self, reservation: BodyReservation | None) -> None:
        """`reservation` reserves the memory of the files."""
        self._reservation = reservation
        self._bytes_left = MAX_ALL_SHOWN_BYTES
        self._urls: dict[tuple[str, str], str] = {}

    async def downloaded_part(
        self, part: FilePart, mime_type: str, data: bytes
    ) -> dict[str, Any] | None:
        """Return an image, audio or video part with a data URL in place of its URL. Return None if
        the data is of another type or too large. Raises BodyTooLargeError, BusyError."""
        known_type = media_type_to_show(part, mime_type)
        if known_type is None:
            return None
        url = await self._data_url(part, known_type, len(data), partial(_pieces, data))
        return None if url is None else replace_url(part, url)

    async def uploaded_image_part(self, part: FilePart, upload: Upload, mime_type: str) -> Any:
        """Return an uploaded image as an `image_url` part, or None if it is too large or cannot be
        read. Raises BodyTooLargeError, BusyError."""
        try:
            url = await self._data_url(part, mime_type, upload.bytes, upload.read)
        except FileMissingError:
            return None  # the upload has just expired: the copy to the sandbox reports it
        if url is None:
            return None
        written = part.content_part or {}
        detail = {"detail": written["detail"]} if written.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": url, **detail}}

    async def _data_url(
        self, part: FilePart, mime_type: str, size: int, read: Callable[[], Pieces]
    ) -> str | None:
        if size > min(MAX_SHOWN_BYTES, self._bytes_left):
            return None
        self._bytes_left -= size
        head = f"data:{mime_type};base64,"
        key = (part.identity, mime_type)
        if self._reservation:
            copies = 1 if key in self._urls else 2  # in the backend's request, and in `_urls`
            self._reservation.take(copies * (len(head) + (size + 2) // 3 * 4))
        if key not in self._urls:
            pieces = [piece async for piece in read()]
            self._urls[key] = await asyncio.to_thread(_encode_data_url, head, pieces)
        return self._urls[key]


def _encode_data_url(head: str, pieces: Sequence[bytes]) -> str:
    return head + base64.b64encode(b"".join(pieces)).decode()


class TextTokenCounter:
    """Counts the tokens of texts with the model's tokenizer, if the backend has an endpoint for it.
    Counts are cached, because each request of a conversation contains the texts again."""

    def __init__(self, model: Model, timeout_s: float = COUNT_S) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self._cache: dict[tuple[str, bytes], int] = {}

    async def token_counts(
        self, model: str, texts: Iterable[str], credentials: Credentials | None = None
    ) -> dict[str, int]:
        """Return the token count of each text that is cached, or counted before the timeout, by
        text. `credentials` are the client's own credentials for the backend."""
        backend = self._model.with_credentials(credentials) if credentials else self._model
        found: dict[str, int] = {}
        unknown: dict[str, tuple[str, bytes]] = {}
        for text in dict.fromkeys(texts):
            key = (model, hashlib.sha256(text.encode(errors="surrogatepass")).digest())
            if (count := self._cache.get(key)) is None:
                unknown[text] = key
            else:
                found[text] = count
        try:
            async with asyncio.timeout(self._timeout_s):
                for text in list(unknown)[:MAX_COUNTED_TEXTS]:
                    count = await backend.count_tokens(model, text)
                    if count is not None:
                        found[text] = self._cache_count(unknown[text], count)
        except TimeoutError:
            pass  # the caller uses estimates for the others
        return found

    def _cache_count(self, key: tuple[str, bytes], count: int) -> int:
        while len(self._cache) >= _MAX_CACHED_COUNTS:
            del self._cache[next(iter(self._cache))]
        self._cache[key] = count
        return count
