# make demo   a language model decodes from the daemon's memory; ENGINE=transformers, ENGINE=sglang: in these;
#             ENGINE=vllm: what one vLLM computed of a prompt the next one loads
# make test   everything CI runs
# make test-sanitized  with ASan and UBSan: the unit tests, and a daemon under the end-to-end tests; = make asan asan-daemon
# make asan-bytes  the same of what reads bytes that others wrote: disk, servers (part of make test)
# make asan-rpc  the same of what links gRPC
# make test-identity  what keys and values are known by, with the oldest and the newest transformers; ARGS='--draws 2000'
# make test-research  research/: what judges and trains plans
# make test-transformers  kvstrata_transformers with the oldest and the newest transformers; ARGS=--full runs all cases
# make test-vllm  kvstrata_vllm with vLLM 0.32 on the CPU; ARGS=--full runs all cases
# make test-sglang  kvstrata_sglang with SGLang 0.5.23 on the CPU; ARGS=--full runs all cases
# make image  the container image `kvstrata`, compiled inside, by docker, podman or buildah
# make image-cuda  the image `kvstrata-cuda` of that one, with the CUDA backend of this build
# make install PREFIX=/usr/local  what `make build` made; DESTDIR as usual
# make deb, make test-deb  Debian's packages in build/deb; tried in a bare Debian 12 in build/debs
# make wheel, make test-wheel  wheels in dist/wheels: library, daemon and CLI in one, the engines' adapters; tried beside
#             vLLM's protobuf
# make test-image-cuda  what the image kvstrata-cuda says without a driver
# make bundle dist/gpu: GPU tests and benchmarks for a machine with a GPU (bench/cuda/run_gpu.sh);
#             TRACE=file (docs/traces.md): plan sekv too
# make version V=1.2.3  writes a new version where it stands; the changelogs want words
# make build  build/bin/kvstratad, build/bin/kvstrata, build/lib/libkvstrata.so; CUDA=1: the CUDA backend, too, which is
#             left out where this machine has no GPU (make demo: likewise)
# make all    tests and benchmarks too
# Each installs what it needs (docker/packages.apt, integrations/requirements.txt).

BUILD  := build
PYTHON := /usr/bin/python3
VENV   := $(BUILD)/venv
HF_VENV := $(BUILD)/venv-transformers
VLLM_VENV := $(BUILD)/venv-vllm
SGLANG_VENV := $(BUILD)/venv-sglang
MOONCAKE_VENV := $(BUILD)/venv-mooncake
ENGINE := numpy
JOBS   := $(shell nproc)
# Several sources are compiled as one, which halves a build from nothing; OFF: each alone, for who edits them.
UNITY  := ON
CUDA   := $(if $(wildcard /proc/driver/nvidia/version /dev/nvidiactl),1)
PRODUCT = $(if $(CUDA),product_cuda,product)
# Without a GPU the backend and its tests are compiled to see that they compile: one chip's code, and no optimiser.
CHIPS   = $(if $(CUDA),80-real;90,90-real)
ON_CHIPS = '-DKVS_CUDA_ARCHITECTURES=$(CHIPS)' -DKVS_CUDA_OPTIMIZED=$(if $(CUDA),ON,OFF)
FOR_CHIPS = @grep -qxF 'KVS_CUDA_ARCHITECTURES:STRING=$(CHIPS)' $(BUILD)/CMakeCache.txt || cmake $(ON_CHIPS) $(BUILD)

# Reports of sanitizers go to files: what a test prints may be thrown away, and a daemon's is.
REPORTS := $(abspath $(BUILD))/asan/report
SANITIZED := ASAN_OPTIONS=log_path=$(REPORTS) UBSAN_OPTIONS=log_path=$(REPORTS):print_stacktrace=1

define RUN_BYTE_TESTS
rm -f $(REPORTS).*
cd $(BUILD)/asan && $(SANITIZED) ctest --parallel $(JOBS) -L bytes --output-on-failure --no-tests=error
@if ls $(REPORTS).* 2>/dev/null; then cat $(REPORTS).*; exit 1; fi
endef

.PHONY: demo demo-numpy demo-transformers demo-vllm demo-sglang test test-identity test-research test-transformers test-vllm test-sglang test-mooncake build all bench image image-cuda test-image-cuda install deb test-deb wheel test-wheel bundle test-sanitized asan byte-tests asan-bytes asan-daemon asan-rpc tsan golden tidy format format-check version clean

# Engines load the library and start the daemon; `make build` adds the CLI and the remote library.
demo: PRODUCT = $(if $(CUDA),product_cuda,kvstratad kvstrata)
demo: demo-$(ENGINE)
demo-numpy: build
	@$(VENV)/bin/python integrations/demo.py
demo-transformers: build $(HF_VENV)/.installed
	@$(HF_VENV)/bin/python integrations/demo_transformers.py
demo-vllm: build $(VLLM_VENV)/.installed
	@$(VLLM_VENV)/bin/python integrations/demo_vllm.py
demo-sglang: build $(SGLANG_VENV)/.installed
	@$(SGLANG_VENV)/bin/python integrations/demo_sglang.py

# Downloads and compilers side by side; then tests, which have the machine to themselves.
# Tests of faults run once: what fails at a rate is a failure. Others run a second time on a busy machine; many of them
# wait for a server or a disk, so there is one more at a time than cores.
test:
	$(MAKE) --jobs=4 all byte-tests $(HF_VENV)/.installed $(BUILD)/tools/promtool $(BUILD)/.image_packages
	$(RUN_BYTE_TESTS)
	cd $(BUILD) && ctest --parallel $(JOBS) -L faults --output-on-failure --no-tests=error
	cd $(BUILD) && ctest --parallel $$(($(JOBS) + 1)) -LE faults --repeat until-pass:2 --output-on-failure --no-tests=error

test-transformers: build $(HF_VENV)/oldest/.installed
	$(HF_VENV)/bin/python -m pytest -q -rs tests/transformers $(ARGS)
	PYTHONPATH=$(HF_VENV)/oldest $(HF_VENV)/bin/python -m pytest -q -rs tests/transformers $(ARGS)

# What judges and trains plans, which is no part of the product.
test-research: build $(HF_VENV)/.installed
	$(HF_VENV)/bin/python -m pytest -q -rs research/tests $(ARGS)

test-identity: build $(HF_VENV)/oldest/.installed
	$(HF_VENV)/bin/python -m pytest -q -rs tests/identity $(ARGS)
	PYTHONPATH=$(HF_VENV)/oldest $(HF_VENV)/bin/python -m pytest -q -rs tests/identity $(ARGS)

test-vllm: build $(VLLM_VENV)/.installed
	$(VLLM_VENV)/bin/python -m pytest -q -rs tests/vllm $(ARGS)

test-sglang: build $(SGLANG_VENV)/.installed
	$(SGLANG_VENV)/bin/python -m pytest -q -rs tests/sglang $(ARGS)

# The real master and store, in a network namespace: Mooncake listens on all interfaces.
test-mooncake: build $(MOONCAKE_VENV)/.installed
	$(MOONCAKE_VENV)/bin/python -B tests/mooncake/store_test.py
	$(VENV)/bin/python -B tests/mooncake/daemon_test.py $(MOONCAKE_VENV)/bin/python

# A step is 5 s of a core on average. They are counted in a copy, since ninja counts no further where it would make
# its own file anew.
build: $(BUILD)/build.ninja $(VENV)/.installed
	$(FOR_CHIPS)
	@cp $(BUILD)/build.ninja $(BUILD)/steps.ninja
	@steps=$$(ninja -C $(BUILD) -f steps.ninja -n $(PRODUCT) | grep -c '^\['); \
	  echo "make build: $$steps steps on $(JOBS) cores," \
	  "up to $$((steps * 10 / $(JOBS) / 60 + 1)) minutes; CUDA backend: $(if $(CUDA),yes,no (CUDA=1 builds it without a GPU))"
	@cmake --build $(BUILD) --parallel $(JOBS) --target $(PRODUCT)

# What is given away has all of it.
install deb wheel image-cuda test-image-cuda bundle: CUDA := 1

all: $(BUILD)/build.ninja $(VENV)/.installed
	$(FOR_CHIPS)
	cmake --build $(BUILD) --parallel $(JOBS) --target all unit_tests

test-sanitized: asan asan-daemon

# ASan + UBSan over the unit tests. A report of a sanitizer fails the run, whatever the tests say.
asan: $(BUILD)/.packages
	cmake --preset asan
	cmake --build $(BUILD)/asan --parallel $(JOBS) --target sanitized_tests
	rm -f $(REPORTS).*
	cd $(BUILD)/asan && $(SANITIZED) ctest --parallel $(JOBS) -L unit -L faults -LE rpc --output-on-failure --no-tests=error
	cd $(BUILD)/asan && $(SANITIZED) ctest --parallel $(JOBS) -L unit -LE 'rpc|faults' --repeat until-pass:2 --output-on-failure --no-tests=error
	@if ls $(REPORTS).* 2>/dev/null; then cat $(REPORTS).*; exit 1; fi

byte-tests: $(BUILD)/.packages
	cmake --preset asan -DCMAKE_UNITY_BUILD=$(UNITY)
	cmake --build $(BUILD)/asan --parallel $(JOBS) --target sanitized_byte_tests

asan-bytes: byte-tests
	$(RUN_BYTE_TESTS)

# The same over a daemon, against which the end-to-end tests of the plain build run, but those that compare bits of
# the daemon's kernels with the library's: the two are compiled differently here.
asan-daemon: all
	cmake --preset asan
	cmake --build $(BUILD)/asan --parallel $(JOBS) --target kvstratad
	rm -f $(REPORTS).*
	cd $(BUILD) && KVSTRATAD=$(abspath $(BUILD))/asan/bin/kvstratad $(SANITIZED) ctest --parallel $(JOBS) -L e2e -LE program -E 'transports_test|recompress_e2e_test|build_e2e_test' --output-on-failure --no-tests=error
	@if ls $(REPORTS).* 2>/dev/null; then cat $(REPORTS).*; exit 1; fi

asan-rpc: $(BUILD)/.packages
	cmake --preset asan
	cmake --build $(BUILD)/asan --parallel $(JOBS) --target sanitized_rpc_tests
	rm -f $(REPORTS).*
	cd $(BUILD)/asan && $(SANITIZED) ctest --parallel $(JOBS) -L rpc --output-on-failure --no-tests=error
	@if ls $(REPORTS).* 2>/dev/null; then cat $(REPORTS).*; exit 1; fi

# TSan over the unit tests; gRPC of Debian is not instrumented (docs/testing.md).
tsan: $(BUILD)/.packages
	cmake --preset tsan
	cmake --build $(BUILD)/tsan --parallel $(JOBS) --target sanitized_tests
	cd $(BUILD)/tsan && TSAN_OPTIONS=ignore_noninstrumented_modules=1 ctest -L unit -LE rpc --output-on-failure --no-tests=error

bench: all
	$(VENV)/bin/python bench/run.py --out bench/results

CONTAINERS := $(firstword $(foreach engine,docker podman buildah,$(shell command -v $(engine))))
image:
	$(or $(CONTAINERS),$(error install docker, podman or buildah)) build --file docker/cpu.Dockerfile --target daemon \
	  --build-arg KVS_COMMIT=$$(git rev-parse --short HEAD) --tag kvstrata .

image-cuda:
	$(or $(CONTAINERS),$(error install docker, podman or buildah)) build --file docker/cuda.Dockerfile --tag kvstrata-cuda \
	  $(dir $(or $(wildcard $(BUILD)/lib/libkvstrata_cuda.so),$(error there is no CUDA backend: make build beside an nvcc 12.5)))

test-image-cuda: build $(BUILD)/.image_packages
	$(PYTHON) -B tests/image/cuda_image_test.py --bin $(BUILD)/bin --lib $(BUILD)/lib --folder $(BUILD)/image

PREFIX := /usr/local
install: build
	for component in library remote devel daemon cuda; do \
	  cmake --install $(BUILD) --prefix $(PREFIX) --component $$component || exit; done

deb: build $(BUILD)/.deb_packages
	deploy/build_debs.sh $(BUILD) $(BUILD)/deb

test-deb: deb wheel
	tests/deploy/debs_check.sh $(BUILD)/deb dist/wheels/kvstrata-$$(cat VERSION)-*.whl $(BUILD)/debs

wheel: build
	$(VENV)/bin/python integrations/build_wheel.py $(BUILD) dist/wheels

test-wheel: wheel
	tests/deploy/wheel_check.sh dist/wheels/kvstrata-$$(cat VERSION)-*.whl

bundle: all
	bench/cuda/bundle.sh $(BUILD) dist/gpu $(TRACE)

# clang's warnings, thread safety among them, of all sources; its analyzer, but of tests (.clang-tidy). Nothing is
# compiled but generated code, for its headers.
tidy: $(BUILD)/.packages
	cmake --preset tidy
	cmake --build $(BUILD)/tidy --parallel $(JOBS) --target kvs_proto kvs_proto_lite
	git ls-files '*.cc' | xargs -P $(JOBS) -n 4 clang-tidy -p $(BUILD)/tidy --quiet

format:
	git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs clang-format -i
format-check:
	git ls-files '*.cc' '*.h' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror

version:
	$(PYTHON) tests/tree/check_version.py . --set $(V)

clean:
	rm -rf $(BUILD)

$(BUILD)/.packages: docker/packages.apt
	docker/install_packages.sh
	mkdir -p $(BUILD) && touch $@

$(BUILD)/.deb_packages: deploy/debian.apt
	docker/install_packages.sh deploy/debian.apt
	mkdir -p $(BUILD) && touch $@

# One apt-get at a time.
$(BUILD)/.image_packages: docker/image.apt $(BUILD)/.packages
	docker/install_packages.sh docker/image.apt
	mkdir -p $(BUILD) && touch $@

$(BUILD)/tools/promtool: $(BUILD)/.packages | $(BUILD)/.image_packages
	docker/fetch_promtool.sh $@

$(BUILD)/build.ninja: $(BUILD)/.packages CMakePresets.json
	cmake --preset cpu -DCMAKE_UNITY_BUILD=$(UNITY) $(ON_CHIPS) -DKVS_PYTHON=$(abspath $(VENV))/bin/python \
	  -DKVS_TRANSFORMERS_PYTHON=$(abspath $(HF_VENV))/bin/python

$(VENV)/.installed: $(BUILD)/.packages integrations/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r integrations/requirements.txt
	touch $@

$(HF_VENV)/.installed: $(BUILD)/.packages integrations/requirements-transformers.txt
	$(PYTHON) -m venv $(HF_VENV)
	$(HF_VENV)/bin/pip install --quiet --disable-pip-version-check -r integrations/requirements-transformers.txt
	touch $@

$(HF_VENV)/oldest/.installed: $(HF_VENV)/.installed integrations/requirements-transformers-oldest.txt
	$(HF_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) \
	  -r integrations/requirements-transformers-oldest.txt
	touch $@

# Plugins of vLLM are found by their packages' entry points, so ours are installed, as links to this tree.
$(VLLM_VENV)/.installed: $(BUILD)/.packages integrations/requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r integrations/requirements-vllm.txt
	$(VLLM_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e integrations/kvstrata -e integrations/kvstrata_vllm
	touch $@

# Its client wants RDMA's libraries even for TCP.
$(MOONCAKE_VENV)/.installed: integrations/requirements-mooncake.txt
	apt-get install --yes --quiet libibverbs1 librdmacm1 iproute2
	$(PYTHON) -m venv $(MOONCAKE_VENV)
	$(MOONCAKE_VENV)/bin/pip install --quiet --disable-pip-version-check -r integrations/requirements-mooncake.txt
	touch $@

# SGLang finds plugins as vLLM does.
$(SGLANG_VENV)/.installed: $(BUILD)/.packages integrations/requirements-sglang.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -r integrations/requirements-sglang.txt
	$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e integrations/kvstrata -e integrations/kvstrata_sglang
	touch $@
