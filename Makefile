# Every target sets itself up from nothing.
PYTHON ?= python3
IMAGE ?= llm-sandbox-proxy/sandbox:latest
TEST_IMAGE ?= llm-sandbox-proxy/test:latest
TEST_PACKAGES := python3 procps
BIN := .venv/bin
SETUP := .venv/.complete

.PHONY: install demo serve doctor test check format bench image test-image clean

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

demo: install
	$(BIN)/python -m proxy demo

serve: install
	$(BIN)/python -m proxy serve --config config.yaml

doctor: install
	$(BIN)/python -m proxy doctor

test: install test-image
	SANDBOX_TEST_IMAGE=$(TEST_IMAGE) $(BIN)/python -m pytest -rs

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/house.py

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install test-image
	$(BIN)/python -m bench --image $(TEST_IMAGE)

image:
	sandbox_runtime/image/build $(IMAGE)

# What the Docker tests start; nothing where no engine answers.
test-image:
	@if ! docker info >/dev/null 2>&1; then echo "no Docker engine answers: its tests are skipped"; \
	elif ! docker image inspect $(TEST_IMAGE) >/dev/null 2>&1; then \
	  sandbox_runtime/image/build $(TEST_IMAGE) "$(TEST_PACKAGES)"; fi

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache demo-output
