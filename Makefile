# demo: stock SGLang and SGLang with the plugin; serve: a server with it; test: what CI runs, on the CPU; the rest is for contributors.
PYTHON ?= python3
JOBS ?= $(shell nproc)
VENV := .venv-test
SMALL := .venv-site
BIN := $(VENV)/bin
# minutes and steps of the ledger are counted from here
export STARTED := $(shell date +%s)
# on a processor with AVX2 alone a row's bits hang on its place in a product of matrices, but for these kernels of numpy's
export OPENBLAS_CORETYPE ?= Sandybridge
REQUIREMENTS := cpu_sglang/requirements.txt tests/requirements.txt
TORCH := $(shell sed -n 's/^\(torch==.*\)/\1/p' cpu_sglang/requirements.txt)

.PHONY: demo serve test test-all mutants explore lint wheels gpu bench record cost harm docs site fix forms release report changelog dist clean
.DEFAULT_GOAL := test

demo:
	@$(PYTHON) tools/demo.py

serve:
	@$(PYTHON) tools/serve.py

# progress: pip's own while installing, one line a release while fetching, then one a row; lint runs beside them
test: wheels
	$(BIN)/python -m tests.ledger --jobs $(JOBS)

# all rows that are open, into tests/recorded; it may be interrupted, and STEP=SECONDS ends it
test-all: wheels
	$(BIN)/python -m tests.ledger --all --jobs $(JOBS)

# mistakes at random in fixes, kernels and other code, and who notices them; in a copy of this folder
mutants: wheels
	$(BIN)/python -m tests.mutants --seed $(or $(SEED),0)

# random launches, with every fix on, or known defects again with ARGS=--stock; it goes on where it was
explore: wheels
	$(BIN)/python -m tests.explore $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find csrc -name '*.cuh' -exec $(BIN)/clang-format --dry-run --Werror {} +
	$(BIN)/python tools/make_docs.py --check

wheels: $(VENV)/ready
	$(BIN)/python -m tests.wheels
	$(BIN)/python -m tests.compilers

# on a machine with a GPU, in an environment that has SGLang and this package
gpu:
	$(PYTHON) -m sglang_bcg_fixes verify --json verify.json

bench:
	$(PYTHON) -m benchmarks.bench --jsonl benchmarks/results/bench.jsonl

record:
	$(PYTHON) benchmarks/record.py --folder recorded

cost: wheels
	$(BIN)/python benchmarks/cost_of_being_there.py --release 0.5.12.post1 --release 0.5.23 --json cost_of_being_there.json

# every server of the harm matrix whose inputs have changed; hours from nothing, and it can be interrupted
harm: wheels
	$(BIN)/python -m tests.harm.matrix
	$(BIN)/python -m tests.harm.speed
	$(BIN)/python tools/make_docs.py

docs: $(VENV)/ready
	$(BIN)/python tools/make_docs.py

# README and docs/ as a site, in site/; without the tests' environment, in a small one; the variable is for an advertisement
site: SITE := $(if $(wildcard $(VENV)/ready),$(VENV),$(SMALL))
site: $(if $(wildcard $(VENV)/ready),,$(SMALL)/ready)
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/python -m mkdocs build --strict

fix:
	$(PYTHON) tools/new_fix.py $(ID)

# show what a fix reads in every release; after a yes, record it in source/forms.json
forms: wheels
	$(BIN)/python tools/forms.py fix $(ID)

# show what is new in a release; after a yes, record it in every table that names releases
release: wheels
	$(BIN)/python tools/forms.py release $(V)
	$(BIN)/python tools/make_docs.py
	$(BIN)/python tools/matrix_page.py

# send docs/upstream/ID.md to SGLang as an issue
report:
	$(PYTHON) tools/report.py $(ID)

# the fragments of changes/ into CHANGELOG.md, under this version
changelog:
	$(PYTHON) tools/changelog.py $(V)

# what is published, from the last commit: CONTRIBUTING.md, Release
dist: wheels
	$(BIN)/python -m tests.ledger --list
	$(BIN)/python tools/dist.py

clean:
	rm -rf .venv $(VENV) $(SMALL) site build dist *.egg-info

# its own stack: SGLang's pins are CUDA builds, so its wheels come without dependencies and these replace them
$(VENV)/ready: $(REQUIREMENTS) setup.py pyproject.toml entry_points.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -r cpu_sglang/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check -r tests/requirements.txt --editable .
	touch $@

$(SMALL)/ready: tests/requirements.txt
	$(PYTHON) -m venv $(SMALL)
	$(SMALL)/bin/python -m pip install --disable-pip-version-check $(shell grep ^mkdocs-material tests/requirements.txt) tomli
	touch $@
