"""config.yaml: the example is the default, and every mistake is one clear line."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.budgets import DailyBudget
from policies.prices import Price
from proxy.config import (
    BackendConfig,
    Config,
    ConfigError,
    ServerConfig,
    backend_key_variable,
    load,
    parse,
    require_forwarding_fits,
    secret,
    state_dir,
)

EXAMPLE = Path(__file__).parents[2] / "config.yaml"


def complaint(tree: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        parse(tree, "c.yaml")
    return str(raised.value)


def test_the_example_is_the_default() -> None:
    assert load(EXAMPLE) == Config() == load(None)


def test_the_example_names_every_key_there_is() -> None:
    assert keys(yaml.safe_load(EXAMPLE.read_text("utf-8"))) == keys(Config().model_dump())


def keys(tree: Any) -> Any:
    return {key: keys(value) for key, value in tree.items()} if isinstance(tree, dict) else None


def test_a_key_that_is_left_out_keeps_its_default(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("server: {port: 9000}\nlimits: {max_turns: 5}\n", encoding="utf-8")
    config = load(path)
    assert (config.server.port, config.limits.max_turns) == (9000, 5)
    assert config.server.host == Config().server.host
    assert config.limits.wall_time_s == Config().limits.wall_time_s


def test_a_setting_of_the_last_release_is_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tree = {"sandbox": {"agent": "python", "self_test": False}}
    assert parse(tree, "c.yaml") == parse({"sandbox": {"self_test": False}}, "c.yaml")
    assert "c.yaml: sandbox.agent is ignored" in caplog.text
    assert tree["sandbox"] == {"agent": "python", "self_test": False}


def test_prices_are_given_by_model() -> None:
    given = {"input_per_mtok": 0.2, "output_per_mtok": 0.8, "cached_per_mtok": 0.02}
    config = parse({"backend": {"prices": {"mine": given}}, "per_day": {"cost_usd": 5}}, "c.yaml")
    assert config.backend.prices == {"mine": Price(0.2, 0.8, 0.02)}
    assert config.per_day == DailyBudget(cost_usd=5.0)
    for wrong in (
        {"input_per_mtok": 1},
        {**given, "per_call": 1},
        {**given, "cached_per_mtok": -1},
    ):
        assert complaint({"backend": {"prices": {"mine": wrong}}}).startswith(
            "c.yaml: backend.prices.mine."
        )


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "---\n"])
def test_an_empty_file_is_all_defaults(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    assert load(path) == Config()


@pytest.mark.parametrize(
    "path",
    [
        "sever",
        "server.prot",
        "backend.url",
        "sandbox.docker.imag",
        "sandbox.bubblewrap.root",
        "sandbox.isolation.network",
        "limits.max_turn",
        "artifacts.keep",
    ],
)
def test_an_unknown_key_is_refused_with_its_path(path: str) -> None:
    tree: Any = 1
    for key in reversed(path.split(".")):
        tree = {key: tree}
    line = complaint(tree)
    assert line.startswith(f"c.yaml: {path}: ")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"server": {"port": "many"}}, "server.port"),
        ({"server": {"port": 65536}}, "server.port"),
        ({"server": {"steps": "cards"}}, "server.steps"),
        ({"server": None}, "server"),
        ({"server": []}, "server"),
        ({"backend": {"kind": "vllm"}}, "backend.kind"),
        ({"backend": {"timeout_s": 0}}, "backend.timeout_s"),
        ({"backend": {"attempts": 0}}, "backend.attempts"),
        ({"backend": {"models": "gpt"}}, "backend.models"),
        ({"sandbox": {"backend": "podman"}}, "sandbox.backend"),
        ({"sandbox": {"bubblewrap": {"uid": 0}}}, "sandbox.bubblewrap.uid"),
        ({"sandbox": {"isolation": {"cpus": "two"}}}, "sandbox.isolation.cpus"),
        ({"limits": {"max_turns": 1.5}}, "limits.max_turns"),
        ({"limits": "none"}, "limits"),
        ({"artifacts": {"max_files": []}}, "artifacts.max_files"),
        ({"artifacts": {"deny_types": ["html"]}}, "artifacts"),
        ([], "top"),
        ("text", "top"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(tree: Any, place: str) -> None:
    line = complaint(tree)
    assert line.startswith(f"c.yaml: {place}: ")
    assert "\n" not in line


def test_each_mistake_has_its_line() -> None:
    lines = complaint({"server": {"port": "x", "prot": 1}}).splitlines()
    assert sorted(line.split(": ")[1] for line in lines) == ["server.port", "server.prot"]


@pytest.mark.parametrize("word", ["off", '"off"', "no"])
def test_off_means_off_though_yaml_takes_it_for_a_boolean(tmp_path: Path, word: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"server: {{steps: {word}}}", encoding="utf-8")
    assert load(path).server.steps == "off"


@pytest.mark.parametrize("content", [b"server: [", b"\xff\xfe\xfa", b"a: b: c", b"\tx: 1"])
def test_a_file_that_is_no_yaml_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ConfigError) as raised:
            load(path)
        assert str(raised.value).startswith(f"{path}: ")
        assert "\n" not in str(raised.value)


def test_a_secret_is_read_from_the_variable_that_config_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_KEY", "sk-1")
    assert (secret(None), secret("TEST_KEY")) == (None, "sk-1")


@pytest.mark.parametrize("value", [None, ""])
def test_a_secret_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("TEST_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("TEST_KEY", value)
    with pytest.raises(ConfigError) as raised:
        secret("TEST_KEY")
    assert str(raised.value) == (
        "the environment variable TEST_KEY is not set, and config names it"
    )


def test_state_lies_where_config_or_the_system_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_dir(Config()) == tmp_path / "llm-sandbox-proxy"
    given = Config(server=ServerConfig(state_dir=tmp_path / "mine"))
    assert state_dir(given) == tmp_path / "mine"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_dir(Config()) == tmp_path / ".local" / "state" / "llm-sandbox-proxy"


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"server": {"public_url": "files.example.org"}}, "server.public_url: "),
        ({"sandbox": {"inputs": "/no/such/place"}}, "sandbox.inputs: Path does not point to"),
        ({"sandbox": {"pool": {"memory_budget_mib": 1024}}}, "memory_budget_mib has no room"),
        ({"limits": {"max_turns": -1}}, "limits.max_turns: must not be negative"),
        ({"sessions": {"keep_s": -0.5}}, "sessions.keep_s: must not be negative"),
    ],
)
def test_what_nothing_could_work_with_is_told_at_start(tree: Any, words: str) -> None:
    assert words in complaint(tree)


OPENAI = "https://api.openai.com/v1"


@pytest.mark.parametrize(
    ("backend", "variable"),
    [
        ({"base_url": OPENAI}, "OPENAI_API_KEY"),
        ({"base_url": "https://eu.api.openai.com/v1"}, "OPENAI_API_KEY"),
        ({"base_url": OPENAI, "api_key_env": "MINE"}, "MINE"),
        ({"base_url": OPENAI, "forward_client_key": True}, None),
        ({"base_url": OPENAI, "kind": "litellm"}, None),
        ({"base_url": "http://api.openai.com/v1"}, None),
        ({"base_url": "https://api.openai.com.example.org/v1"}, None),
        ({"base_url": "https://notapi.openai.com/v1"}, None),
        ({"base_url": "http://127.0.0.1:8000/v1"}, None),
        ({"base_url": "http://127.0.0.1:8000/v1", "api_key_env": "MINE"}, "MINE"),
        ({"base_url": None}, None),
    ],
)
def test_the_key_for_openai_goes_to_openai_alone(
    backend: dict[str, Any], variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert backend_key_variable(BackendConfig(**backend)) == variable


def test_openai_needs_no_key_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " ")
    assert backend_key_variable(BackendConfig(base_url=OPENAI)) is None


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"backend": {"kind": "litellm"}}, "only a backend of kind openai"),
        ({"backend": {"api_key_env": "MINE"}}, "or backend.api_key_env, not both"),
        ({"server": {"api_key_env": "OURS"}}, "leave server.api_key_env and keys out"),
        ({"keys": [{"name": "a", "env": "OURS"}]}, "leave server.api_key_env and keys out"),
    ],
)
def test_a_client_has_one_key_which_is_the_backends_or_ours(
    tree: dict[str, Any], words: str
) -> None:
    backend = {"forward_client_key": True, **tree.get("backend", {})}
    with pytest.raises(ConfigError, match=words):
        require_forwarding_fits(parse({**tree, "backend": backend}, "c.yaml"))
    require_forwarding_fits(parse(tree, "c.yaml"))
