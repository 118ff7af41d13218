# The commands of the lab. Each sets up .venv first, which takes minutes once and no time after that.
# PYTHON=/path/to/python3.12 chooses the interpreter; without it, the first one that is new enough is taken.
.DEFAULT_GOAL := help
.PHONY: help setup report test fetch lab clean lock
MAKEFLAGS += --no-print-directory
unexport PYTHONPATH PYTHONHOME

BIN := .venv/bin
# In a container one is often root, and JupyterLab then wants to be told that this is meant.
ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: ## Make or repair .venv, and nothing else
	@sh scripts/setup.sh

report: setup ## Run every notebook and write reports/index.html
	@$(BIN)/labkit run

# Without a network what was fetched before serves; what is missing is not tested, and the last lines say so.
# The last notebooks take longest, so they are run first: no core is left alone with one. Tests wait at times, for a
# cluster or for what is killed, so there is one process more than cores; and each calculates on one core.
test: export OMP_NUM_THREADS = 1
test: setup ## Check everything: style, notebooks, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/nbstripout --keep-id --verify notebooks/*.ipynb
	-$(BIN)/labkit fetch
	$(if $(CI),-$(BIN)/labkit fetch vllm)
	$(if $(CI),$(BIN)/python -m pip install --quiet -c requirements.lock -e '.[cluster]')
	@made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && \
	    LABKIT_REPORTS="$$made" $(BIN)/pytest -n auto --maxprocesses=4 --nbmake --nbmake-timeout=300 \
	    $$(ls -r notebooks/*.ipynb)
	cores=$$(env -u OMP_NUM_THREADS nproc) && $(BIN)/pytest -n $$((cores < 4 ? cores + 1 : 4)) --dist=loadfile --no-loadscope-reorder

fetch: setup ## Get other people's kernels, to be measured beside the lab's
	@$(BIN)/labkit fetch

lab: setup ## Open JupyterLab at 127.0.0.1, on copies of the notebooks in lab/
	@$(BIN)/python -c "from pathlib import Path; from labkit.workflow import notebooks; notebooks.copy_into(Path('lab'))"
	@$(BIN)/jupyter-lab --ip=127.0.0.1 --notebook-dir=lab --LabApp.default_url=/lab/tree/start.ipynb $(ROOT)

clean: ## Remove .venv, caches and reports; measurements stay
	rm -rf .venv .cache .hypothesis .pytest_cache .ruff_cache reports labkit.egg-info
	find labkit notebooks tests \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

lock: ## Choose the newest versions and write requirements.lock (needs uv)
	@mkdir -p .cache
	@uv pip compile --quiet --upgrade --universal --python-version 3.11 --fork-strategy fewest \
	    --extra test --extra cluster --no-header --no-annotate --output-file .cache/lock pyproject.toml
	@{ grep '^#' requirements.lock; awk '!/^(cuda|nvidia)-/ || /^nvidia-ml-py/' .cache/lock; } > .cache/lock.new
	@mv .cache/lock.new requirements.lock
