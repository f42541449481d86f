"""Recognizes utility requests, which chat clients send for their own use: titles, tags,
suggestions, probes.

A utility request has a header that its client sets, or a prompt that its client makes from a
template. A template is recognized by the beginning of the prompt, and by passages further down or
at the end. So a user's question about titles does not match, nor does a quotation of a template.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from policies.headers import RequestHeader


@dataclass(frozen=True, slots=True)
class Template:
    """A prompt template of a client's utility requests."""

    client: str
    role: Literal["system", "last"]
    """The message with the prompt: a system message, or the last message if its role is user,
    system or developer."""
    opening: str
    """A regular expression for the beginning of the text."""
    passages: tuple[str, ...] = ()
    """Passages that the text must contain."""
    end: str = ""
    """The required end of the text. Empty: any end."""
    follows_chat: bool = False
    """True if the client sends the prompt after the messages of the chat. A template that does not
    follow a chat matches only in requests without assistant and tool messages."""
    allows_tools: bool = False
    """True if the client offers its tools in the request as well. Other templates match only in
    requests without tools."""

    def fits(self, text: str) -> bool:
        """Return True if a text is made from the template."""
        return (
            re.match(self.opening, text) is not None
            and text.rstrip().endswith(self.end)
            and all(part in text for part in self.passages)
        )


_PREAMBLE = re.compile(
    r"\s*(?:x-anthropic-billing-header:[^\n]*\s+)?"
    r"(?:You are (?:Claude Code|a Claude agent),[^\n]*\s+)?"
)
"""The lines that Claude Code and its SDK put before every system prompt."""
_CHAT_PASSAGES = ("### Guidelines:", "### Output:", "<chat_history>")
_CHAT_END = "</chat_history>"
_MESSAGE_TITLE = (
    r"(?:- )?[Yy]ou will generate a short title based on the first message a user begins"
)


def _template(
    client: str, role: Literal["system", "last"], opening: str, *passages: str, **conditions: Any
) -> Template:
    return Template(client, role, opening, passages, **conditions)


TEMPLATES = (
    # Open WebUI, 0.4 to 0.12: backend/open_webui/config.py and utils/context_compaction.py.
    _template(
        "Open WebUI",
        "last",
        r"#+ Task:\s+(?:Generate a concise\b[^\n]{0,60}\btitle\b|Generate 1-3 broad tags\b"
        r"|Suggest 3-5 relevant follow-up questions\b|Predict 3-5 useful messages\b"
        r"|Generate a detailed prompt for a[mn]? image generation task\b"
        r"|Analyze the chat history to determine the necessity of generating search queries\b)",
        *_CHAT_PASSAGES,
        end=_CHAT_END,
    ),
    _template(
        "Open WebUI",
        "last",
        r"Create a concise, 3-5 word title\b",
        "RESPOND ONLY WITH THE TITLE",
        "<chat_history>",
        end=_CHAT_END,
    ),
    _template(
        "Open WebUI",
        "last",
        r"#+ Task:\s+You are an autocompletion system\.",
        *("<chat_history>", "<type>", "<text>"),
        end="# Output:",
    ),
    _template(
        "Open WebUI",
        "last",
        r"(?:#+ Task:\s+S|You MUST s)ummarize the conversation history that will be compacted\b",
        *("### Messages Being Compacted:", "### Recent Messages Kept In Context:"),
    ),
    _template(
        "Open WebUI",
        "last",
        r"Your task is to reflect the speaker's likely facial expression through a fitting emoji\.",
        "Message: ```",
        end="```",
    ),
    _template(
        "Open WebUI",
        "last",
        r"You have been provided with a set of responses from various models to the latest ",
        "Responses from models:",
    ),
    _template(
        "Open WebUI",
        "system",
        r"Available Tools: ",
        "Your task is to choose and return the correct tool(s) from the list of available tools",
    ),
    # LibreChat: src/utils/title.ts of its agents package, and before that prompts/titlePrompts.js.
    _template(
        "LibreChat",
        "last",
        r"Provide a concise, 5-word-or-less title for the conversation, using title case[^\n]*"
        r"\n+Conversation:\s+User:",
    ),
    _template(
        "LibreChat",
        "last",
        r"Analyze this conversation and provide:\s+1\. The detected language of the conversation\s+"
        r"2\. A concise title in the detected language\b[^\n]*\n+User:",
    ),
    _template(
        "LibreChat",
        "last",
        r"Write a concise title for this conversation in the (?:given|detected) language\.\s+"
        r"Title in 5 Words or Less\.",
    ),
    _template(
        "LibreChat",
        "system",
        r"Write a concise title for this conversation in the given language\.\s+"
        r"Title in 5 Words or Less\.",
    ),
    _template(
        "LibreChat",
        "last",
        r"Please generate a concise, 5-word-or-less title for the conversation, using its same "
        r"language\b",
        end="||>Title:",
    ),
    _template(
        "LibreChat",
        "last",
        r"Detect the language used in the following text\. Note: words may be misspelled or cut "
        r"off;",
    ),
    _template(
        "LibreChat",
        "system",
        r"In this environment you have access to a set of tools you can use to generate the "
        r"conversation title\.",
        "<tool_name>submit_title</tool_name>",
    ),
    # LobeChat: packages/prompts/src/chains/summaryTitle.ts.
    _template(
        "LobeChat",
        "system",
        r"You are a professional conversation summarizer\. Generate a concise title\b",
        "Rules:",
        "Output ONLY the title text",
    ),
    # Hugging Face chat-ui: src/lib/server/textGeneration/title.ts.
    _template("chat-ui", "system", r"You are a chat thread titling assistant\.", "Rules:"),
    # n8n's chat hub: chat-hub.constants.ts.
    _template(
        "n8n",
        "system",
        r"Generate a concise, descriptive title for this conversation based on the user's "
        r"message\.",
        "Requirements:",
    ),
    # Claude Code, as recorded on the wire: titles since 2.1, before that topics and session names.
    _template("Claude Code", "last", r"<session>\s", "</session>\n\nWrite the title in "),
    _template("Claude Code", "system", r"You are naming a coding session\b", '"title"'),
    _template(
        "Claude Code",
        "system",
        r"Generate a concise, sentence-case title \(3-7 words\) that captures the main topic\b",
        "coding session",
    ),
    _template(
        "Claude Code",
        "system",
        r"Analyze if this message indicates a new conversation topic\.",
        "isNewTopic",
    ),
    _template(
        "Claude Code",
        "system",
        r"Summarize this coding conversation in under 50 characters\.",
        "Capture the main task",
    ),
    _template(
        "Claude Code",
        "last",
        r"Please write a 5.10 word title (?:for )?the following conversation:",
        end="Respond with the title for the conversation and nothing else.",
    ),
    _template(
        "Claude Code",
        "last",
        r"You are coming up with a succinct title and git branch name for a coding session\b",
        "<description>",
        "</description>",
        end="Please generate a title and branch name for this session.",
    ),
    # opencode: packages/opencode/src/agent/prompt/title.txt. The second template is its
    # earlier prompt, which Crush, Vercel's chatbot and nanobot use, too.
    _template(
        "opencode",
        "system",
        r"You are a title generator\. You output ONLY a thread title\.",
        "<rules>",
        "<examples>",
    ),
    _template("opencode", "system", _MESSAGE_TITLE, "the title should be a summary"),
    # Codex's app, which requests the title in a separate thread.
    _template(
        "Codex",
        "last",
        r"You are a helpful assistant\. You will be presented with a user prompt, and your job is "
        r"to provide a short title for a task\b",
        "Generate a concise UI title",
        "User prompt:\n",
        allows_tools=True,
    ),
    # GitHub Copilot Chat (prompts/node/panel/title.tsx), CodeCompanion.
    _template(
        "Copilot Chat",
        "system",
        r"You are an expert in crafting (?:pithy|ultra-compact) titles for chatbot conversations\.",
        "You are presented with a chat",
    ),
    # Goose: create_session_name_prompt in its provider base.
    _template(
        "Goose",
        "last",
        r"(?:Here are the first few user messages:\n|Based on the conversation so far,)",
        "provide a concise description of this session in 4 words or less.",
        end="reply *ONLY* with the description",
    ),
    # Continue: core/util/chatDescriber.ts.
    _template(
        "Continue",
        "last",
        r"Given the following\.\.\. please reply with a title for the chat that is 3-4 words in "
        r"length,",
        "you don't need ending punctuation.",
    ),
    # Cherry Studio: src/renderer/src/config/prompts.ts, and the same in its app.
    _template(
        "Cherry Studio",
        "system",
        r"You are an assistant skilled in conversation\. You need to summarize the user's "
        r"conversation into a title within 10 words\.",
    ),
    _template(
        "Cherry Studio",
        "system",
        r"Summarize the given session as a 10-word title using user language, ignoring commands\b",
    ),
    # Chatbox: packages/prompts.ts.
    _template(
        "Chatbox",
        "last",
        r"Based on the chat history, give this conversation a name\.\s+Keep it short - \d+ ",
        "Here's the conversation:",
        end="The name is:",
    ),
    # aider: aider/prompts.py.
    _template(
        "aider",
        "system",
        r"You are an expert software engineer that generates concise, one-line Git commit messages "
        r"based on the provided diffs\.",
    ),
    _template(
        "aider",
        "system",
        r"\*Briefly\* summarize this partial conversation about programming\.",
    ),
    # Zed: summarize_thread_prompt.txt.
    _template(
        "Zed",
        "last",
        r"Generate a concise 3-7 word title for this conversation, omitting punctuation\.\s+"
        r"Go straight to the title, without any preamble and prefix like [^\n]{1,400}\Z",
        follows_chat=True,
    ),
    # NextChat: app/locales/en.ts, Store.Prompt.
    _template(
        "NextChat",
        "last",
        r"Please generate a four to five word title summarizing our conversation without any "
        r"lead-in,",
        end="Remove enclosing quotation marks.",
        follows_chat=True,
    ),
    _template(
        "NextChat",
        "last",
        r"Summarize (?:the|our) discussion briefly in \d+ (?:words|characters) or less to use as a "
        r"prompt for future context\.\s*\Z",
        follows_chat=True,
    ),
)
_PROBE_TEXTS = frozenset({"quota", "test"})
"""The messages by which Claude Code checks a key and its quota."""


def is_utility_request(body: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Return True for a utility request. The names of `headers` are in lower case."""
    task = headers.get(RequestHeader.OPEN_WEBUI_TASK, "").strip()
    if task and not task.startswith("{{"):  # some versions send the placeholder itself
        return True
    messages = [message for message in body.get("messages") or [] if isinstance(message, Mapping)]
    return _is_probe(body, messages) or _is_from_template(
        messages, offers_tools=_offers_tools(body)
    )


def _offers_tools(body: Mapping[str, Any]) -> bool:
    """Return True if a request offers tools. A single tool that the model must call does not count:
    LibreChat sends such a tool to get a title in a certain form (LangChain's
    `withStructuredOutput`)."""
    tools = body.get("tools")
    forced = isinstance(body.get("tool_choice"), Mapping)
    return bool(tools) and not (forced and isinstance(tools, list) and len(tools) == 1)


def _is_probe(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    if len(messages) != 1 or body.get("max_tokens") != 1:
        return False
    return _text(messages[0].get("content")) in _PROBE_TEXTS


def _is_from_template(messages: Sequence[Mapping[str, Any]], *, offers_tools: bool) -> bool:
    if not messages:
        return False
    has_begun = any(message.get("role") in ("assistant", "tool") for message in messages)
    return any(
        template.fits(text)
        for role, text in _candidate_texts(messages)
        if _opening_pattern().match(text)  # excludes most texts at once
        for template in TEMPLATES
        if template.role == role
        and (template.follows_chat or not has_begun)
        and (template.allows_tools or not offers_tools)
    )


@cache
def _opening_pattern() -> re.Pattern[str]:
    """Return a pattern that matches the opening of any template, compiled at the first use."""
    return re.compile("|".join(f"(?:{template.opening})" for template in TEMPLATES))


def _candidate_texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the texts that may match a template, each with the `role` the template must have."""
    for message in messages:
        if message.get("role") in ("system", "developer"):
            text = _text(message.get("content"))
            preamble = _PREAMBLE.match(text)
            yield "system", text[preamble.end() if preamble else 0 :]
    if messages[-1].get("role") in ("user", "system", "developer"):
        yield "last", _text(messages[-1].get("content")).lstrip()


def _text(content: Any) -> str:
    """Return the text of a message, or an empty string if it has other parts than text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        return ""
    return "\n\n".join(str(text) for text in texts)
