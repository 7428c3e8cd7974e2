SHELL := /bin/bash
# some tests in place of all: TESTS=tests/unit
TESTS ?=
# a group of files at a time to each of four processes, which share one set of servers (tests/support/scopes.py): more
# than cores, for a test often waits
PARALLEL := --durations=25 --numprocesses=4 --dist=loadscope --no-loadscope-reorder
# Python may keep what it has compiled: otherwise every process would compile Airflow again
export PYTHONDONTWRITEBYTECODE :=
.DEFAULT_GOAL := help
.PHONY: help demo demo-ui test compiled test-long test-newest test-latest security release-check lint docs setup clean

help: ## list these commands
	@echo 'airflow_delayed: delayed messages for Apache Airflow'; echo
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20

demo: ## a Spark job's reminders through Airflow and SQS to a consumer, with a table at the end (1 to 4 minutes)
	@.ci/setup demo java && exec .venv/bin/python .ci/demo.py

demo-ui: ## Airflow with the operations page and messages in every state, until Ctrl-C; prints address and logins
	@.ci/setup demo rabbitmq && exec .venv/bin/python .ci/demo_ui.py

test: ## all tests, on real servers that it installs and starts; some: make test TESTS=tests/unit ARGS="-k sqs"
	@$(MAKE) --no-print-directory --jobs=2 lint $(if $(TESTS),,compiled)
	@exec .venv/bin/python -m pytest $(if $(filter-out tests/unit,$(TESTS)),,$(PARALLEL)) $(TESTS) \
		$(if $(filter long,$(TEST_LENGTH)),--override-ini=faulthandler_timeout=4000) $(ARGS)

# in a fresh clone, beside mypy, which needs one core: otherwise each process would compile Airflow and the tests at its
# start; what cannot be collected is an error of the tests
compiled: setup
	@[[ -d tests/__pycache__ ]] || .venv/bin/python -m pytest --collect-only --quiet >/dev/null 2>&1 || true

test-long: export TEST_LENGTH := long
test-long: test ## the same and all that is only in it: each fault many times and on each database; long; some: TESTS=...

test-newest: setup ## tests of RabbitMQ and the store on Debian sid's newest servers, as root; some: SERVERS="mysql mariadb"
	@exec .venv/bin/python .ci/newest.py $(SERVERS) $(if $(RECORD),--record) $(if $(ARGS),--args='$(ARGS)')

test-latest: setup ## unit tests and the example DAGs on the newest releases of all that the package needs; a pre-release: AIRFLOW=3.4.0b2
	@AIRFLOW=$(AIRFLOW) exec .ci/latest $(ARGS)

security: lint ## known vulnerabilities of the pinned dependencies, and the fuzzers for about a minute
	@exec .ci/security $(ARGS)

release-check: setup ## all that a release has to show, with `make test-long`, one line a step; some: STEPS="build twine wheel"
	@exec .venv/bin/python .ci/release.py $(STEPS)

lint: setup ## ruff (with its security rules), mypy (strict) on the package, and .ci/guards.py on its structure
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet . || { .venv/bin/ruff format --check .; exit 1; }
	@.venv/bin/mypy
	@.venv/bin/python .ci/guards.py

docs: setup ## the documentation as a site with search, in build/docs; broken links and pages without a place are errors
	@exec .ci/docs

setup: ## install what the others need into .venv; instant when it is there
	@.ci/setup

clean: ## remove .venv and everything that the demo and the tests left behind
	@! grep -F -e ' $(CURDIR)/.run/' -e ' $(CURDIR)/.run ' /proc/self/mountinfo || { echo 'This is mounted below .run; please unmount it first.'; exit 1; }
	@rm -rf --one-file-system .venv .run .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist spark-warehouse
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
