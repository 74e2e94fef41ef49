# `make train` and `make test` are all that a fresh machine needs; both set up .venv first.
# A target that "resumes" continues where it was stopped when it is called again.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: train test test-slow test-lowest lint house bench bench-quick large-classes exactness presets out-of-distribution table2 clean weight-decay-study default-options learned-ranges suspicious-labels uci uci-heteroscedastic update-step-timing transformer-timing models graph-network-training vision-transformer-training optimizer-comparison ranks-timing docs gpu

train: $(INSTALLED)  ## train on the built-in digits, learn the weight decays, write runs/digits
	$(BIN)/marglik train --config digits
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

docs: $(INSTALLED)  ## build the documentation in site/ and run its examples: four minutes, less if they ran before
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[docs,adapters,transformers,models]'
	$(BIN)/mkdocs build

bench: $(INSTALLED)  ## time the curvature pass, the evidence update and the predictive beside the limit and the peers
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[bench]'
	$(BIN)/python -m experiments.speed.bench_curvature
	$(BIN)/python -m experiments.speed.bench_predictive

bench-quick: $(INSTALLED)  ## compare the main ratios with the committed ones, before and after a change: two minutes
	$(BIN)/python -m experiments.speed.bench_quick

large-classes: $(INSTALLED)  ## cost of 10 to 1,000 classes and of a vocabulary of 50,257: six minutes of a core; resumes
	$(BIN)/python -m experiments.speed.large_classes

models: $(INSTALLED)  ## check 72 model families of other libraries against brute force: five minutes
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[models]'
	$(BIN)/python -m tests.models.matrix --json experiments/results/models/models.json

exactness: $(INSTALLED)  ## where expand and reduce are exact, after the paper's figures 1 and 2: half a minute
	$(BIN)/python -m experiments.exactness.modes

presets: $(INSTALLED)  ## learned against initial weight decay for a ViT, a GPT and a GraphNetwork: half an hour
	$(BIN)/python -m experiments.weight_decay.presets

out-of-distribution: $(INSTALLED)  ## calibrated predictives on corrupted and out-of-distribution images: digits, ViT
	$(BIN)/python -m experiments.predictions.out_of_distribution

default-options: $(INSTALLED)  ## default options on ten small networks beside no decay and a grid: an hour of a core; resumes
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.weight_decay.default_options

weight-decay-study: $(INSTALLED)  ## learned weight decays beside grids, ensembles, dropout, SWAG and IVON: an hour of a core; resumes
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[bench]'
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.weight_decay.weight_decay_study

learned-ranges: $(INSTALLED)  ## learned invariances beside known, usual and tuned augmentations: an hour of a core; resumes
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.augmentation.learned_ranges

suspicious-labels: $(INSTALLED)  ## wrong labels found by one training beside cleanlab, and what cleaning brings: an hour of a core; resumes
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[bench]'
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.labels.suspicious_labels

ranks-timing: $(INSTALLED)  ## a curvature pass on two ranks against one, and the share of communication: two minutes
	$(BIN)/python -m experiments.speed.ranks_timing

table2: $(INSTALLED)  ## the paper's Table 2 at a size for two cores: less than two hours; resumes
	$(BIN)/python -m experiments.table2.marglik_cifar10 --jobs 2

uci: $(INSTALLED)  ## UCI regression with learned noise and weight decays beside four rivals: an hour; resumes
	$(BIN)/python -m experiments.uci.regression --jobs 2

uci-heteroscedastic: $(INSTALLED)  ## UCI regression with noise that depends on the input beside one noise: half an hour; resumes
	$(BIN)/python -m experiments.uci.heteroscedastic --jobs 2

update-step-timing: $(INSTALLED)  ## the paper's Table 1, a K-FAC step beside the peers' and an SGD step, WRN-16-4: an hour; resumes
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[bench]'
	$(BIN)/python -m experiments.speed.update_step_timing

gpu: $(INSTALLED)  ## on a machine with a GPU: tests, benchmarks, and one seed of the paper's Table 2; resumes
	$(BIN)/python -m pytest -q -m gpu
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[bench]'
	$(BIN)/python -m experiments.speed.bench_curvature --device cuda --data passes batch_128 update_50000 sizes
	$(BIN)/python -m experiments.speed.update_step_timing --device cuda
	$(BIN)/python -m experiments.speed.transformer_timing --data gpt_cuda vit_cuda resnet50_cuda
	$(BIN)/python -m experiments.speed.ekfac_timing --data resnet9_cuda gpt2_cuda
	for start in redux full; do $(BIN)/python -m experiments.table2.marglik_cifar10 --protocol $$start --seeds 1 --device cuda --jobs 2 --compile reduce-overhead || exit 1; done

transformer-timing: $(INSTALLED)  ## K-FAC of a GPT and a ViT, expand against reduce: a quarter of an hour
	$(BIN)/python -m experiments.speed.transformer_timing

graph-network-training: $(INSTALLED)  ## the paper's figure 3 on NCI1, K-FAC beside Nesterov's SGD: half an hour; resumes
	$(BIN)/python -m experiments.optimizers.steps_to_target --study graph_network_training

vision-transformer-training: $(INSTALLED)  ## the paper's figure 4 on CIFAR-10 (JPEG), K-FAC beside NAdamW: half an hour; resumes
	$(BIN)/python -m experiments.optimizers.steps_to_target --study vision_transformer_training

optimizer-comparison: $(INSTALLED)  ## SGD, AdamW, Muon, SOAP, Shampoo and K-FAC's defaults on five small problems: an hour; resumes
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[bench]'
	$(BIN)/python -m experiments.optimizers.optimizer_comparison

test-lowest:  ## run the default test suite with the oldest dependencies that pyproject.toml allows
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet uv
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct -e '.[dev,adapters]'
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -q $(TOGETHER)

# uv installs torch in seconds where pip takes minutes, and reads the same pyproject.toml.
$(INSTALLED): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-lowest runs site build
