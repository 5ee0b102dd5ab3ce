# `make run` takes a fresh clone to a proven low-bit model; `make test` checks everything.
# Needs Python 3.11 or newer and PyPI, and a C++20 compiler for the CPU kernels. Nothing is installed outside .venv.

PYTHON ?= python3
VENV := .venv
PEERS ?= .
CACHE ?= demo-build/bench
BIN := $(VENV)/bin
WORKERS ?= $(shell $(PYTHON) -c "import os; print(max(1, min(4, os.cpu_count() or 1)))")

.PHONY: run test check sanitize emulated arm interop fuzz bench bench-decode clean

run: $(VENV)/.installed
	$(BIN)/weightpath build demo

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not interop and not gpu"

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Both below build the instruction sets that this CPU lacks in emulated form: AMX's tiles in plain
# C++, AVX-VNNI by AVX-512 VNNI (so only where the CPU has that).
EMULATED := WEIGHTPATH_EMULATED_AMX=ON WEIGHTPATH_EMULATED_AVX_VNNI=ON

# cpp/check.cpp under the address, undefined and thread sanitizers: every instruction set against
# the scalar one, several callers, a fork. Any finding ends it. The child of the fork starts threads.
sanitize: $(VENV)/.installed
	set -e; for kind in address,undefined thread; do \
		$(BIN)/cmake -S . -B .sanitize/$$kind $(EMULATED:%=-D%) -DWEIGHTPATH_CHECK=ON \
			-DCMAKE_CXX_FLAGS="-O1 -g1 -fsanitize=$$kind -fno-sanitize-recover=all" > /dev/null; \
		$(BIN)/cmake --build .sanitize/$$kind --parallel $(WORKERS) > /dev/null; \
		echo "sanitizers: $$kind"; \
		TSAN_OPTIONS=die_after_fork=0:halt_on_error=1 .sanitize/$$kind/check $(or $(CASES),300); \
	done

# tests/kernels against an extension with the emulated instruction sets, in an environment of its own
# that borrows the packages of $(VENV). The second line from below ends it where nothing was compiled.
emulated: $(VENV)/.installed
	$(BIN)/python -m venv --clear --without-pip .sanitize/emulated
	$(BIN)/python -m pip --quiet --disable-pip-version-check --python .sanitize/emulated/bin/python \
		install --no-deps -C build-dir=.sanitize/extension $(EMULATED:%=-C cmake.define.%) .
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$(.sanitize/emulated/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/borrowed.pth"
	.sanitize/emulated/bin/python -c "from weightpath.kernels import cpu; cpu.extension(); print(cpu.instruction_sets())"
	OMP_NUM_THREADS=1 .sanitize/emulated/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/kernels

# The NEON kernels, compiled for aarch64 and run on emulated CPUs. Needs no .venv.
arm:
	tests/arm/check.sh

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
	GOMP_SPINCOUNT=10000 $(BIN)/python benchmarks/native_steps.py --write

$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard cpp/*)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'weightpath needs Python 3.11 or newer; try make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-* .sanitize .arm
