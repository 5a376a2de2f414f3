# Every target makes its own environment in .venv, by `pip install -c constraints.txt` alone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
PIP_INSTALL := $(BIN)/python -m pip install -q -c constraints.txt
MANIFESTS := setup.cfg pyproject.toml constraints.txt

.PHONY: help install demo test lint bench bench-test notebooks docs tpu-aot clean
.DEFAULT_GOAL := help

help:
	@echo "install    make $(VENV) with the package, its experiments and the tools"
	@echo "demo       shuffled regression: diabetes table (8 starts), 8 synthetic seeds (3 starts each)"
	@echo "test       the test suite on $(JOBS) processes (JOBS=n)"
	@echo "lint       ruff, mypy, import contracts, links of README and docs"
	@echo "bench      timings beside the peers, each checked against the other first"
	@echo "bench-test value and gradient beside the peers', a bound each"
	@echo "notebooks  execute the notebooks in place, in step with their scripts"
	@echo "tpu-aot    compile the attention's kernels for a TPU v6e (a 700 MB wheel, in .venv-tpu)"
	@echo "docs       the reference site, into site/"
	@echo "clean      remove $(VENV), caches and build products"

$(VENV)/.installed: $(MANIFESTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ot-newton needs Python >= 3.11: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e '.[experiments,jax,pfam,dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/ot-newton shuffled-regression --data diabetes --starts 8 --out results/demo/diabetes
	$(BIN)/ot-newton shuffled-regression --seeds 8 --starts 3 --out results/demo/synthetic

# One thread a process: the processes share the cores, and the sizes are small.
test: $(VENV)/.installed
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/check_links.py

bench: $(VENV)/.bench
	$(BIN)/python -m ot_newton.experiments.bench

bench-test: $(VENV)/.bench
	$(BIN)/python -m ot_newton.experiments.bench loss-parity

notebooks: $(VENV)/.docs
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/execute.py

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The compiler comes with jax's TPU wheel, 700 MB: an environment of its own.
tpu-aot:
	test -x .venv-tpu/bin/python || $(PYTHON) -m venv .venv-tpu
	.venv-tpu/bin/python -m pip install -q -c constraints.txt 'jax[tpu]' numpy
	PYTHONPATH=. .venv-tpu/bin/python -m ot_newton.experiments.bench.attention_tpu

clean:
	rm -rf $(VENV) .venv-tpu site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
