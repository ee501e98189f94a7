# Everything a developer runs. The first target that needs it builds .venv from the pinned requirements.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DOCS := .venv-docs
DOCS_READY := $(DOCS)/.ready
QUICK := .venv-quick
LOWEST := .venv-lowest
QUICK_READY := $(QUICK)/.ready
# Where to find torch's CPU build, if pip does not find one by itself: make TORCH_OPTIONS="--index-url ..." test
TORCH_OPTIONS ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Else each of the thousands of processes that tests start would compile all of ckpttool anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo quick portable doors test test-of thorough check format format-check lint types layers property coverage dist release-check lowest torch-release docs docs-serve bench fixtures gpu requirements clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(READY): requirements/torch.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(TORCH_OPTIONS) -r requirements/torch.txt
	$(PIP) install --quiet -r requirements/dev.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# An environment of its own, without torch, DeepSpeed and Ray: docs/conf.py stands in for them.
$(DOCS_READY): requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet -r requirements/docs.txt
	@touch $@

$(QUICK_READY): requirements/quick.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(QUICK)
	$(QUICK)/bin/python -m pip --disable-pip-version-check install --quiet -c requirements/dev.txt -r requirements/quick.txt
	$(QUICK)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY)  ## inspect and consolidate a bundled checkpoint, and load the result back
	$(BIN)/python examples/demo.py

portable: $(QUICK_READY)  ## run the fast tests without what only Linux has (copies in the kernel, direct I/O, /proc)
	$(QUICK)/bin/python -m pytest -q -n 2 --dist loadfile --quick -p tests.without_linux $(FILE)

# An environment of its own, about 100 MB: without torch, DeepSpeed, Ray and moto.
quick: $(QUICK_READY)  ## run the fast tests (FILE=tests/...: only those of a file or directory)
	$(QUICK)/bin/python -m pytest -q -n 2 --dist loadfile --quick $(FILE)

doors: $(QUICK_READY)  ## run the quick tests of the core in a copy without the extensions
	$(QUICK)/bin/python -m pytest -q --thorough "tests/test_doors.py::test_the_quick_tests_of_the_core_pass[all]"

# Constraints of dev.txt for what is no dependency of ours: pytest and its like.
lowest:  ## run the quick tests with the lowest versions of all dependencies (PYTHON=python3.13: with another Python)
	$(PYTHON) -m venv --clear $(LOWEST)
	grep -vE '^(click|fsspec|isal|ml-dtypes|numpy|rich)==' requirements/dev.txt > $(LOWEST)/others.txt
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install --quiet -c $(LOWEST)/others.txt \
	  -r requirements/lowest.txt -r requirements/quick.txt
	$(LOWEST)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --editable .
	$(LOWEST)/bin/python -m pytest -q -n 2 --dist loadfile --quick $(FILE)

torch-release:  ## save and load torch runs with another release of torch (TORCH=2.6.0)
	$(PYTHON) -m venv --clear .venv-torch
	.venv-torch/bin/python -m pip --disable-pip-version-check install --quiet $(TORCH_OPTIONS) torch==$(TORCH)
	.venv-torch/bin/python -m pip --disable-pip-version-check install --quiet --editable .
	saves=$$(mktemp -d) && for command in save load; do \
	  .venv-torch/bin/python -W ignore -m tests.versions.torch_runs $$command $$saves || exit 1; done

# Two processes for two cores, and one for the tests of Ray, which wait most of the time.
test: $(READY)  ## run the whole test suite
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

test-of: $(READY)  ## run the tests of modules (MODULE="ckpttool/plan/split.py ...")
	$(BIN)/python -m pytest -q $$($(BIN)/python -m tests.of_module $(MODULE))

coverage: $(READY)  ## measure branch coverage and show it (FILE=tests/...: of those tests; else of all but Ray's)
	rm -f .coverage .coverage.*
	-$(BIN)/python -m coverage run -m pytest -q -n 2 --dist loadfile -m "not ray" $(FILE)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# Tests of Ray run alone; pytest ends with 5 where a part has none.
thorough: $(READY)  ## run all tests on all checkpoints, points of failure and hostile files (hours; FILE=tests/...: of a part)
	$(BIN)/python -m pytest -n 2 --dist loadfile --thorough --hypothesis-profile=thorough -m "not ray" $(FILE)
	$(BIN)/python -m pytest --thorough -m ray $(FILE) || [ $$? = 5 ]

property: $(READY)  ## run the property tests with many more examples
	$(BIN)/python -m pytest tests/property --thorough --hypothesis-profile=thorough

check: format-check lint types layers test  ## everything that must hold before a commit

format: $(READY)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --select I .

format-check: $(READY)  ## is the code formatted?
	$(BIN)/ruff format --check .

lint: $(READY)  ## ruff, and phrases that the project does not use
	$(BIN)/ruff check .
	$(BIN)/python -m tests.prose

types: $(READY)  ## mypy, strict
	$(BIN)/mypy

layers: $(READY)  ## do imports point downwards only?
	$(BIN)/lint-imports

dist: $(READY)  ## build the wheel and the sdist, and try each in an empty environment
	$(BIN)/python tests/versions/distributions.py

release-check: $(READY)  ## check all of a release that needs no credentials (TAG=v0.1.0; DIST=dist: keep what was built)
	$(BIN)/python tests/versions/release.py $(TAG)
	$(BIN)/python tests/versions/distributions.py $(DIST)

docs: $(DOCS_READY)  ## build the documentation into docs/_build/html; a broken link or reference fails
	$(DOCS)/bin/python -m sphinx -b html -W -n --keep-going -q -j 2 docs docs/_build/html

docs-serve: docs  ## build the documentation and serve it on http://localhost:8000
	$(BIN)/python -m http.server --bind localhost --directory docs/_build/html 8000

bench: $(READY)  ## measure against cp and zero_to_fp32.py, side by side
	$(BIN)/python benchmarks/consolidate.py

fixtures: $(READY)  ## train the bundled checkpoints again with real DeepSpeed
	$(BIN)/python fixtures/make.py

gpu:  ## on a machine with a GPU, with its own python: train on it, and save, convert and resume (GPU="--device cpu": without)
	$(PYTHON) fixtures/make_gpu.py $(GPU)

requirements: $(READY)  ## pin the development requirements again (needs uv)
	(echo '# Pinned by `make requirements`; torch itself is pinned in torch.txt and installed first.'; \
	 uv pip compile --universal --python-version 3.10 --no-header --no-annotate pyproject.toml requirements/dev.in \
	 | grep -vE '^(cuda-|nvidia-|triton|torch=)') > requirements/dev.txt.new
	mv requirements/dev.txt.new requirements/dev.txt
	(echo '# Pinned by `make requirements`; the documentation is built with Python 3.11 or newer.'; \
	 uv pip compile --universal --python-version 3.11 --no-header --no-annotate -c requirements/dev.txt \
	 requirements/docs.in) > requirements/docs.txt.new
	mv requirements/docs.txt.new requirements/docs.txt

clean:  ## remove what these targets made
	rm -rf $(VENV) $(DOCS) $(LOWEST) $(QUICK) demo-out benchmarks/.data docs/_build docs/_generated .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
