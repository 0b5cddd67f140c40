# One command does what the checks on a server do. `make help` lists the targets.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
MODEL ?= smollm2
# Any Python >= 3.11; name another with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
# Threads that have nothing to do leave their core to others: spinning they take most of two cores from processes that
# work. Where there is a test process for each core it gets by with one thread. What one of hundreds of processes has
# compiled, the others take from it.
TEST_ENV := OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
NUM_THREADS := 2
PYTEST = OMP_NUM_THREADS=$(NUM_THREADS) $(TEST_ENV) $(PY) -m pytest
FAST := "not slow and not gpu and not conformance"
# Files, or several that name one xdist_group, stay together. In this order: what takes long does not come last.
ON_BOTH_CORES := --numprocesses 2 --dist loadgroup --no-loadscope-reorder
FOLDERS := tests/conformance tests/e2e tests/faults tests/parity tests/property tests/unit
# Whose slow tests take minutes; those of others take hours.
PARITY := tests/parity tests/e2e tests/faults/test_streams_survive.py $(wildcard tests/faults/test_class_*.py)

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 found: install one or run make PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(PY) -m disagg.engine.native.build
	$(PY) -c "from disagg.transport.native_runs import load_runs; load_runs()"
	@touch $@

.PHONY: venv
venv: $(STAMP) ## make .venv with the pinned dependencies

.PHONY: serve
serve: $(STAMP) ## fetch smollm2 and serve it with one prefill and one decode worker
	@exec $(VENV)/bin/disagg serve $(MODEL) --prefill 1 --decode 1 $(ARGS)

.PHONY: check
check: $(STAMP) ## lint, format, types, direction of imports
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

.PHONY: test
test: NUM_THREADS := 1
test: check ## everything except the long parity runs
	$(PYTEST) -m $(FAST) $(ON_BOTH_CORES) $(FOLDERS) $(ARGS)

# Clients pin each other's dependencies, so they live apart from ours.
CLIENTS := .venv-conformance
CLIENTS_STAMP := $(CLIENTS)/.installed
NODE_CLIENTS := tests/conformance/node

$(CLIENTS_STAMP): requirements-conformance.lock $(NODE_CLIENTS)/package-lock.json
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement requirements-conformance.lock
	@if command -v npm >/dev/null; then npm ci --prefix $(NODE_CLIENTS) --silent --no-audit --no-fund; \
		else echo "no npm here: its clients are skipped"; fi
	@touch $@

.PHONY: conformance
conformance: $(STAMP) $(CLIENTS_STAMP) ## real clients and suites against mixed and disaggregated (OPENAI_SPEC=FILE: fuzzed by it too)
	$(PYTEST) tests/conformance $(ARGS)

.PHONY: parity
parity: $(STAMP) ## the real model, token by token, against references; kills at every moment; every start order (minutes)
	$(PYTEST) -m "slow and not gpu" --timeout 1800 $(PARITY) $(ARGS)

.PHONY: endurance
endurance: $(STAMP) ## writers stopped and resumed ten times at every state, 10,000 hand-offs on every transport (long)
	$(PYTEST) -m "slow and not gpu" --timeout 1800 $(addprefix --ignore=,$(PARITY)) $(ARGS)

.PHONY: chaos
chaos: $(STAMP) ## random kills and stops under load on the real system: is every answer whole, and the same?
	$(PY) -m disagg.testing.chaos $(ARGS)

.PHONY: schedules
schedules: $(STAMP) ## many seeded schedules in virtual time: 100,000 of the hand-off, 1,000 of a whole cluster
	DISAGG_WORLDS=$${DISAGG_WORLDS:-100000} DISAGG_SCHEDULES=$${DISAGG_SCHEDULES:-1000} $(PYTEST) --timeout 3600 \
		tests/property/test_handoff_schedules.py tests/property/test_virtual_cluster.py tests/property/test_partial_starts.py

.PHONY: validate
validate: $(STAMP) ## published experiments beside what the simulator says of them (ARGS=CASE for one)
	$(PY) -m disagg.sim.validation $(ARGS)

.PHONY: fuzz
fuzz: $(STAMP) ## a million damaged inputs for every decoder behind a socket: no crash, no growth (minutes)
	$(PY) -m disagg.testing.fuzz $(ARGS)

.PHONY: docs
docs: $(STAMP) ## rewrite what is generated in docs/
	$(PY) tools/write_docs.py

.PHONY: bench
bench: $(STAMP) ## every benchmark, on a quiet machine (long; ARGS=--quick: shorter)
	@echo "== transport"; $(PY) benchmarks/transport.py
	@echo "== TLS, lanes, proofs"; $(PY) benchmarks/secured.py
	@echo "== hand-off cost"; $(PY) benchmarks/handoff_cost.py $(ARGS)
	@echo "== hand-off over links"; $(PY) benchmarks/handoff.py $(ARGS)
	@echo "== first steps that begin early"; $(PY) benchmarks/partial_start.py $(ARGS)
	@echo "== KV wires"; $(PY) benchmarks/kv_wire.py $(ARGS)
	@echo "== several answers to one prompt"; $(PY) benchmarks/choices.py $(ARGS)
	@echo "== recovery"; $(PY) benchmarks/recovery.py $(ARGS)
	@echo "== overload"; $(PY) benchmarks/overload.py $(ARGS)
	@echo "== router"; $(PY) benchmarks/router.py $(ARGS)
	@echo "== bad clients"; $(PY) benchmarks/router_clients.py $(ARGS)
	@echo "== what watching costs"; $(PY) benchmarks/observation_cost.py $(ARGS)
	@echo "== interference"; $(PY) benchmarks/interference.py $(ARGS)
	@echo "== disagg bench: accuracy"; $(PY) benchmarks/bench_accuracy.py $(ARGS)
	@echo "== disagg bench: agreement"; $(PY) benchmarks/bench_agreement.py $(ARGS)
	@echo "== mixed beside separate: chat, RAG, code"; \
		$(VENV)/bin/disagg bench compare $(MODEL) $(if $(findstring --quick,$(ARGS)),--requests 6 --rounds 1 --rates 1)
	@echo "== the simulator beside the live system"; $(PY) benchmarks/simulated_live.py $(ARGS)

.PHONY: bench-report
bench-report: $(STAMP) ## mixed beside separate on chat, RAG and code mixes, into docs/bench (quiet machine; long)
	mkdir -p docs/bench
	$(VENV)/bin/disagg bench compare $(MODEL) --report docs/bench/report.html $(ARGS) | tee docs/bench/report.txt
	$(VENV)/bin/disagg bench phases $(MODEL) | tee docs/bench/phases.txt

.PHONY: clean
clean: ## remove .venv and caches
	rm -rf $(VENV) $(CLIENTS) $(NODE_CLIENTS)/node_modules .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
