# Every target sets itself up from nothing.
PYTHON ?= python3
IMAGE ?= llm-sandbox-proxy/sandbox:latest
TEST_IMAGE ?= llm-sandbox-proxy/test:latest
BIN := .venv/bin
SETUP := .venv/.complete

AGENT := sandbox_runtime/guest/bin/agent-x86_64

.PHONY: agent install demo serve doctor test check format bench image test-image locks clean

install: $(SETUP) bubblewrap

$(SETUP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# Debian's package, where apt is there, we may use it, and it is missing.
.PHONY: bubblewrap
bubblewrap:
	@command -v bwrap >/dev/null || { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] \
	  && { apt-get install -qq -y bubblewrap || { apt-get update -qq && apt-get install -qq -y bubblewrap; }; } >/dev/null; } \
	  || echo "bubblewrap is missing: install it for sandboxes without a Docker engine" >&2

# The program inside sandboxes, in C, for x86-64 and arm64; without it they have it in Python.
agent: $(AGENT)

$(AGENT): $(wildcard sandbox_runtime/guest/native/*) | $(SETUP)
	sandbox_runtime/guest/native/build $(BIN)/python

demo: install
	$(BIN)/python -m proxy demo

serve: install
	$(BIN)/python -m proxy serve --config config.yaml

doctor: install
	$(BIN)/python -m proxy doctor

# Most tests wait for other processes more than they compute, so there are more workers than cores.
WORKERS ?= $(shell expr 1 + `nproc`)

test: install agent test-image
	SANDBOX_TEST_IMAGE=$(TEST_IMAGE) $(BIN)/python -m pytest -rs --numprocesses $(WORKERS) --dist loadfile

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/house.py

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install agent test-image
	$(BIN)/python -m bench --image $(TEST_IMAGE)

image:
	sandbox_runtime/image/build full $(IMAGE)

# What the Docker tests start, trusting whom this host trusts; nothing where no engine answers.
test-image:
	@if ! docker info >/dev/null 2>&1; then echo "no Docker engine answers: its tests are skipped"; \
	else sandbox_runtime/image/build slim $(TEST_IMAGE) --quiet --build-arg \
	  CA_CERTIFICATES="$$(cat /usr/local/share/ca-certificates/*.crt 2>/dev/null)"; fi

# The clients of tests/clients/stacks in their newest versions, within what each list allows.
LOCKS := tests/clients/stacks/locks
locks: install
	for list in $(LOCKS)/python/*.in; do $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
	  --generate-hashes --no-header --no-annotate $$list --output-file $${list%.in}.txt || exit; done
	for list in $(LOCKS)/node/*; do npm update --prefix $$list --package-lock-only --omit-lockfile-registry-resolved \
	  --no-audit --no-fund || exit; done

clean:
	rm -rf .venv .stacks .mypy_cache .ruff_cache .pytest_cache demo-output
