"""Gets the turns of a run from the proxy: the text and the reasoning of the model in each turn, and
its tool calls.

The proxy keeps them for requests with `sandbox.capture: messages`. The answer itself has only the
steps of its run.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from evaluation.http_client import CONNECTION_ERROR, HTTPClient, RequestError
from evaluation.results import Step, Trajectory, Turn
from evaluation.trajectories import (
    MALFORMED_ERRORS,
    MAX_STEPS_CHARS,
    MAX_TEXT_CHARS,
    TABLE15,
    replace_surrogates,
    shorten,
    step_of,
)

MAX_BODY_BYTES = 16 * 2**20
"""Maximum size of a trajectory that is read. Each concurrent request may hold one in memory."""
MAX_TURNS = 500
MAX_ERROR_CHARS = 300
TIMEOUT_S = 60.0


async def with_turns(client: HTTPClient, trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with the turns of its run, or with the reason in `turns_error` if the
    turns cannot be read. `client` has the URL and the key of the proxy. Raises RequestError if the
    proxy cannot be reached: it may have died, and the run's trajectory with it."""
    path = f"/runs/{quote(trajectory.run_id, safe='')}/trajectory"
    try:
        async with asyncio.timeout(TIMEOUT_S):
            body = await client.get(path, MAX_BODY_BYTES)
        return _with_native_turns(trajectory, json.loads(body))
    except TimeoutError:
        reason = f"no trajectory within {TIMEOUT_S:.0f} s"
    except RequestError as error:
        if error.code == CONNECTION_ERROR:
            raise
        reason = f"{error.status or error.code}: {error}"
    except MALFORMED_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
    one_line = " ".join(replace_surrogates(reason).split())[:MAX_ERROR_CHARS]
    return trajectory.model_copy(update={"turns_error": one_line})


def _with_native_turns(trajectory: Trajectory, native_trajectory: Mapping[str, Any]) -> Trajectory:
    """Return `trajectory` with the turns of `native_trajectory`, the proxy's own trajectory of the
    run, up to MAX_TURNS and MAX_STEPS_CHARS. Raises the errors of MALFORMED_ERRORS."""
    steps = {step.number for step in trajectory.steps}
    # The steps that are left out are the last ones.
    last = max(steps, default=0) if trajectory.steps_left_out else None
    kept = [
        each for each in native_trajectory["tool_calls"] if last is None or each["step"] <= last
    ]
    tool_calls, model_calls = _calls_by_turn(kept), _calls_by_turn(native_trajectory["model_calls"])
    numbers = [each["turn"] for each in native_trajectory["turns"]]
    turns: list[Turn] = []
    chars = 0
    for number in numbers[:MAX_TURNS]:
        calls = tool_calls[number]
        turn = _turn(number, model_calls[number], native_trajectory["messages"]).model_copy(
            update={
                "capabilities": _capabilities(calls),
                "steps": tuple(each["step"] for each in calls if each["step"] in steps),
                "other_calls": tuple(_step(each) for each in calls if each["step"] not in steps),
            }
        )
        chars += (
            len(turn.text) + len(turn.reasoning) + sum(step.char_count for step in turn.other_calls)
        )
        if chars > MAX_STEPS_CHARS:
            break
        turns.append(turn)
    update = {"turns": tuple(turns), "turns_left_out": len(numbers) - len(turns)}
    return trajectory.model_copy(update=update)


def _calls_by_turn(calls: Sequence[Mapping[str, Any]]) -> Mapping[int, list[Mapping[str, Any]]]:
    """Return the calls by the numbers of their turns. A turn without calls has an empty list."""
    found: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for each in calls:
        found[each["turn"]].append(each)
    return found


def _turn(
    number: int, calls: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]
) -> Turn:
    """Return a turn with the replies of its model calls; the caller adds its tool calls."""
    replies = [messages[each["reply"]] for each in calls if each["reply"] is not None]
    reasoning = (each.get("reasoning") or each.get("reasoning_content") for each in replies)
    return Turn(
        number=number,
        text=_joined_text([_text_of(each.get("content")) for each in replies]),
        reasoning=_joined_text(list(map(_text_of, reasoning))),
        errors=tuple(_joined_text([each["error"]]) for each in calls if each["error"]),
        model_s=round(sum(each["duration_s"] for each in calls), 3),
    )


def _capabilities(calls: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """Return the paper's capabilities that calls use, by the proxy's classification; None if the
    proxy does not classify them."""
    if not all("capabilities" in each for each in calls):
        return None
    return tuple(name for name in TABLE15 if any(name in each["capabilities"] for each in calls))


def _step(call: Mapping[str, Any]) -> Step:
    seconds = call.get("duration_s")
    return step_of(
        call["step"],
        call["name"],
        call["arguments"],
        observation=call.get("observation"),
        exit_code=call.get("exit_code"),
        duration_ms=None if seconds is None else round(seconds * 1000),
    )


def _text_of(content: Any) -> str:
    """Return the text of a message's content, which is a string, a list of parts or None."""
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content)
    return content or ""


def _joined_text(texts: list[str]) -> str:
    return shorten(replace_surrogates("\n\n".join(filter(None, texts))), MAX_TEXT_CHARS)
