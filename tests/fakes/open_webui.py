"""A stream reader that treats each frame as Open WebUI 0.12 does.

The items are in the order in which Open WebUI would show them. Text deltas are appended as items.
Frames with an item replace or insert the item at their `output_index` without a check. Open WebUI
would run every call that has no result.
"""

from typing import Any

Json = dict[str, Any]


class OpenWebUI:
    """One message of the assistant, while it is streamed."""

    def __init__(self) -> None:
        self.items: list[Json] = []
        self.statuses: list[tuple[str, bool]] = []
        """The text of each status line, and True if the status was final."""
        self.files: list[Json] = []
        self.error: Json | None = None

    def take(self, frame: Json) -> None:
        """Read one frame."""
        if "event" in frame:
            self._take_event(frame["event"])
        if str(frame.get("type", "")).startswith("response."):
            self._take_item(frame)  # and nothing else in the frame
        elif frame.get("choices"):
            self._take_delta(frame["choices"][0]["delta"])
        elif "error" in frame:
            self.error = frame["error"]

    def _take_event(self, event: Json) -> None:
        data = event["data"]
        if event["type"] == "status":
            self.statuses.append((data["description"], data["done"]))
        elif event["type"] == "files":
            self.files += data["files"]
        else:
            raise AssertionError(event)

    def _take_item(self, frame: Json) -> None:
        item, index = frame["item"], frame["output_index"]
        known = [n for n, other in enumerate(self.items) if other.get("id") == item["id"]]
        if frame["type"] == "response.output_item.added" and not known:
            self.items.insert(index, item)
        elif frame["type"] == "response.output_item.added":
            self.items[known[0]] = item
        elif index < len(self.items):  # whatever stands there
            self.items[index] = item
        else:
            self.items.append(item)

    def _take_delta(self, delta: Json) -> None:
        for kind, text in (
            ("reasoning", delta.get("reasoning_content")),
            ("message", delta.get("content")),
        ):
            if not text:
                continue
            if not self.items or self.items[-1]["type"] != kind:
                self.items.append({"type": kind, "text": ""})
            self.items[-1]["text"] += text

    @property
    def shown(self) -> list[str]:
        """A short description of each item."""
        return [_in_short(item) for item in self.items]

    @property
    def to_run(self) -> list[str]:
        """The names of the calls that the client would run itself."""
        done = {item.get("call_id") for item in self.items if _is(item, "output")}
        return [
            item["name"] for item in self.items if _is(item, "") and item["call_id"] not in done
        ]

    @property
    def messages(self) -> list[Json]:
        """The messages that represent this one in the next request."""
        said: list[Json] = []
        calls: list[Json] = []
        for item in self.items:
            if _is(item, "output"):
                if calls:
                    said.append({"role": "assistant", "content": "", "tool_calls": calls})
                    calls = []
                text = "".join(part["text"] for part in item["output"])
                said.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
            elif _is(item, ""):
                function = {"name": item["name"], "arguments": item["arguments"]}
                calls.append({"id": item["call_id"], "type": "function", "function": function})
            elif item["type"] == "message":
                said.append({"role": "assistant", "content": item["text"]})
        return said


def _is(item: Json, what: str) -> bool:
    return bool(item["type"] == ("function_call_output" if what else "function_call"))


def _in_short(item: Json) -> str:
    if _is(item, ""):
        return f"{item['name']} {item['arguments']} {item['status']}"
    if _is(item, "output"):
        return f"-> {item['output'][0]['text']}"
    return f"{item['type']}: {item['text']}"
