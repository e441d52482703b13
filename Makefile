# Two commands matter: `make demo` and `make test`. Both create .venv and install everything first.
# Needs Python 3.11, make and a package index. PYTHON=... chooses another interpreter for the first setup.

PYTHON ?= python3.11
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
STAMP := .venv/.installed
DOCS := .venv/.installed-docs

.PHONY: setup test lint types unit test-slow test-gguf test-quant bench demo train-tiny train-zoo docs clean

setup: $(STAMP)

# torch goes first and alone, at its pinned version: left to the resolver it may bring gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --upgrade pip
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) -c constraints.txt -e ".[dev,lora,plots]"
	touch $@

test: lint types unit

lint: setup
	$(BIN)/ruff check --quiet src tests scripts benchmarks examples
	$(BIN)/ruff format --quiet --check src tests scripts benchmarks examples

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/pytest -n 2 -m "not slow and not gguf"

# Pages are also looked at with axe-core, in Chromium; where npm is not there, that part is skipped.
AXE := .venv/node_modules/axe-core/axe.min.js
$(AXE): setup
	if command -v npm > /dev/null; then npm install --silent --no-save --prefix .venv axe-core@4.14.0; fi

test-slow: setup $(AXE)
	$(BIN)/pytest -n 2 -m slow

# llama.cpp's converter and server, as packages with nothing to build.
test-gguf: setup
	$(PIP) -c constraints.txt -e ".[llama-cpp]"
	$(BIN)/pytest -m gguf

# gptqmodel pins another numpy than ours, so real quantizers get an environment of their own.
QUANT := .venv-quant
test-quant: $(QUANT)/.installed
	$(QUANT)/bin/pytest tests/attacks/test_quantization.py

$(QUANT)/.installed: pyproject.toml constraints.txt
	test -x $(QUANT)/bin/python || $(PYTHON) -m venv $(QUANT)
	sed '/^numpy==/d' constraints.txt > $(QUANT)/constraints.txt
	$(QUANT)/bin/python -m pip install -qq --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(QUANT)/bin/python -m pip install -qq --disable-pip-version-check -c $(QUANT)/constraints.txt \
		-e ".[dev,plots,quantizers]"
	touch $@

# The measurements of docs/speed.md; half an hour on a busy machine.
bench: setup
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/verify_speed.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/embed_speed.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/growth.py run
	$(BIN)/python benchmarks/growth.py render
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/exact_speed.py

demo: setup
	$(BIN)/pathmark demo

# The texts come without their packages' dependencies, which are not needed to read them. The MALLOC_
# settings keep freed memory in the process: CPU training is 1.4 times as fast.
TRAIN := $(PIP) --no-deps $$(sed -n 's/^bundled-training = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",') && \
	MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=500000000 $(BIN)/python
train-tiny: setup
	$(TRAIN) scripts/train_tiny.py
	$(BIN)/python scripts/model_card.py

# The paper's four architectures, small, about an hour each: for `pathmark reproduce --model zoo/NAME`.
train-zoo: setup
	$(TRAIN) scripts/train_zoo.py $(NAMES)

# Generated pages first, then the site, into site/. A broken link or a page without a place in the nav ends it.
# The variable silences a note, on every build, that the theme gets fixes until May 2027 only.
docs: $(DOCS)
	$(BIN)/python scripts/models_doc.py
	$(BIN)/python scripts/cli_doc.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

$(DOCS): $(STAMP)
	$(PIP) -c constraints.txt -e ".[docs]"
	touch $@

clean:
	rm -rf .venv .venv-quant build dist site pathmark-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
