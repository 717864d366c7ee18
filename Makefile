# make test    lint, types, import contract, the whole suite
# make coverage  the suite once more, counting branches; fails if a package has less than 95 % of them
# make demo    train a small MoE language model with and without checkpointing, and JAX beside torch; report in build/demo
# make bench   the measurements behind the figures in the docs, as tables, build/bench/index.html and results.json
# make bench-gate     the last measurements against benchmarks/baseline.json: fails if a ratio or a count got worse
# make bench-publish  bench, then docs/benchmarks.md and the baseline from what it found
# make fuzz    the random programs alone, FUZZ=20 times as many as in the suite
# make docs    the documentation as a site, in build/site
# make dist    wheel and source archive in dist/, checked, and tried where nothing else is; TRY='torch jax' with these too
# make clean   remove .venv, build and caches
#
# Needs python3 (3.11 or newer) with venv and pip. Everything else goes into .venv.

SHELL  := bash
PYTHON ?= python3
BIN    := .venv/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# Pip would compile tens of thousands of files on one core.
COMPILE := $(BIN)/python -m compileall -q -j 0 .venv/lib > .venv/compile.log 2>&1 || true
READY  := .venv/.ready
BENCH_READY := .venv/.bench-ready
DIST_READY := build/dist-env/.ready
COVERAGE_READY := .venv/.coverage-ready

# One compute thread per process: two pytest workers then share two cores instead of fighting over them,
# and sums are added in the same order on every machine.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: test lint types imports pytest coverage fuzz demo bench bench-gate bench-publish docs dist clean
.NOTPARALLEL:
.DELETE_ON_ERROR:

test: lint types imports pytest

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0])'
	$(PYTHON) -m venv .venv

# One pip command for everything, so that the pins hold for each package and nothing is installed twice.
# roundpipe_core/__init__.py holds the version, which an editable install copies.
$(READY): pyproject.toml constraints.txt roundpipe_core/__init__.py | $(BIN)/python
	$(PIP) -e '.[all,test]'
	@$(COMPILE)
	@touch $@

$(BENCH_READY): $(READY)
	$(PIP) -e '.[all,test,bench]'
	@touch $@

$(COVERAGE_READY): $(READY)
	$(PIP) -e '.[all,test,coverage]'
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports --no-logo

pytest: $(READY)
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n 2

coverage: $(COVERAGE_READY)
	rm -rf build/coverage
	$(ONE_THREAD) $(BIN)/coverage run -m pytest -q -n 2 -o timeout=600
	$(BIN)/coverage combine --quiet
	@for package in core torch jax; do echo "== roundpipe_$$package"; \
		$(BIN)/coverage report --include="roundpipe_$$package/*" || exit 1; done

FUZZ ?= 20
fuzz: $(READY)
	FUZZ=$(FUZZ) $(ONE_THREAD) $(BIN)/python -m pytest -q -n 2 tests/on_torch/test_random_programs.py \
		tests/on_torch/test_auto_random.py tests/on_jax/test_random_programs.py

demo: $(READY)
	$(BIN)/python examples/moe_lm.py --out build/demo

BENCH ?=
bench: $(BENCH_READY)
	$(BIN)/python -m benchmarks $(BENCH)

bench-gate: $(BENCH_READY)
	$(BIN)/python -m benchmarks gate

bench-publish: bench
	$(BIN)/python -m benchmarks publish
	$(BIN)/python -m benchmarks baseline

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# An environment of its own: the suite does not need what builds and uploads packages.
$(DIST_READY): pyproject.toml
	rm -rf build/dist-env
	$(PYTHON) -m venv build/dist-env
	build/dist-env/bin/python -m pip install --quiet --disable-pip-version-check build twine
	@touch $@

TRY ?=
dist: $(DIST_READY)
	build/dist-env/bin/python tools/check_dist.py $(TRY)

clean:
	rm -rf .venv build dist .hypothesis .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
