"""The HTTP headers that the proxy reads and sets itself. A relayed request or response has further
headers of the client or the backend: see `proxy.models.relay`."""

from enum import StrEnum

_EVERY_ROUTE = "every route"
_MODEL_ROUTES = "chat completions, responses, messages"
_DOWNLOAD_ROUTES = "downloads of files"


class _Header(StrEnum):
    routes: str
    """The routes that read or set the header."""

    def __new__(cls, name: str, routes: str) -> "_Header":
        member = str.__new__(cls, name)
        member._value_ = name
        member.routes = routes
        return member


class RequestHeader(_Header):
    """The request headers that the proxy reads, in lower case."""

    AUTHORIZATION = "authorization", _EVERY_ROUTE
    """The key, as `Bearer <key>`."""
    API_KEY = "x-api-key", _EVERY_ROUTE
    """The key, as Anthropic's clients send it. Read if there is no bearer key."""
    ORGANIZATION = "openai-organization", _EVERY_ROUTE
    """The organization of a key that the backend checks (`backend.forward_client_key`)."""
    PROJECT = "openai-project", _EVERY_ROUTE
    """The project of a key that the backend checks (`backend.forward_client_key`)."""
    REQUEST_ID = "x-request-id", _EVERY_ROUTE
    """The client's id of the request. The response repeats the id if it is printable."""
    IDEMPOTENCY_KEY = "idempotency-key", _MODEL_ROUTES
    """A name for the request. A request with the same name and body gets the same run; a request
    with the same name and another body is refused with status 422."""
    PROFILE = "x-sandbox-profile", _MODEL_ROUTES
    """Sets `sandbox.profile` if the body does not."""
    ENABLED = "x-sandbox-enabled", _MODEL_ROUTES
    """Sets `sandbox.enabled` if the body does not."""
    PROMPT = "x-sandbox-prompt", _MODEL_ROUTES
    """Sets `sandbox.prompt` if the body does not."""
    STEPS = "x-sandbox-steps", _MODEL_ROUTES
    """Sets `sandbox.steps` if the body does not."""
    USAGE = "x-sandbox-usage", _MODEL_ROUTES
    """Sets `sandbox.usage` if the body does not."""
    OFFLOAD_DOCUMENTS = "x-sandbox-offload-documents", _MODEL_ROUTES
    """`on` or `off`. Sets `sandbox.offload_documents` if the body does not."""
    DEADLINE = "x-sandbox-deadline", _MODEL_ROUTES
    """Sets `sandbox.deadline_s`. If the body sets the field, too, the smaller value applies."""
    ON_DISCONNECT = "x-sandbox-on-disconnect", _MODEL_ROUTES
    """Sets `sandbox.on_disconnect` if the body does not."""
    SESSION = "x-sandbox-session", _MODEL_ROUTES
    """Sets `sandbox.session` if the body does not."""
    OPEN_WEBUI_CHAT_ID = "x-openwebui-chat-id", _MODEL_ROUTES
    """Open WebUI's id of the chat. It names the session if no field or header of the proxy does."""
    CHAT_UI_CHAT_ID = "chatui-conversation-id", _MODEL_ROUTES
    """The id of the chat in Hugging Face's chat-ui, used like Open WebUI's id. Answers to chat-ui
    list the produced files (`artifacts.list_files`)."""
    CHAT_ID = "x-chat-id", _MODEL_ROUTES
    """The id of the chat in other clients, used like Open WebUI's id."""
    SESSION_ID = "x-session-id", _MODEL_ROUTES
    """The id of the chat in other clients, used like Open WebUI's id."""
    HERMES_SESSION_ID = "x-hermes-session-id", _MODEL_ROUTES
    """The id of the session in Hermes, used like Open WebUI's id."""
    CLAUDE_CODE_SESSION_ID = "x-claude-code-session-id", _MODEL_ROUTES
    """The id of the session in Claude Code, used like Open WebUI's id."""
    CODEX_THREAD_ID = "thread-id", _MODEL_ROUTES
    """The id of the thread in Codex, used like Open WebUI's id."""
    OPEN_WEBUI_TASK = "x-openwebui-task", _MODEL_ROUTES
    """The purpose of a utility request of Open WebUI, such as to write a title. The request gets
    no sandbox."""
    OPEN_WEBUI_PREFIX = "x-openwebui-", "chat completions"
    """A header with this prefix shows that the client is Open WebUI. The default step mode is then
    `items`."""
    STAINLESS_READ_TIMEOUT = "x-stainless-read-timeout", _MODEL_ROUTES
    """Seconds without data after which OpenAI's Python SDK disconnects."""
    STAINLESS_TIMEOUT = "x-stainless-timeout", _MODEL_ROUTES
    """Seconds without a first byte after which OpenAI's Node SDK disconnects."""
    STAINLESS_RETRY_COUNT = "x-stainless-retry-count", _MODEL_ROUTES
    """The number of earlier attempts of OpenAI's SDKs. A retry gets the run of the first
    attempt."""
    ORIGINATOR = "originator", _MODEL_ROUTES
    """The client. For `codex…` the default of `sandbox.usage` is `last_call`."""
    USER_AGENT = "user-agent", _MODEL_ROUTES
    """The client. For `opencode/…` the default of `sandbox.usage` is `last_call`."""
    ORIGIN = "origin", _EVERY_ROUTE
    """The web page that sends the request. A server without keys refuses pages of other sites."""
    ACCEPT = "accept", "`/metrics`"
    """The format of the metrics: OpenMetrics or Prometheus's text format."""


class ResponseHeader(_Header):
    """The response headers that the proxy sets."""

    RUN = "X-Sandbox-Run", _MODEL_ROUTES
    """The id of the run, in errors too."""
    CONTAINER = "X-Sandbox-Container", _MODEL_ROUTES
    """The id of the run's container."""
    ROUTE = "x-sandbox-route", _MODEL_ROUTES
    """The reason why the request had no run. Absent if the request had a run."""
    ROUTE_DETAIL = "x-sandbox-route-detail", _MODEL_ROUTES
    """The change that would give the request a run, if the reason is the model's tool support."""
    REQUEST_ID = "x-request-id", _EVERY_ROUTE
    """The id of the request: the client's id, or an id made from the id of the run."""
    MESSAGES_REQUEST_ID = "request-id", "messages"
    """The id of the request, as Anthropic's clients read it."""
    RETRY_AFTER = "Retry-After", _EVERY_ROUTE
    """Seconds after which a retry may succeed. Set with some errors of status 429 and 503."""
    SHOULD_RETRY = "x-should-retry", _MODEL_ROUTES
    """`false` with an error after which OpenAI's SDKs shall not retry."""
    AUTHENTICATE = "WWW-Authenticate", _EVERY_ROUTE
    """`Bearer`, with an error of status 401."""
    ALLOW = "Allow", _EVERY_ROUTE
    """The methods of the route, with an error of status 405."""
    CONNECTION = "Connection", _EVERY_ROUTE
    """`close` if the server closes the connection after the response."""
    CACHE_CONTROL = "Cache-Control", "streams, downloads of files, `/docs`"
    """`no-cache` for a stream, so that no cache delays it. Downloads may be cached for an hour."""
    CONTENT_DISPOSITION = "Content-Disposition", _DOWNLOAD_ROUTES
    """The name of the file. `attachment` for files that a browser must not open."""
    CONTENT_TYPE_OPTIONS = "X-Content-Type-Options", "downloads of files, `/docs`"
    """`nosniff`: the browser must not guess another type."""
    CONTENT_SECURITY_POLICY = "Content-Security-Policy", "downloads of files, `/docs`"
    """The restrictions of a page that the browser opens."""
    REFERRER_POLICY = "Referrer-Policy", _DOWNLOAD_ROUTES
    """`no-referrer`, because the URL of a download gives access to the file."""
