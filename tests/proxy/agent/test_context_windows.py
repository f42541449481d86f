"""The context window: configured, listed, or learnt from refusals."""

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from policies.context import ContextSizes
from proxy.agent.context_windows import MAX_LEARNT, ContextWindows
from proxy.errors import BackendError
from proxy.models.scripted import ScriptedModel

OWNER = "anybody"


class ListedModels(ScriptedModel):
    """A model whose server lists these models."""

    def __init__(self, *entries: dict[str, Any], error: Exception | None = None) -> None:
        super().__init__([])
        self.list_calls = 0
        self._entries = entries
        self._error = error

    async def models(self) -> list[dict[str, Any]]:
        self.list_calls += 1
        await anyio.lowlevel.checkpoint()
        if self._error:
            raise self._error
        return list(self._entries)


@pytest.mark.parametrize(
    ("entry", "window"),
    [
        ({"id": "m", "max_model_len": 4096}, 4096),
        ({"id": "m", "context_length": 131072}, 131072),
        ({"id": "m", "context_window": 8192}, 8192),
        ({"id": "m", "max_model_len": None, "max_context_length": 32768}, 32768),
        ({"id": "m", "meta": {"n_ctx": 2048, "n_ctx_train": 8192}}, 2048),
        ({"id": "another", "meta": {"n_ctx": 2048}}, 2048),
        ({"id": "m", "meta": {"n_ctx": True}}, None),
        ({"id": "m", "meta": {"n_ctx_train": 8192}}, None),
        ({"id": "m", "meta": "n_ctx"}, None),
        ({"id": "m", "max_model_len": "4096"}, None),
        ({"id": "m", "max_model_len": True}, None),
        ({"id": "m", "max_model_len": 0}, None),
        ({"id": "m"}, None),
        ({"id": "another", "max_model_len": 4096}, None),
    ],
)
async def test_context_window_is_read_from_the_list_of_models(
    entry: dict[str, Any], window: int | None
) -> None:
    assert await ContextWindows().get(ListedModels(entry), OWNER, "m") == window


async def test_window_applies_only_to_its_own_model_name() -> None:
    listed = [{"id": name, "meta": {"n_ctx": 2048}} for name in ("a", "b")]
    model, windows = ListedModels(*listed), ContextWindows()
    found = [await windows.get(model, OWNER, name) for name in ("a", "b", "c")]
    assert found == [2048, 2048, None]


async def test_window_of_the_only_listed_model_is_ignored_after_a_call_used_more_tokens() -> None:
    model, windows = ListedModels({"id": "a", "meta": {"n_ctx": 2048}}), ContextWindows()
    assert await windows.get(model, OWNER, "m") == 2048
    windows.record_usage(OWNER, "m", 2049)
    assert await windows.get(model, OWNER, "m") is None


async def test_get_without_refresh_lists_models_only_if_they_were_never_listed() -> None:
    model, windows = ListedModels({"id": "another", "max_model_len": 4096}), ContextWindows()
    assert [await windows.get_without_refresh(model, OWNER, "m") for _ in range(2)] == [
        None,
        None,
    ]
    assert model.list_calls == 1
    windows.record_listing([{"id": "m", "max_model_len": 4096}])
    assert await windows.get_without_refresh(model, OWNER, "m") == 4096


async def test_concurrent_runs_list_models_once() -> None:
    model, windows = ListedModels({"id": "m", "max_model_len": 4096}), ContextWindows()
    found: list[int | None] = []

    async def get_window() -> None:
        found.append(await windows.get(model, OWNER, "m"))

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(get_window)
    assert (found, model.list_calls) == ([4096] * 5, 1)


async def test_failed_listing_of_models_is_not_repeated_for_a_while() -> None:
    model, windows = ListedModels(error=BackendError("no")), ContextWindows()
    assert [await windows.get(model, OWNER, "m") for _ in range(3)] == [None] * 3
    assert model.list_calls == 1


async def test_window_in_a_refusal_takes_precedence_over_the_listing() -> None:
    model, windows = ListedModels({"id": "m", "max_model_len": 4096}), ContextWindows()
    assert await windows.get(model, OWNER, "m") == 4096
    windows.record_refusal(OWNER, "m", ContextSizes())
    assert await windows.get(model, OWNER, "m") == 4096
    windows.record_refusal(OWNER, "m", ContextSizes(2048, 3000))
    assert await windows.get(model, OWNER, "m") == 2048


async def test_window_in_a_refusal_is_dropped_after_a_call_used_more_tokens() -> None:
    windows = ContextWindows()
    windows.record_refusal(OWNER, "m", ContextSizes(2048))
    windows.record_usage(OWNER, "m", 2048)
    assert await windows.get(ListedModels(), OWNER, "m") == 2048
    windows.record_usage(OWNER, "m", 2049)
    assert await windows.get(ListedModels(), OWNER, "m") is None


async def test_window_in_a_refusal_applies_only_to_the_owner_of_the_refused_request() -> None:
    model, windows = ListedModels({"id": "m", "max_model_len": 32768}), ContextWindows()
    windows.record_refusal("a", "m", ContextSizes(5000))
    found = [await windows.get(model, owner, "m") for owner in ("a", "b")]
    assert found == [5000, 32768]


async def test_window_in_a_refusal_applies_even_if_earlier_calls_used_more_tokens() -> None:
    """A refusal with a smaller window than earlier usage resets that usage."""
    windows = ContextWindows()
    windows.record_usage("a", "m", 30_000)
    windows.record_refusal("a", "m", ContextSizes(8192))
    assert windows.known_window("a", "m") == 8192
    windows.record_usage("a", "m", 9000)
    assert windows.known_window("a", "m") is None


async def test_usage_of_one_owner_does_not_change_the_window_of_another() -> None:
    windows = ContextWindows()
    windows.record_refusal("a", "m", ContextSizes(5000))
    windows.record_usage("b", "m", 6000)
    assert [windows.known_window(owner, "m") for owner in ("a", "b")] == [5000, None]


async def test_changed_window_in_the_model_list_applies_although_earlier_calls_were_larger() -> (
    None
):
    windows = ContextWindows()
    windows.record_listing([{"id": "m", "max_model_len": 8192}])
    windows.record_usage("a", "m", 8193)
    windows.record_listing([{"id": "m", "max_model_len": 8192}])
    assert windows.known_window("a", "m") is None
    windows.record_listing([{"id": "m", "max_model_len": 2048}])
    assert windows.known_window("a", "m") == 2048


async def test_number_of_models_with_learnt_windows_is_bounded() -> None:
    windows = ContextWindows()
    for number in range(MAX_LEARNT + 1):
        windows.record_refusal("a", f"m{number}", ContextSizes(2048))
    known = [windows.known_window("a", f"m{number}") for number in (0, MAX_LEARNT)]
    assert known == [None, 2048]


async def test_configured_window_is_never_overridden() -> None:
    windows = ContextWindows(1000)
    windows.record_refusal(OWNER, "m", ContextSizes(500))
    windows.record_usage(OWNER, "m", 2000)
    model = ListedModels({"id": "m", "max_model_len": 4096})
    assert (await windows.get(model, OWNER, "m"), model.list_calls) == (1000, 0)
