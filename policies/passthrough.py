"""Requests that the proxy forwards to the backend: the paths that clients may reach, and the URLs
in a body that the backend would fetch from inside the operator's network."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, takewhile
from typing import Any, Literal
from urllib.parse import unquote

PathKind = Literal["backend", "plain only", "ours", "closed", "unreadable"]
"""backend: forwarded. plain only: forwarded only for a model with the suffix `:plain`, because any
other request belongs to the sandbox loop. ours: a path of the proxy, never forwarded. closed: never
forwarded, because it is for administrators of the backend. unreadable: servers could disagree on
the meaning of the path."""

PassthroughSetting = Literal["stateless", "all"]
"""The backend's paths that are forwarded. stateless: a fixed list of paths with which the backend
stores nothing. all: other paths too (batches, threads, vector stores, …). The backend sees one key
for all clients, and therefore every client can reach the stored data of other clients."""

CHAT_APIS = frozenset({"chat", "messages", "responses"})
"""APIs whose requests get a sandbox unless the model has the suffix `:plain`."""
OWN_RESOURCES = frozenset(
    {"capabilities", "containers", "conversations", "files", "health", "metrics", "models"}
)
OUR_PREFIXES = frozenset({"v1", "openai"})

_READABLE_PATH = re.compile(r"/[/\w.~:@!$&'()*+,=-]*", re.ASCII)
_PREFIX_SEGMENT = re.compile(r"v[0-9]\w*|api|inference|openai")
"""Matches a segment that may precede the resource in a path, such as `v1` in `/v1/models`."""
_CLOSED_WORDS = frozenset(
    {
        # the engine's weights, caches and peers: vLLM, SGLang
        *("adapter", "adapters", "cache", "checkpoint", "corpora", "corpus", "hicache", "kv"),
        *("lora", "memory", "scheduler", "transfer", "weight", "weights", "world"),
        # the engine's lifecycle: vLLM, SGLang
        *("abort", "admin", "config", "configure", "continue", "elastic", "fault", "flush"),
        *("freeze", "gate", "pause", "paused", "reset", "resume", "role", "rpc", "scale"),
        *("scaling", "send", "session", "shutdown", "sleep", "sleeping", "slow", "state", "wake"),
        # data on the engine and on other requests; SGLang's server_info contains its keys
        *("distribution", "dump", "dumper", "profile", "server", "slots", "trace"),
        # the models of Ollama, the accounts of OpenAI and of other proxies
        *("blobs", "copy", "create", "credentials", "delete", "key", "organization", "projects"),
        *("budget", "budgets", "bulk", "customer", "flushall", "invitation", "jwt", "login"),
        *("policies", "policy", "pull", "push", "settings", "spend", "sso", "team", "teams"),
        *("user", "users"),
    }
)
"""A path is closed if a word of the segment that names its resource is one of these: `lora` closes
`/v1/load_lora_adapter`. Words are compared, not whole segments, because every version of a server
adds routes with these words."""
_CLOSED_NAMES = frozenset(
    {
        # LiteLLM's and TabbyAPI's models, TabbyAPI's settings, Triton's models, memory and log,
        # LocalAI's processes, LiteLLM's statistics of all users
        *("backend", "download", "global", "model", "repository", "sampling", "tag"),
        *("template", "templates"),
        *("cudasharedmemory", "logging", "systemsharedmemory"),
    }
)
"""A path is closed if the segment that names its resource is one of these names. A part of a
segment does not count, because harmless routes such as /model_info contain the same words."""
_CHAT_COMPLETIONS = ["chat", "completions"]
_MODELS = "models"
_CLOSED_MODEL_WORDS = _CLOSED_WORDS | {
    *("apply", "download", "install", "load", "new", "unload", "update")
}
"""A path under /models is closed if one of its last two segments contains one of these words. LM
Studio, llama.cpp, Triton and LocalAI have such paths."""


def _parse_patterns(lines: str) -> dict[str, list[list[str]]]:
    """Return the patterns by their first segment, each as the list of its other segments."""
    patterns: dict[str, list[list[str]]] = {}
    for pattern in lines.split():
        head, *rest = pattern.strip("/").split("/")
        patterns.setdefault(head, []).append(rest)
    return patterns


_STATELESS_READS = _parse_patterns(
    "/models /models/* /models/*/ready /models/*/versions/*/ready /props /ready"
)
"""Paths that are stateless only for GET and HEAD."""
_STATELESS_CALLS = _parse_patterns(
    """
    /chat/completions /chat/completions/batch /chat/completions/render /messages
    /messages/count_tokens /responses/compact /responses/input_tokens
    """
)
"""Paths that are stateless only for POST and OPTIONS: a GET of `/chat/completions` lists stored
completions (OpenAI). `/responses` is missing because the backend stores responses."""
_STATELESS_PATHS = _parse_patterns(
    """
    / /apply-template /audio/speech /audio/transcriptions /audio/translations /beta/completions
    /chat /classify /cohere/v2/chat /completion /completions /completions/render /decode /detokenize
    /docs /embed /embed_all /embed_sparse /embedding /embeddings /encode /fim/completions /generate
    /generate_stream /generative_scoring /get_model_info /health_generate /images/edits
    /images/generations /images/variations /infill /info /invocations /load /loads /model_info
    /models/*/generate /models/*/generate_stream /models/*/infer /models/*/versions/*/infer
    /moderations /ocr /openapi.json /parse_function_call /ping /pooling /predict /ps /rerank
    /reranking /score /separate_reasoning /show /similarity /tags /tokenize /tokenizer_info /version
    /deployments/*/audio/speech /deployments/*/audio/transcriptions
    /deployments/*/audio/translations /deployments/*/completions /deployments/*/embeddings
    /deployments/*/images/edits /deployments/*/images/generations /engines/*/completions
    /engines/*/embeddings
    """
)
"""Paths that are stateless for GET, HEAD, POST and OPTIONS, without prefixes; `*` matches one
segment. They are paths of OpenAI, vLLM, SGLang, llama.cpp, TGI and TEI, Ollama, LM Studio, Triton,
Azure, DeepSeek and Mistral."""


def is_stateless(method: str, path: str) -> bool:
    """Return True if a request with this method and path leaves nothing in the backend that another
    client could read, list or delete."""
    segments = _path_segments(path)
    if segments is None or method not in ("GET", "HEAD", "OPTIONS", "POST"):
        return False
    rest = list(dropwhile(_PREFIX_SEGMENT.fullmatch, segments))
    if _matches_any(_STATELESS_PATHS, rest):
        return True
    if method in ("GET", "HEAD"):
        return _matches_any(_STATELESS_READS, rest)
    return segments[-2:] == _CHAT_COMPLETIONS or _matches_any(_STATELESS_CALLS, rest)


def can_refer_to_responses(path: str) -> bool:
    """Return True if a request to the path may name responses that the backend has stored."""
    return "responses" in (_path_segments(path) or ())


def _matches_any(patterns: Mapping[str, list[list[str]]], segments: Sequence[str]) -> bool:
    head, *rest = segments or [""]
    return any(
        len(pattern) == len(rest)
        and all(part in ("*", segment) for part, segment in zip(pattern, rest, strict=True))
        for pattern in patterns.get(head, ())
    )


def path_kind(path: str) -> PathKind:
    """Return the kind of a path as it was received, with its percent-encoding."""
    segments = _path_segments(path)
    if segments is None:
        return "unreadable"
    prefixes = list(takewhile(_PREFIX_SEGMENT.fullmatch, segments))
    head = segments[len(prefixes)] if len(prefixes) < len(segments) else ""
    if OUR_PREFIXES.issuperset(prefixes):
        if head in CHAT_APIS:
            return "plain only"
        if head in OWN_RESOURCES:
            return "ours"
    if segments[-2:] == _CHAT_COMPLETIONS:  # LiteLLM has this route under /engines/… and others too
        return "plain only"
    rest = segments[len(prefixes) + 1 :]
    return "closed" if _is_closed(head, rest) else "backend"


def _is_closed(resource: str, further_segments: Sequence[str]) -> bool:
    if resource in _CLOSED_NAMES or not _CLOSED_WORDS.isdisjoint(_segment_words(resource)):
        return True
    return resource == _MODELS and any(
        not _CLOSED_MODEL_WORDS.isdisjoint(_segment_words(segment))
        for segment in further_segments[-2:]
    )


def _segment_words(segment: str) -> list[str]:
    return re.split("[_-]", segment)


def _path_segments(path: str) -> list[str] | None:
    """Return the lower-case segments of a decoded path, or None if servers might parse the path
    differently: it does not begin with `/`, it has dot segments, or it has a character outside
    `_READABLE_PATH`, such as the `%` of double encoding."""
    decoded = unquote(path)
    segments = [segment for segment in decoded.lower().split("/") if segment]
    if not path.startswith("/") or not _READABLE_PATH.fullmatch(decoded):
        return None
    if "." in segments or ".." in segments:
        return None
    return segments


# URLs that the backend would fetch

URL_FIELDS = frozenset(
    {
        *("image", "images", "image_data", "image_url", "image_urls"),
        *("audio", "audios", "audio_data", "audio_url", "audio_urls", "ref_audio"),
        *("video", "videos", "video_data", "video_url", "video_urls"),
        *("file_url", "server_url", "url"),
    }
)
"""Fields with the URL of a file that the backend fetches. Some backends, such as SGLang, also open
local paths in them."""
_SEARCHED_TEXTS = URL_FIELDS | {"input", "inputs"}
"""Fields whose text may be, or contain, a URL."""
_UNSEARCHED_FIELDS = frozenset(
    {
        *("action", "annotations", "arguments", "citations", "functions", "headers", "metadata"),
        *("format", "guided_json", "input_schema", "json", "json_schema", "parameters"),
        *("response_format", "schema"),
    }
)
"""Fields whose content, at any depth, is not searched for URLs."""
_REPORT_TYPES = ("web_search", "web_fetch")
"""Prefixes of the types of items that report the pages that a model has seen."""
_IGNORED_CHARACTERS = r"[\t\r\n]*"
"""Characters that URL parsers ignore at any position."""
_SCHEMES = "|".join(_IGNORED_CHARACTERS.join(scheme) for scheme in ("http", "https", "file"))
_URL = re.compile(rf"[\s\0-\x1f]*(?:{_SCHEMES}){_IGNORED_CHARACTERS}:", re.IGNORECASE)
_BLANKS = "".join(map(chr, range(33)))
_MARKDOWN_IMAGE = re.compile(r"!\[\]\(([^)]{1,4096})")
_MAX_PATH_CHARS = 4096
_FILE_PATH_PREFIXES = ("/", "~", "./", "../")
_JPEG_BASE64_START = "/9j/"
"""The first characters of a JPEG in base64."""


def is_url(text: str) -> bool:
    """Return True if a text is an http, https or file URL."""
    return _URL.match(text) is not None


def remote_urls(body: Any) -> Iterator[str]:
    """Yield each URL in a request's body that the backend would fetch, and each local path that the
    backend would open."""
    pending: list[tuple[str, Any]] = [("", body)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, str):
            yield from _urls_in_field(name, value)
        elif isinstance(value, list):
            kinds = (dict, list, str) if name in URL_FIELDS else (dict, list)
            pending += [(name, item) for item in value if isinstance(item, kinds)]
        elif isinstance(value, dict):
            pending += _searched_fields(name, value)


def _searched_fields(name: str, part: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each field of `part` that may contain URLs. The part is the value
    of the field `name`."""
    kind = part.get("type")
    kind = kind if isinstance(kind, str) else ""
    for field, item in part.items():
        if isinstance(item, str):
            if field not in _SEARCHED_TEXTS:
                continue
        elif field in _UNSEARCHED_FIELDS or not isinstance(item, (dict, list)):
            continue
        if field == "url" and not _is_url_fetched(name, kind):
            continue
        if field == "input" and isinstance(item, dict) and kind.endswith("tool_use"):
            continue  # the arguments of a tool call
        if field == "input" and part.get("modality", "text") != "text":
            field = "url"
        yield field, item


def _is_url_fetched(name: str, kind: str) -> bool:
    """Return True if the backend fetches the `url` of a part of type `kind` in the field `name`.

    Outside `URL_FIELDS` and `source`, a part without a type is a document, and its `url` only says
    where the document's text comes from.
    """
    if not name or name in URL_FIELDS or name == "source":
        return True
    return bool(kind) and not kind.startswith(_REPORT_TYPES)


def _urls_in_field(name: str, value: str) -> Iterator[str]:
    if name == "inputs":  # TGI fetches the images in Markdown
        for image in _MARKDOWN_IMAGE.finditer(value):
            if _URL.match(image[1]):
                yield _clean_url(image[1])
    elif name in URL_FIELDS and (_URL.match(value) or _is_file_path(value)):
        yield _clean_url(value)


def _clean_url(url: str) -> str:
    return re.sub("[\t\r\n]", "", url).strip().strip(_BLANKS)


def _is_file_path(value: str) -> bool:
    """Return True if a string is the path of a file and not a file in base64."""
    if len(value) > _MAX_PATH_CHARS or value.startswith(_JPEG_BASE64_START):
        return False
    return value.startswith(_FILE_PATH_PREFIXES)
