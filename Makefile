# One command each; every target does its own set-up.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# Most tests wait for real processes, so more of them than there are cores run at once.
PYTEST ?= -n 4 --dist loadfile --no-loadscope-reorder
PROTOS := $(shell find protos -name '*.proto')
# The tests start hundreds of processes, and each would compile anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup browser images demo test exhaustive newcomer coverage-map mutations lint rules conformance soak soak-control exactly-once faults fuzz agents clean

setup: $(VENV)/.stubs

$(VENV)/.installed: requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked packages into $(VENV)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.stubs: $(VENV)/.installed $(PROTOS) scripts/generate_stubs.py
	@$(BIN)/python scripts/generate_stubs.py
	@touch $@

# What the tests of pages look through. Debian's name of the package; as another user, or elsewhere, it says what is missing.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "installing chromium for the tests of pages"; \
	    apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null; \
	  else echo "the tests of pages need a browser: install the package chromium" >&2; exit 1; fi; }

# Takes the pictures in docs/images anew; the tests that take them look at the same pages.
images: setup browser
	@RENEW_IMAGES=1 $(BIN)/python -m pytest -q $(PICTURES)
PICTURES ?= tests/e2e/test_trace_page.py tests/clients/test_sse_example.py

demo: setup
	@$(BIN)/hearth demo

# Of kinds with many cases, as the points at which a process may die, some; `exhaustive` runs the others.
# Whole modules that take long, or need a browser, run there too.
LONG := tests/agents tests/fuzz tests/model \
  tests/docs/test_commands.py \
  tests/clients/test_api_page.py tests/clients/test_node_client.py tests/clients/test_sse_example.py \
  tests/deployment/test_compose.py \
  tests/e2e/test_chat.py tests/e2e/test_control.py tests/e2e/test_credentials_and_files.py tests/e2e/test_demo_daytona.py \
  tests/e2e/test_metrics.py tests/e2e/test_one_trace.py tests/e2e/test_operators.py tests/e2e/test_otlp.py \
  tests/e2e/test_raw_dumps.py tests/e2e/test_sending_again.py tests/e2e/test_stack_commands.py \
  tests/e2e/test_third_party_stack.py tests/e2e/test_tls.py tests/e2e/test_trace_page.py \
  tests/faults/test_control_crash_points.py tests/faults/test_control_races.py tests/faults/test_control_workload.py \
  tests/faults/test_faults.py \
  tests/faults/test_killed_services.py tests/faults/test_pool_crash_points.py \
  tests/faults/test_sandbox_crash_points.py tests/faults/test_sandbox_races.py \
  tests/contract/pool/test_attachments.py tests/contract/pool/test_behaviours.py tests/contract/pool/test_credentials.py \
  tests/contract/pool/test_failing_agents.py tests/contract/sandbox/test_behaviours.py \
  tests/contract/pool/test_liveness.py tests/contract/pool/test_replicas.py \
  tests/contract/provider/test_daemons.py tests/contract/provider/test_daytona_daemon.py tests/contract/provider/test_daytona_states.py \
  tests/contract/provider/test_daytona_storm.py tests/contract/provider/test_given_up.py \
  tests/contract/harness/test_http_shapes.py \
  tests/integration/test_agentd.py tests/integration/test_bench_smoke.py tests/integration/test_bench_warm.py tests/integration/test_browser.py \
  tests/integration/test_catalogue_grpc.py tests/integration/test_catalogue_stalled_reader.py \
  tests/integration/test_catalogue_watch.py tests/integration/test_chassis_embedded.py \
  tests/integration/test_chassis_metrics.py tests/integration/test_daytona_lost_in_a_turn.py \
  tests/integration/test_daytona_stand_in_storm.py tests/integration/test_doctor_live_daytona.py \
  tests/integration/test_history_kills.py tests/integration/test_history_outage.py \
  tests/integration/test_pool_asking.py tests/integration/test_pool_crashes.py tests/integration/test_pool_ownership.py \
  tests/integration/test_pool_credentials_sealed.py tests/integration/test_pool_postgres_away.py \
  tests/integration/test_pool_races.py tests/integration/test_pool_sweeps.py \
  tests/integration/test_producer_spill.py tests/integration/test_relay_slow_readers.py \
  tests/integration/test_sandbox_on_daytona.py tests/integration/test_sandbox_provider_failures.py \
  tests/integration/test_sandbox_workers.py \
  tests/security/test_nothing_is_shown.py tests/security/test_told_of_others.py
test: setup
	@$(BIN)/python -m pytest $(PYTEST) -m "not exhaustive" $(LONG:%=--ignore=%)

exhaustive: setup browser
	@$(BIN)/python -m pytest $(PYTEST) -m exhaustive
	@$(BIN)/python -m pytest $(PYTEST) -m "not exhaustive" $(LONG)

# README and the quickstart, top to bottom, from a fresh clone of what is committed, with an environment of its own.
newcomer: setup
	@$(BIN)/python -m pytest -q tests/docs/test_newcomer.py

# Runs what docs/failures.md, docs/warm-sandboxes.md and docs/control.md name, then checks that all of it passed and writes the pages.
coverage-map: setup
	@mkdir -p build
	@$(BIN)/python scripts/coverage_map.py --names >build/named.txt
	@$(BIN)/python -m pytest $(PYTEST) --junit-xml=build/named.xml @build/named.txt
	@$(BIN)/python scripts/coverage_map.py --results build/named.xml

# Takes the guards of known failures back, one at a time in a copy of the tree, and sees the named tests go red.
# Ten minutes on two cores; CODES="R01 P03" takes only these. No part of coverage-map for its time.
mutations: setup
	@$(BIN)/python -m tests.mutations $(CODES)

lint: setup
	@$(BIN)/buf lint
	@$(BIN)/python scripts/generate_docs.py --check
	@$(BIN)/python scripts/settings_page.py --check
	@$(BIN)/python scripts/metrics_page.py --check
	@$(BIN)/python scripts/coverage_map.py --check
	@$(BIN)/python -m scripts.agents --check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# The alert rules: that Prometheus takes them, and that each one fires on series made up for it and none while all is well.
PROMTOOL ?= $(shell command -v promtool || echo build/prometheus/usr/bin/promtool)
rules: $(PROMTOOL)
	@$(PROMTOOL) check rules deploy/prometheus/hearth.rules.yml
	@$(PROMTOOL) test rules deploy/prometheus/hearth.rules.test.yml

# Debian's package is only unpacked: nothing of it is to run here.
build/prometheus/usr/bin/promtool:
	@command -v apt-get >/dev/null || { echo "checking the alert rules needs promtool, which comes with Prometheus" >&2; exit 1; }
	@mkdir -p build/prometheus
	@cd build/prometheus && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb

# The suite of history and relay against one and two replicas of ours, or against HEARTH_TEST_TARGET; see tests/contract.
conformance: setup
	@$(BIN)/python -m tests.contract -q

# Random plays while services are killed; SEED, PLAYS and STEPS choose them.
ifndef SEED
SEED := $(shell od -An -N3 -tu4 /dev/urandom | tr -d ' ')
endif
PLAYS ?= 40
STEPS ?= 150
soak: setup
	@echo "soak: SEED=$(SEED) PLAYS=$(PLAYS) STEPS=$(STEPS)"
	@HEARTH_SOAK_SEED=$(SEED) HEARTH_SOAK_PLAYS=$(PLAYS) HEARTH_SOAK_STEPS=$(STEPS) $(BIN)/python -m pytest tests/property -q

# The model of sessions against two replicas of the pool that are killed; SEED, PLAYS and STEPS choose the plays.
soak-control: setup
	@echo "soak-control: SEED=$(SEED) PLAYS=$(PLAYS) STEPS=$(STEPS)"
	@HEARTH_MODEL_SEED=$(SEED) HEARTH_MODEL_PLAYS=$(PLAYS) HEARTH_MODEL_STEPS=$(STEPS) $(BIN)/python -m pytest tests/model -q

# 500 messages in 50 sessions through 20 killed replicas, each once in the journal of its agent.
exactly-once: setup
	@$(BIN)/python -m pytest tests/faults/test_control_workload.py -q

# N rounds in which everything that can be killed, cut, frozen or filled up is, under load; see tests/faults.
N ?= 3
faults: setup
	@$(BIN)/python -m tests.faults --rounds $(N) --seed $(SEED) $(FAULTS)

# Codex, Claude Code, Pi and OpenCode through Hearth with a stand-in of their models; AGENTS=codex,pi takes only these.
# Installs them from npm into ~/.cache/hearth/agents (1 GB). Writes the table of docs/agents.md when all passed.
agents: setup
	@mkdir -p build
	@AGENTS=$(AGENTS) $(BIN)/python -m tests.agents
	@AGENTS=$(AGENTS) $(BIN)/python -m pytest -q -o junit_family=xunit1 --junit-xml=build/agents.xml tests/agents
	@$(BIN)/python -m scripts.agents --results build/agents.xml

# Every RPC of a stack of its own with hostile messages; MINUTES and SEED choose the run.
MINUTES ?= 10
fuzz: setup
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED)

clean:
	rm -rf $(VENV) .hearth .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find hearth -path '*/v1/*_pb2*' -delete
	find . -name __pycache__ -prune -exec rm -rf {} +
