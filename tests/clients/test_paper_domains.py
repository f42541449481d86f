"""The profiles of the paper's domains: prompts, answer file and trajectory limit, and the wording
of the reference package.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import yaml

from policies.paper_prompts import DOMAIN_PROMPTS, Domain
from proxy.config import ConfigError, parse
from proxy.models.scripted import call, text_reply, tool_reply
from proxy.paper_prompts import REFERENCE_FILES
from proxy.profiles import Profiles, build_profiles, shipped_profiles
from sandbox_runtime.tools import make_tools
from tests.fakes.backend import ScriptedBackend, scripted_backend
from tests.fakes.paper import paper
from tests.fakes.server import running_proxy

DOMAINS = [name.removeprefix("paper-") for name in shipped_profiles() if name.startswith("paper-")]
PROBLEM = 'What is \\frac{1}{2} of {"a": 84}?'
ANSWER = "\\boxed{42}"
WRITE = call("execute_bash", command=f"printf '%s\\n' '{ANSWER}' > /testbed/answer.txt")
DONE = [tool_reply(WRITE), tool_reply(call("submit"))]


def profiles(**settings: Any) -> Profiles:
    """Return the shipped profiles. A request without a key may name every profile of a domain."""
    return build_profiles(parse({"profile": "paper-long-context", **settings}, "c.yaml"))


async def run(
    home: Path, domain: str, script: Sequence[Any], served: Profiles
) -> tuple[ScriptedBackend, dict[str, Any]]:
    """Return the backend after a run under the profile of a domain, and the response."""
    async with (
        scripted_backend(script) as backend,
        running_proxy(backend, "bubblewrap", home, profiles=served) as url,
        httpx.AsyncClient(timeout=60, base_url=url) as client,
    ):
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": PROBLEM}],
            "sandbox": {"profile": f"paper-{domain}"},
        }
        with anyio.fail_after(60):
            response = await client.post("/v1/chat/completions", json=body)
        return backend, response.json()


def test_every_domain_has_prompts() -> None:
    assert {"general", *DOMAINS} == DOMAIN_PROMPTS.keys()


@pytest.mark.parametrize("domain", DOMAINS)
async def test_domain_prompts_are_sent_and_the_answer_file_is_the_answer(
    domain: Domain, tmp_path: Path
) -> None:
    backend, answer = await run(tmp_path, domain, DONE, profiles())
    system, user = backend.requests[0].body["messages"]
    prompts = DOMAIN_PROMPTS[domain]
    assert system["content"] == prompts.system_prompt()
    assert user["content"] == f"{prompts.problem_message(PROBLEM)}\nSteps Remaining: 100"
    assert answer["choices"][0]["message"]["content"].strip() == ANSWER
    assert answer["sandbox"]["stop_reason"] == "submitted"


@pytest.mark.parametrize(
    ("domain", "form"),
    [
        ("math", "inside \\boxed{}"),
        ("physics", "\\boxed{first, second, third}"),
        ("chemistry", "only the letter of the right choice"),
        ("biomedicine", "only the letter of the right choice"),
        ("long-context", "with the documents in /testbed/documents/"),
        ("instructions", "Write the final answer"),
    ],
)
def test_problem_statement_asks_for_the_answer_form_of_the_domain(
    domain: Domain, form: str
) -> None:
    text = DOMAIN_PROMPTS[domain].problem_message(PROBLEM)
    assert f"<problem>\n{PROBLEM}\n</problem>" in text
    assert form in text
    assert "to /testbed/answer.txt" in text


@pytest.mark.parametrize("domain", DOMAINS)
def test_system_prompt_of_a_domain_names_the_tools_and_has_no_placeholder(domain: Domain) -> None:
    system = DOMAIN_PROMPTS[domain].system_prompt().replace("\\boxed{}", "")
    assert all(tool.name in system for tool in make_tools(paper()))
    assert "/testbed/answer.txt contains" in system
    assert not {"{", "}", "%"} & set(system)


@pytest.mark.parametrize(("domain", "turns"), [("math", 7), ("long-context", 14)])
async def test_trajectory_limit_of_a_domain_ends_the_run(
    domain: str, turns: int, tmp_path: Path
) -> None:
    script = [
        {
            **text_reply("It is 41."),
            "usage": {"prompt_tokens": turn * 10_000, "completion_tokens": 10_000},
        }
        for turn in range(20)
    ]
    backend, answer = await run(tmp_path, domain, script, profiles())
    assert answer["sandbox"]["stop_reason"] == "trajectory_tokens"
    assert len(backend.requests) == turns  # of 65,536 and 131,072 tokens


@pytest.mark.parametrize("domain", DOMAINS)
def test_domain_profile_differs_from_paper_only_in_prompts_and_trajectory_limit(
    domain: str,
) -> None:
    named = profiles(profiles={"short": {"extends": f"paper-{domain}"}}).by_name
    found, general = named[f"paper-{domain}"], named["paper"]
    assert found.isolation == general.isolation
    assert found.observation == general.observation
    limit = 131_072 if domain == "long-context" else 65_536
    assert found.limits.max_trajectory_tokens == limit
    assert named["short"].agent == found.agent


def test_custom_profile_can_select_a_domain_and_change_its_prompts() -> None:
    tree = {"lab": {"extends": "paper", "agent": {"domain": "math", "prompts": {"no_call": "Go."}}}}
    agent = profiles(profiles=tree).by_name["lab"].agent
    assert (agent.prompts.system, agent.prompts.no_call) == (DOMAIN_PROMPTS["math"].system, "Go.")


def test_error_for_an_unknown_domain_names_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"profiles\.lab\.agent\.domain: Input should be"):
        profiles(profiles={"lab": {"extends": "paper", "agent": {"domain": "law"}}})


# The reference's wording, from a package with its layout

TOOLS = [tool.schema for tool in make_tools(paper())]


def install_reference(home: Path, *, message: str = 'CONTINUE_MSG = """\nGo on.\n"""\n') -> None:
    """Write a package with the files of the reference that are read."""
    package = home / "llm_in_sandbox"
    for domain, name in REFERENCE_FILES.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        prompts = {
            "system_prompt": f"{domain} in {{working_dir}}{{command_docs}}.",
            "instance_prompt": "{problem_statement} to {output_dir}/answer.txt!",
            "output_dir": "/testbed/output" if domain == "general" else "/testbed",
        }
        path.write_text(yaml.safe_dump({"dataset": "none", **prompts}), encoding="utf-8")
    (package / "__init__.py").write_text("raise ImportError('it was imported')\n")
    (package / "observation.py").write_text(f"from .action import Action\n\n{message}")
    tools = [f"{tool['function']['name']}_tool = {json.dumps(tool)}\n" for tool in TOOLS]
    (package / "tools.py").write_text("".join(tools))


async def test_prompts_of_the_installed_reference_package_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_reference(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    served = profiles(paper={"prompts": "reference"})
    script = [text_reply("Hm."), *DONE]
    backend, answer = await run(tmp_path / "state", "chemistry", script, served)
    assert [message["content"] for message in backend.requests[1].body["messages"]] == [
        "chemistry in /testbed.",
        f"{PROBLEM} to /testbed/answer.txt!\nSteps Remaining: 100",
        "Hm.",
        "\nGo on.\n\nSteps Remaining: 99",
    ]
    assert backend.requests[0].body["tools"] == TOOLS
    assert answer["choices"][0]["message"]["content"].strip() == ANSWER
    assert served.by_name["paper"].agent.prompts.system_prompt() == "general in /testbed."


def test_prompt_file_overrides_the_reference_package_only_in_the_profile_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_reference(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "prompts.yaml"
    file.write_text('{system_prompt: Mine., instance_prompt: "{problem_statement}"}', "utf-8")
    named = profiles(paper={"prompts": "reference", "prompt_file": str(file)}).by_name
    assert named["paper"].agent.prompts.system_prompt() == "Mine."
    assert named["paper-math"].agent.prompts.system_prompt() == "math in /testbed."


def test_error_names_a_missing_reference_package() -> None:
    with pytest.raises(ConfigError) as raised:
        profiles(paper={"prompts": "reference"})
    assert str(raised.value) == (
        "paper.prompts: 'reference' needs the package llm-in-sandbox, which is not installed (pip"
        " install --no-deps llm-in-sandbox)"
    )


def test_error_names_a_reference_package_with_another_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_reference(tmp_path, message="")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as raised:
        profiles(paper={"prompts": "reference"})
    assert str(raised.value).endswith("(0.2.0): observation.py has no CONTINUE_MSG")
