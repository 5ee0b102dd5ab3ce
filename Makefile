# `make run` takes a fresh clone to a proven low-bit model; `make test` checks everything.
# Needs Python 3.11 or newer and PyPI, and a C++20 compiler for the CPU kernels. Nothing is installed outside .venv.

PYTHON ?= python3
VENV := .venv
PEERS ?= .
CACHE ?= demo-build/bench
BIN := $(VENV)/bin
WORKERS ?= $(shell $(PYTHON) -c "import os; print(max(1, min(4, os.cpu_count() or 1)))")

.PHONY: run test check interop fuzz bench bench-decode clean

run: $(VENV)/.installed
	$(BIN)/weightpath build demo

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not interop and not gpu"

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Peers are installed in environments of their own, .venv-vllm, .venv-llama and .venv-writers under
# PEERS (3.4 GB), reused while their pins are the same.
interop: $(VENV)/.installed
	$(BIN)/python tests/interop/install_peer.py --under $(PEERS) vllm llama writers
	GOMP_SPINCOUNT=10000 WEIGHTPATH_INTEROP_VENVS=$(PEERS) \
		$(BIN)/python -m pytest -m interop tests/interop --durations=5

# Mutated checkpoints of every format; anything but success or one line of ours is a failure.
fuzz: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/soak.py --cases $(or $(CASES),10000)

# ONNX Runtime is measured beside the products, from .venv-ort under PEERS (0.2 GB).
bench: $(VENV)/.installed
	$(BIN)/python tests/interop/install_peer.py --under $(PEERS) ort
	$(BIN)/python benchmarks/fidelity_table.py
	$(BIN)/python benchmarks/quantize_cost.py
	$(BIN)/python benchmarks/convert_speed.py
	GOMP_SPINCOUNT=10000 $(BIN)/python benchmarks/cpu_gemm.py --peers $(PEERS) --write

# Whole models beside llama.cpp and OpenVINO GenAI; models are made once into CACHE (4 GB at most).
bench-decode: $(VENV)/.installed
	$(BIN)/python tests/interop/install_peer.py --under $(PEERS) llama openvino
	GOMP_SPINCOUNT=10000 $(BIN)/python benchmarks/cpu_decode.py --cache $(CACHE) --peers $(PEERS) --write

$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard cpp/*)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'weightpath needs Python 3.11 or newer; try make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-*
