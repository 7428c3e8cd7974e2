SHELL := /bin/bash
# some tests in place of all: TESTS=tests/unit
TESTS ?=
.DEFAULT_GOAL := help
.PHONY: help demo demo-ui test lint setup clean

help: ## list these commands
	@echo 'airflow_delayed: delayed messages for Apache Airflow'; echo
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 16

demo: setup ## a Spark job's reminders through Airflow and SQS to a consumer, with a table at the end (2 to 4 minutes)
	@exec .venv/bin/python .ci/demo.py

demo-ui: setup ## Airflow with the operations page and the demo's data, until Ctrl-C; prints the address and the logins
	@exec .venv/bin/python .ci/demo_ui.py

test: lint ## all tests, on real servers that it installs and starts; some: make test TESTS=tests/unit ARGS="-k sqs"
ifneq ($(TESTS),)
	@exec .venv/bin/python -m pytest --durations=25 $(TESTS) $(ARGS)
else # three files at a time, each process with servers of its own; then a live Airflow beside the demo
	@.venv/bin/python -m pytest --durations=25 --numprocesses=3 --dist=loadfile tests/unit tests/integration $(ARGS) && \
	    exec .venv/bin/python -m pytest --durations=25 --numprocesses=2 --dist=loadscope tests/acceptance $(ARGS)
endif

lint: setup ## ruff, and mypy (strict) on the package
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet . || { .venv/bin/ruff format --check .; exit 1; }
	@.venv/bin/mypy

setup: ## install what the others need into .venv; instant when it is there
	@.ci/setup

clean: ## remove .venv and everything that the demo and the tests left behind
	@rm -rf .venv .run .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist spark-warehouse
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
