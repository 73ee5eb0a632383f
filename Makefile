# Everything a fresh machine needs is installed by the first target that needs it; each step is done once.
PYTHON ?= python3
PY := .venv/bin/python
VENV := .venv/.installed
PYTEST := $(PY) -m pytest
# tests of one parametrised function must come in one order in every worker
PARALLEL := env PYTHONHASHSEED=0 $(PY) -m pytest -n 2 --dist worksteal

.PHONY: help venv models demo test check contracts bench bench-peers bench-gpu test-peers test-gpu soak clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(VENV)  ## .venv with a CPU build of PyTorch and firetower, editable

# torch goes first and alone: once a CPU build is there, nothing after it pulls a CUDA one
$(VENV): pyproject.toml tools/install_torch.py
	$(PYTHON) -m venv .venv
	$(PY) tools/install_torch.py torch==2.13.0
	$(PY) -m pip install --editable '.[transformers,dev]'
	touch $@

models: $(VENV)  ## the real model of demo and tests, into the cache folder (93 MB, once)
	$(PY) tools/fetch_smollm2.py

demo: models  ## the main job on a real model, from set-up to stored fires
	$(PY) examples/demo.py

test: models  ## every test that a CPU can run, slow ones included
	$(PARALLEL) -m "not peers and not gpu and not soak"

check: $(VENV) contracts  ## ruff, mypy --strict on src, contracts
	.venv/bin/ruff check .
	.venv/bin/mypy

contracts: $(VENV)  ## the rules of the house that a test can enforce
	$(PYTEST) tests/contracts

bench: models  ## the figures of docs/benchmarks.md that a CPU can measure
	$(PY) benchmarks/watch_cpu.py
	$(PY) benchmarks/scan.py
	$(PY) benchmarks/injections.py
	$(PY) benchmarks/clean_soak.py

bench-peers: models  ## the figure beside llama.cpp (after make test-peers)
	$(PY) benchmarks/llama.py

bench-gpu: models  ## the figure on a CUDA device
	$(PY) benchmarks/h200_watch.py

test-peers: models  ## tests against peers: llama.cpp (built from source, about 8 minutes), Ray, and chromium where it is installed
	CMAKE_ARGS="-DGGML_NATIVE=OFF" $(PY) -m pip install --editable '.[llama,ray]'
	$(PYTEST) -m peers

test-gpu: models  ## tests that need a CUDA device
	$(PYTEST) -m gpu

soak: models  ## what takes too long for every run: ten times the clean steps of make bench
	$(PY) benchmarks/clean_soak.py --steps 200000
	$(PYTEST) -m soak || test $$? -eq 5  # pytest exits with 5 where no test is marked so

clean:  ## remove what make made here (not the cache folder)
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
