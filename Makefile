SHELL := /bin/bash
# some tests in place of all: TESTS=tests/unit
TESTS ?=
# a group of files at a time to each of three processes, which share one set of servers (tests/support/scopes.py)
PARALLEL := --durations=25 --numprocesses=3 --dist=loadscope --no-loadscope-reorder
# Python may keep what it has compiled: otherwise every process would compile Airflow anew
export PYTHONDONTWRITEBYTECODE :=
.DEFAULT_GOAL := help
.PHONY: help demo demo-ui test test-long test-newest test-latest security lint setup clean

help: ## list these commands
	@echo 'airflow_delayed: delayed messages for Apache Airflow'; echo
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

demo: setup ## a Spark job's reminders through Airflow and SQS to a consumer, with a table at the end (2 to 4 minutes)
	@exec .venv/bin/python .ci/demo.py

demo-ui: setup ## Airflow with the operations page and the demo's data, until Ctrl-C; prints the address and the logins
	@exec .venv/bin/python .ci/demo_ui.py

test: lint ## all tests, on real servers that it installs and starts; some: make test TESTS=tests/unit ARGS="-k sqs"
	@exec .venv/bin/python -m pytest $(if $(TESTS),,$(PARALLEL)) $(or $(TESTS),tests) $(ARGS)

test-long: export TEST_LENGTH := long
test-long: test ## the same with each fault many times and on each database; long

test-newest: setup ## tests of RabbitMQ and the store on Debian sid's newest servers, as root; some: SERVERS="mysql mariadb"
	@exec .venv/bin/python .ci/newest.py $(SERVERS) $(if $(RECORD),--record) $(if $(ARGS),--args='$(ARGS)')

test-latest: setup ## unit tests and the example DAGs on the newest releases of all that the package needs, without constraints
	@exec .ci/latest $(ARGS)

security: lint ## known vulnerabilities of the pinned dependencies, and the fuzzers for about a minute
	@exec .ci/security $(ARGS)

lint: setup ## ruff (with its security rules), mypy (strict) on the package, and .ci/guards.py on its structure
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet . || { .venv/bin/ruff format --check .; exit 1; }
	@.venv/bin/mypy
	@.venv/bin/python .ci/guards.py

setup: ## install what the others need into .venv; instant when it is there
	@.ci/setup

clean: ## remove .venv and everything that the demo and the tests left behind
	@! grep -F -e ' $(CURDIR)/.run/' -e ' $(CURDIR)/.run ' /proc/self/mountinfo || { echo 'This is mounted below .run; please unmount it first.'; exit 1; }
	@rm -rf --one-file-system .venv .run .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist spark-warehouse
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
