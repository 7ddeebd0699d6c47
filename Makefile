# Two commands do everything: `make run` trains a federation, `make test` passes the tests.
# Both set up .venv first; a stamp keeps that quick when nothing changed.
PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: setup run test test-flower test-slow lint fuzz docs audit clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "pfedvem needs Python 3.11 or newer; say which with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@

run: setup
	$(VENV)/bin/pfedvem run

test-slow: setup
	$(VENV)/bin/python -m pytest -m slow --timeout 3600

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

test: lint
	$(VENV)/bin/python -m pytest -n 2

test-flower: setup
	$(VENV)/bin/python -m pytest -m deployment --timeout 3600 tests/flower

audit:  # known weaknesses of the packages that the tests run with; asks a database on the network
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit
	build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

fuzz: setup
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[fuzz]'
	for target in $$(ls fuzz/corpus); do $(VENV)/bin/python fuzz/fuzz.py $$target -max_total_time=60 || exit 1; done

docs: setup
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "The pages are in build/site."

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
