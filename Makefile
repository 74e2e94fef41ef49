# `make train` and `make test` are all that a fresh machine needs; both set up .venv first.
# `make help` lists the targets; experiments/README.md has the commands of the experiments.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help train test test-slow test-lowest lint house pages docs bench-quick models gpu clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' Makefile

train: $(INSTALLED)  ## train on the built-in digits, learn the weight decays, write runs/digits
	$(BIN)/marglik train --config digits --baseline --overwrite
	@echo "marglik is in $(BIN): 'source $(BIN)/activate' makes the README's commands work in this shell."

# One thread per worker: with more, threads wait for each other's cores. Bytecode is kept, or each
# worker and child would compile thousands of files. --no-loadscope-reorder keeps the files in order,
# long ones early: xdist itself would put files with few tests last, however long these take.
TOGETHER := -n auto --dist loadfile --no-loadscope-reorder

test: $(INSTALLED)  ## run the default test suite
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(TOGETHER)

test-slow: $(INSTALLED)  ## run the tests that take minutes each
	$(BIN)/python -m pytest -q -m slow

lint: $(INSTALLED)  ## check formatting, lint rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

house: $(INSTALLED)  ## count the lines, options and files that someone has to read
	$(BIN)/python -m tests.house

pages: $(INSTALLED)  ## write the reference of public names and options in docs/, and the notebooks
	$(BIN)/python docs/hooks/generated_pages.py

docs: $(INSTALLED)  ## build the documentation in site/ and run its examples: four minutes, less if they ran before
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[docs,adapters,transformers,models]'
	$(BIN)/mkdocs build

bench-quick: $(INSTALLED)  ## compare the main ratios with the committed ones, before and after a change: two minutes
	$(BIN)/python -m experiments.speed.bench_quick

models: $(INSTALLED)  ## check 72 model families of other libraries against brute force: five minutes
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[models]'
	$(BIN)/python -m tests.models.matrix --json experiments/results/models/models.json

gpu: $(INSTALLED)  ## on a machine with a GPU: tests, benchmarks, and one seed of the paper's Table 2; resumes
	$(BIN)/python -m pytest -q -m gpu
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[bench]'
	$(BIN)/python -m experiments.speed.bench_curvature --device cuda --data passes batch_128 update_50000 sizes
	$(BIN)/python -m experiments.speed.update_step_timing --device cuda
	$(BIN)/python -m experiments.speed.transformer_timing --data gpt_cuda vit_cuda resnet50_cuda
	$(BIN)/python -m experiments.speed.language_model_pass --data gpt_cuda
	$(BIN)/python -m experiments.speed.ekfac_timing --data resnet9_cuda gpt2_cuda
	for start in redux full; do $(BIN)/python -m experiments.table2.marglik_cifar10 --protocol $$start --seeds 1 --device cuda --jobs 2 --compile reduce-overhead || exit 1; done

# Without what depends least on versions, as CI has half an hour. Not by paths: their conftest.py
# would import what jaxtyping must see first.
PACKAGES_ALONE := --ignore-glob='*/tests/test_*.py' \
	$(addprefix --ignore=tests/,experiments examples fuzz kfac_backend/covariance kfac_backend/optimizer marglik/application/report)

test-lowest:  ## run most of both packages' tests with the oldest dependencies that pyproject.toml allows
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e '.[dev,adapters]'
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -q $(TOGETHER) $(PACKAGES_ALONE)

# uv's "auto" would take torch from PyTorch's own index, whatever index is configured.
define SIZE
Setting up .venv. It takes 6.7 GiB on disk, of which CUDA's libraries and Triton are 4 GiB. Without a GPU you do
not need them. To install torch's CPU build from PyTorch's own index, press Ctrl-C and run
'UV_TORCH_BACKEND=cpu make $(MAKECMDGOALS)'.
endef
export SIZE

# uv installs torch in seconds where pip takes minutes, and reads the same pyproject.toml.
$(INSTALLED): pyproject.toml
	@ls -d .venv/lib/python*/site-packages/torch >/dev/null 2>&1 || echo "$$SIZE"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]'
	touch $@

clean:  ## remove the environments, the runs and the site
	rm -rf .venv .venv-lowest runs site build
