# make demo   a language model decodes from the daemon's memory
# make test   everything CI runs
# make asan   the unit tests under ASan and UBSan (part of make test)
# make bundle dist/gpu: GPU tests and benchmarks for a machine with a GPU (bench/cuda/run_gpu.sh);
#             TRACE=file (docs/traces.md): plan sekv too
# make build  build/bin/kvstratad, build/bin/kvstrata, build/lib/libkvstrata.so
# make all    tests and benchmarks too
# Each installs what it needs (docker/packages.apt, integrations/requirements.txt).

BUILD  := build
PYTHON := /usr/bin/python3
VENV   := $(BUILD)/venv
JOBS   := $(shell nproc)

.PHONY: demo test build all bench bundle asan tsan golden tidy format format-check clean

demo: build
	@$(VENV)/bin/python integrations/demo.py

test: all asan
	cd $(BUILD) && ctest --parallel $(JOBS) --repeat until-pass:2 --output-on-failure --no-tests=error

build: $(BUILD)/build.ninja $(VENV)/.installed
	cmake --build $(BUILD) --parallel $(JOBS) --target product

all: $(BUILD)/build.ninja $(VENV)/.installed
	cmake --build $(BUILD) --parallel $(JOBS)

# ASan + UBSan over the unit tests. A test that fails runs once more, with another seed; a report of
# a sanitizer fails the run whatever happens then.
asan: $(BUILD)/.packages
	cmake --preset asan
	cmake --build $(BUILD)/asan --parallel $(JOBS) --target sanitized_tests
	rm -f $(BUILD)/asan/report.*
	cd $(BUILD)/asan && ASAN_OPTIONS=log_path=$(abspath $(BUILD))/asan/report UBSAN_OPTIONS=log_path=$(abspath $(BUILD))/asan/report \
	  ctest --parallel $(JOBS) -L unit -LE rpc --repeat until-pass:2 --output-on-failure --no-tests=error
	@if ls $(BUILD)/asan/report.* 2>/dev/null; then cat $(BUILD)/asan/report.*; exit 1; fi

# TSan over the unit tests; gRPC of Debian is not instrumented (docs/testing.md).
tsan: $(BUILD)/.packages
	cmake --preset tsan
	cmake --build $(BUILD)/tsan --parallel $(JOBS) --target sanitized_tests
	cd $(BUILD)/tsan && TSAN_OPTIONS=ignore_noninstrumented_modules=1 ctest -L unit -LE rpc --output-on-failure --no-tests=error

bench: all
	$(VENV)/bin/python bench/run.py --out bench/results

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

clean:
	rm -rf $(BUILD)

$(BUILD)/.packages: docker/packages.apt
	docker/install_packages.sh
	mkdir -p $(BUILD) && touch $@

$(BUILD)/build.ninja: $(BUILD)/.packages CMakePresets.json
	cmake --preset cpu -DKVS_PYTHON=$(abspath $(VENV))/bin/python

$(VENV)/.installed: $(BUILD)/.packages integrations/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r integrations/requirements.txt
	touch $@
