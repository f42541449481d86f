"""The configuration: files, environment variables, command line, and error messages."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from policies.budgets import DailyBudget
from policies.prices import Price
from proxy.__main__ import main
from proxy.config import (
    BackendConfig,
    Config,
    ConfigError,
    ServerConfig,
    backend_key_variable,
    check_key_forwarding,
    data_dir,
    load,
    parse,
    read_secret,
    setting_paths,
)

EXAMPLE = Path(__file__).parents[2] / "config.yaml"


def complaint(tree: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        parse(tree, "c.yaml")
    return str(raised.value)


def test_config_yaml_is_the_default_configuration() -> None:
    assert load(EXAMPLE) == Config() == load(None)


def test_config_yaml_names_every_setting() -> None:
    assert keys(yaml.safe_load(EXAMPLE.read_text("utf-8"))) == keys(Config().model_dump())


def keys(tree: Any) -> Any:
    return {key: keys(value) for key, value in tree.items()} if isinstance(tree, dict) else None


def test_setting_that_is_left_out_keeps_its_default(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("server: {port: 9000}\nlimits: {max_turns: 5}\n", encoding="utf-8")
    config = load(path)
    assert (config.server.port, config.limits.max_turns) == (9000, 5)
    assert config.server.host == Config().server.host
    assert config.limits.max_run_seconds == Config().limits.max_run_seconds


def test_prices_can_be_configured_by_model() -> None:
    prices = {"input_per_mtok": 0.2, "output_per_mtok": 0.8, "cached_per_mtok": 0.02}
    tree = {"backend": {"prices": {"mine": prices}}, "budgets": {"daily": {"cost_usd": 5}}}
    config = parse(tree, "c.yaml")
    assert config.backend.prices == {"mine": Price(0.2, 0.8, 0.02)}
    assert config.budgets.daily == DailyBudget(cost_usd=5.0)
    for invalid in (
        {"input_per_mtok": 1},
        {**prices, "per_call": 1},
        {**prices, "cached_per_mtok": -1},
    ):
        assert complaint({"backend": {"prices": {"mine": invalid}}}).startswith(
            "c.yaml: backend.prices.mine."
        )


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "---\n"])
def test_empty_file_is_the_default_configuration(tmp_path: Path, text: str) -> None:
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
        "isolation.networks",
        "limits.max_turn",
        "artifacts.keep",
    ],
)
def test_unknown_setting_is_an_error_with_its_path(path: str) -> None:
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
        ({"backend": {"provider": "vllm"}}, "backend.provider"),
        ({"backend": {"read_timeout_s": 0}}, "backend.read_timeout_s"),
        ({"backend": {"max_retries": -1}}, "backend.max_retries"),
        ({"backend": {"models": "gpt"}}, "backend.models"),
        ({"sandbox": {"backend": "podman"}}, "sandbox.backend"),
        ({"sandbox": {"bubblewrap": {"uid": 0}}}, "sandbox.bubblewrap.uid"),
        ({"isolation": {"cpus": "two"}}, "isolation.cpus"),
        ({"limits": {"max_turns": 1.5}}, "limits.max_turns"),
        ({"limits": "none"}, "limits"),
        ({"artifacts": {"max_files": []}}, "artifacts.max_files"),
        ({"artifacts": {"deny_types": ["html"]}}, "artifacts"),
        ([], "top"),
        ("text", "top"),
    ],
)
def test_invalid_value_is_an_error_with_its_path(tree: Any, place: str) -> None:
    line = complaint(tree)
    assert line.startswith(f"c.yaml: {place}: ")
    assert "\n" not in line


def test_error_message_has_a_line_for_each_mistake() -> None:
    lines = complaint({"server": {"port": "x", "prot": 1}}).splitlines()
    assert sorted(line.split(": ")[1] for line in lines) == ["server.port", "server.prot"]


@pytest.mark.parametrize("word", ["off", '"off"', "no"])
def test_unquoted_yaml_off_or_no_is_read_as_the_word_off(tmp_path: Path, word: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"server: {{steps: {word}}}", encoding="utf-8")
    assert load(path).server.steps == "off"


@pytest.mark.parametrize("content", [b"server: [", b"\xff\xfe\xfa", b"a: b: c", b"\tx: 1"])
def test_error_for_a_file_that_is_not_yaml_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_error_of_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ConfigError) as raised:
            load(path)
        assert str(raised.value).startswith(f"{path}: ")
        assert "\n" not in str(raised.value)


def test_secret_is_read_from_the_environment_variable_that_the_configuration_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_KEY", "sk-1")
    assert (read_secret(None), read_secret("TEST_KEY")) == (None, "sk-1")


@pytest.mark.parametrize("value", [None, ""])
def test_unset_secret_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("TEST_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("TEST_KEY", value)
    with pytest.raises(ConfigError) as raised:
        read_secret("TEST_KEY")
    assert str(raised.value) == (
        "the environment variable TEST_KEY is not set, but a setting or an option names it"
    )


def test_data_dir_is_the_configured_or_the_xdg_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert data_dir(Config()) == tmp_path / "llm-sandbox-proxy"
    config = Config(server=ServerConfig(data_dir=tmp_path / "mine"))
    assert data_dir(config) == tmp_path / "mine"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_dir(Config()) == tmp_path / ".local" / "state" / "llm-sandbox-proxy"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"server": {"public_url": "files.example.org"}}, "server.public_url: "),
        ({"sandbox": {"inputs": "/no/such/place"}}, "sandbox.inputs: Path does not point to"),
        (
            {"sandbox": {"pool": {"memory_budget_mib": 1024}}},
            "memory_budget_mib (1024) has no room",
        ),
        ({"limits": {"max_turns": -1}}, "limits.max_turns: must not be negative"),
        ({"sessions": {"idle_s": -0.5}}, "sessions.idle_s: must not be negative"),
    ],
)
def test_error_for_an_unusable_setting_states_the_reason(tree: Any, message: str) -> None:
    assert message in complaint(tree)


OPENAI = "https://api.openai.com/v1"


@pytest.mark.parametrize(
    ("backend", "variable"),
    [
        ({"base_url": OPENAI}, "OPENAI_API_KEY"),
        ({"base_url": "https://eu.api.openai.com/v1"}, "OPENAI_API_KEY"),
        ({"base_url": OPENAI, "api_key_env": "MINE"}, "MINE"),
        ({"base_url": OPENAI, "forward_client_key": True}, None),
        ({"base_url": OPENAI, "provider": "litellm"}, None),
        ({"base_url": "http://api.openai.com/v1"}, None),
        ({"base_url": "https://api.openai.com.example.org/v1"}, None),
        ({"base_url": "https://notapi.openai.com/v1"}, None),
        ({"base_url": "http://127.0.0.1:8000/v1"}, None),
        ({"base_url": "http://127.0.0.1:8000/v1", "api_key_env": "MINE"}, "MINE"),
        ({"base_url": None}, None),
    ],
)
def test_openai_api_key_is_sent_only_to_openai(
    backend: dict[str, Any], variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    assert backend_key_variable(BackendConfig(**backend)) == variable


def test_provider_litellm_has_no_default_base_url() -> None:
    assert parse({"backend": {"provider": "litellm"}}, "c.yaml").backend.base_url is None
    named = parse({"backend": {"provider": "litellm", "base_url": OPENAI}}, "c.yaml")
    assert named.backend.base_url == OPENAI


def test_openai_api_key_that_is_blank_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", " ")
    assert backend_key_variable(BackendConfig(base_url=OPENAI)) is None


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"backend": {"provider": "litellm"}}, "needs backend.provider openai"),
        ({"backend": {"api_key_env": "MINE"}}, "remove backend.api_key_env"),
        ({"keys": [{"name": "a", "env": "OURS"}]}, "remove keys, clients send"),
    ],
)
def test_setting_forward_client_key_with_other_keys_or_litellm_is_an_error(
    tree: dict[str, Any], message: str
) -> None:
    backend = {"forward_client_key": True, **tree.get("backend", {})}
    with pytest.raises(ConfigError, match=message):
        check_key_forwarding(parse({**tree, "backend": backend}, "c.yaml"))
    check_key_forwarding(parse(tree, "c.yaml"))


@pytest.mark.parametrize(
    "url",
    ["", "gateway:9000", "ftp://gateway", "http://", "http://u@gateway", "http://gateway?a=1"],
)
def test_upstream_must_be_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"backend\.upstreams"):
        parse({"backend": {"upstreams": [url]}}, "c.yaml")


def test_upstreams_need_an_openai_compatible_backend() -> None:
    tree: dict[str, Any] = {"upstreams": ["http://gateway:9000"]}
    assert parse({"backend": tree}, "c.yaml").backend.upstreams == ("http://gateway:9000",)
    with pytest.raises(ConfigError, match="upstreams needs provider openai"):
        parse({"backend": {**tree, "provider": "litellm"}}, "c.yaml")


def environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"LLM_SANDBOX_{name}", value)


def test_environment_takes_precedence_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment(monkeypatch, SERVER__PORT="9001", BACKEND__BASE_URL="http://b/v1")
    path = tmp_path / "c.yaml"
    path.write_text("server: {port: 9000, host: 10.0.0.1}", encoding="utf-8")
    config = load(path)
    assert (config.server.port, config.server.host) == (9001, "10.0.0.1")
    assert config.backend.base_url == "http://b/v1"


def test_command_line_takes_precedence_over_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment(monkeypatch, SERVER__PORT="9001", SERVER__HOST="10.0.0.1")
    server = load(None, {"server": {"port": 9002}}).server
    assert (server.port, server.host) == (9002, "10.0.0.1")


def test_environment_variables_set_settings_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(
        monkeypatch,
        PROFILE="mine",
        PROFILES='{"mine": {"limits": {"max_turns": 5}}}',
        SERVER__STEPS="off",
        SERVER__ALLOW_OPEN="true",
        SERVER__DATA_DIR="/data",
        BACKEND__MODALITIES='["image", "audio"]',
        BACKEND__PRICES='{"m": {"input_per_mtok": 1, "output_per_mtok": 2}}',
        SANDBOX__POOL__MIN_READY="1",
        ISOLATION__NETWORK__MODE="allowlist",
        ISOLATION__NETWORK__ALLOWED_HOSTS='["pypi"]',
        ISOLATION__DISK_MIB_PER_S="null",
        LIMITS__MAX_TURNS="7",
        BUDGETS__DAILY__COST_USD="1.5",
        KEYS='[{"name": "k", "env": "K"}]',
    )
    assert load(None) == parse(
        {
            "profile": "mine",
            "profiles": {"mine": {"limits": {"max_turns": 5}}},
            "server": {"steps": "off", "allow_open": True, "data_dir": "/data"},
            "backend": {
                "modalities": ["image", "audio"],
                "prices": {"m": {"input_per_mtok": 1, "output_per_mtok": 2}},
            },
            "sandbox": {"pool": {"min_ready": 1}},
            "isolation": {
                "network": {"mode": "allowlist", "allowed_hosts": ["pypi"]},
                "disk_mib_per_s": None,
            },
            "limits": {"max_turns": 7},
            "budgets": {"daily": {"cost_usd": 1.5}},
            "keys": [{"name": "k", "env": "K"}],
        },
        "c.yaml",
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SERVER__PORT", "many", "LLM_SANDBOX_SERVER__PORT: Input should be a valid integer"),
        ("LIMITS__MAX_TURNS", "-1", "LLM_SANDBOX_LIMITS__MAX_TURNS: must not be negative"),
        ("SANDBOX__POOL__MIN_READY", "-1", "LLM_SANDBOX_SANDBOX__POOL__MIN_READY: Value error"),
        ("BACKEND__MODELS", "[1", "LLM_SANDBOX_BACKEND__MODELS: "),
        ("WATCH__RULES", "[1", "LLM_SANDBOX_WATCH__RULES: "),
        (
            "BAKEND__BASE_URL",
            "x",
            "LLM_SANDBOX_BAKEND__BASE_URL: there is no such setting:"
            " write LLM_SANDBOX_BACKEND__BASE_URL",
        ),
        (
            "SERVER__STATE_DIR",
            "x",
            "LLM_SANDBOX_SERVER__STATE_DIR: there is no such setting:"
            " write LLM_SANDBOX_SERVER__DATA_DIR",
        ),
        (
            "PER_DAY__TOKENS",
            "x",
            "LLM_SANDBOX_PER_DAY__TOKENS: there is no such setting:"
            " write LLM_SANDBOX_BUDGETS__DAILY__TOKENS",
        ),
        ("SERVER__PORT__X", "1", "LLM_SANDBOX_SERVER__PORT__X: there is no such setting"),
        ("server__port", "1", "LLM_SANDBOX_server__port: there is no such setting"),
    ],
)
def test_error_in_the_environment_names_the_variable(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(monkeypatch, **{name: value})
    with pytest.raises(ConfigError) as raised:
        load(None)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_error_in_the_config_file_names_the_file_even_if_environment_variables_are_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment(monkeypatch, SERVER__HOST="10.0.0.1")
    path = tmp_path / "c.yaml"
    path.write_text("server: {prot: 1}", encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load(path)
    assert str(raised.value) == f"{path}: server.prot: Extra inputs are not permitted"


def test_command_line_error_names_the_command_line() -> None:
    with pytest.raises(ConfigError) as raised:
        load(None, {"server": {"port": 70000}})
    assert str(raised.value).startswith("command line: server.port: ")


def test_every_setting_has_an_environment_variable() -> None:
    settings = set(leaves(Config().model_dump()))
    assert settings <= {".".join(path) for path in setting_paths(Config)}


def leaves(tree: Any, above: str = "") -> list[str]:
    return [
        path
        for key, value in tree.items()
        for path in (
            leaves(value, f"{above}{key}.") if isinstance(value, dict) else [f"{above}{key}"]
        )
    ]


def test_old_option_state_dir_works_like_data_dir_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "audit").mkdir()
    assert main(["audit", "verify", "--state-dir", str(tmp_path)]) == 0
    assert caplog.messages == ["--state-dir is deprecated: write --data-dir"]


def test_options_state_dir_and_data_dir_together_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--state-dir", str(tmp_path), "--data-dir", str(tmp_path)]
    assert main(["audit", "verify", *both]) == 1
    assert "--state-dir and --data-dir are the same option" in capsys.readouterr().err
