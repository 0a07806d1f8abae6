# One word a job; CI runs the same words. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup lint format docs test unit unit-processes unit-rest softroce bytecode vm-transfers vm-messages vm-engine lab demo bench soak check clean

BIN := .venv/bin
SETUP_FLAGS ?=
PYTEST_FLAGS ?=
DEMO_BYTES ?= 33554432
LAB := $(BIN)/orbit softroce --hosts 2 --rails 2 --mtu 4200 --memory 4096

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## packages, virtual environment, C helper, guest kernel; a second run does nothing
	@scripts/setup.sh $(SETUP_FLAGS)

lint: setup ## style, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## the documents as HTML, in build/docs; a warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -n -c docs . build/docs

unit: setup ## every test that needs no RDMA device and no VM
	$(BIN)/python -m pytest --ignore=tests/lab --ignore=tests/softroce $(PYTEST_FLAGS)

# The same in two parts: what starts processes and waits for them, and all the rest.
unit-processes:
	$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/integration

unit-rest:
	$(BIN)/python -m pytest --ignore=tests/lab --ignore=tests/softroce --ignore=tests/integration $(PYTEST_FLAGS)

# One boot keeps about one core busy, so two side by side take little more than the longer one.
WITH_MESSAGES := test_message test_traps test_rendezvous
WITH_ENGINE := test_engine
softroce: setup bytecode ## the tests that need a device, in three boots of the SoftRoCE VM
	@$(MAKE) --no-print-directory -j2 --output-sync=target vm-messages vm-transfers vm-engine

# What is written in a guest is gone with it, so each process there would compile everything anew;
# pytest compiles test modules in a way of its own.
bytecode:
	@$(BIN)/python -m compileall -q orbit tests
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q --collect-only tests/softroce > /dev/null

vm-transfers:
	$(LAB) -- $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/softroce $(patsubst %,--ignore-glob='*/%*',$(WITH_MESSAGES) $(WITH_ENGINE))

vm-messages:
	$(LAB) -- $(BIN)/python -m pytest $(PYTEST_FLAGS) $(WITH_MESSAGES:%=tests/softroce/%*.py)

vm-engine:
	$(LAB) -- $(BIN)/python -m pytest $(PYTEST_FLAGS) $(WITH_ENGINE:%=tests/softroce/%*.py)

lab: setup ## the tests of the VM itself, from the outside
	$(BIN)/python -m pytest $(PYTEST_FLAGS) tests/lab

# Two at a time, the longest first: each keeps about one core busy.
test: setup bytecode ## every test, those in the VM included
	@$(MAKE) --no-print-directory -j2 --output-sync=target vm-messages vm-transfers vm-engine unit-rest unit-processes lab

check: lint docs test ## what CI runs

demo: setup ## a real file by handle: over TCP here, then over RDMA verbs in the VM
	@echo "== over TCP, on this machine"
	@$(BIN)/orbit demo --transport tcp --size $(DEMO_BYTES)
	@echo "== over RDMA verbs, in the SoftRoCE VM, from host A's device to host B's"
	@$(BIN)/orbit softroce --hosts 2 --mtu 4200 -- $(BIN)/orbit demo --transport rdma --hosts lab --size $(DEMO_BYTES)

bench: setup ## figures, no verdict: TCP here, gets, the engine and messages over RDMA in the VM
	$(BIN)/pip install -q -r tests/bench/requirements.txt
	$(BIN)/python tests/bench/tcp.py
	$(BIN)/python tests/bench/messages/compare.py tcp
	$(LAB) -- sh -c '$(BIN)/python tests/bench/rdma.py && $(BIN)/python tests/bench/engine.py && $(BIN)/python tests/bench/messages/compare.py rdma'

soak: setup ## the long counts
	ORBIT_SOAK=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/sim tests/unit tests/public tests/integration
	$(LAB) -- env ORBIT_SOAK=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) tests/softroce

clean: ## what was built here; the fetched guest kernel stays in its cache
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis results orbit.egg-info
	find orbit tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find orbit/verbs/_turn -name '*.so' -delete
	rm -rf .venv
