# Everything starts here: `make book` builds the site, `make test` runs every test. A fresh machine needs Python 3.11 or
# newer, make and git; the rest is installed into .venv and _build. Another Python: make PYTHON=python3.13 book

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
NODE := _build/node
SITE := _build/html
# Tests start Python hundreds of times: it may keep what it has compiled, also where an environment says otherwise.
export PYTHONDONTWRITEBYTECODE :=
# Tests run four at a time, since many of them wait: threads with nothing to do must not spin on the cores of others, and the
# library's tests compute with one thread each.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup book test test-all style types test-library test-slow slow test-lab test-hosts test-notebooks test-site soak versions bench cluster size lab colab handout slides execute seeds serve clean

help:            ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 18

setup: .venv/.done $(NODE)/.done  ## install what the book and its tests need

book: setup      ## build the site from the stored outputs, into _build/html
	rm -rf $(SITE)
	$(BIN)/jupyter-book build . --all -W --keep-going

test: style types test-notebooks test-library  ## what a newcomer runs, in a quarter of an hour: all but what takes long

test-all: test test-slow test-lab test-hosts test-site  ## every test

style: .venv/.done  ## check the style of the code
	$(BIN)/ruff check .

types: .venv/.done  ## check its types
	$(BIN)/mypy

test-library: book  ## test the library, the notebooks' form and three pages of the site; not what tests/slow.txt lists
	OMP_NUM_THREADS=1 D2LPS_SITE=$(SITE) $(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder -m "not slow"

# These are in groups of their own: test-lab, test-hosts, test-site.
ALONE := $(addprefix --ignore tests/test_,lab.py shaped_hosts.py cluster_boxes.py feeding_hosts.py site.py slides.py)

test-slow: .venv/.done  ## test the rest of the library
	OMP_NUM_THREADS=1 $(PYTEST) $(ALONE) -n 4 --dist loadfile --no-loadscope-reorder -m slow

slow: .venv/.done  ## find out which of the library's tests are slow, and list them in tests/slow.txt
	OMP_NUM_THREADS=1 D2LPS_RENEW_SLOW=1 $(PYTEST) $(ALONE) -n 4 --dist loadfile --no-loadscope-reorder

# Behind hundreds of other tests, in the same process, a cell that was run there never answered. We don't know why yet.
test-lab: .venv/.done  ## open every chapter in JupyterLab, in a process of its own
	$(PYTEST) tests/test_lab.py

test-hosts: .venv/.done  ## compare hosts with shaped links and their simulation; Slurm, Envoy and the like: with nothing beside it
	$(PYTEST) tests/test_shaped_hosts.py tests/test_feeding_hosts.py tests/test_cluster_boxes.py

test-notebooks: .venv/.done  ## run the notebooks and compare with their stored outputs; NOTEBOOKS=... for some
	D2LPS_MOST_ROUNDS=1 $(PYTEST) --nbval --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-current-env --timeout 600 -n 4 --dist loadscope --no-loadscope-reorder --ignore book/d2lps_book --ignore book/_tools $(or $(NOTEBOOKS),book)

test-site: book  ## open every page of the site in Chromium, with the network off
	D2LPS_SITE=$(SITE) $(PYTEST) -n 4 --dist loadgroup tests/test_site.py tests/test_slides.py

soak: .venv/.done  ## provoke failures for an hour or two: kills, hangs, broken frames, programs of torch's 30 times over
	D2LPS_REPEAT=20 D2LPS_SOAK=1 $(PYTEST) --timeout 3600 tests/test_failures.py tests/test_sharedmemory.py tests/test_kvstore_*.py
	D2LPS_REPEAT=30 $(PYTEST) --timeout 3600 tests/test_backend_programs.py

# pip takes torch from where it is told to look. Where that has only builds for CUDA, these run without a GPU too, at 6 to 8 GB
# of disk each: torch loads the CUDA libraries when it is imported, so they can't be left out.
versions: .venv/.done  ## test the library under other PyTorch and Python: 30 GB, an hour or more; VERSIONS=2.6.0 for one
	$(BIN)/python tests/versions.py $(VERSIONS)

bench: .venv/.done  ## measure ours beside its peers; TABLES=... for some
	$(BIN)/python -m d2lps_book.bench $(TABLES)

cluster: .venv/.done  ## run a script on hosts with shaped links, all of them here; HOSTS=4, RUN="..." for another command
	$(BIN)/python book/at_scale/cluster/host_box.py $(or $(HOSTS),3) $(or $(RUN),$(BIN)/python book/at_scale/cluster/train.py $$(mktemp -d) --steps 10)

size:            ## count the lines that hold code, by folder
	@$(PYTHON) tests/size.py

lab: .venv/.done  ## open the book in JupyterLab at its contents; LAB=... for options of `jupyter lab`
	$(BIN)/python book/_tools/lab.py $(LAB)

execute: .venv/.done  ## run the notebooks anew and store their outputs; NOTEBOOKS=... for some, FRESH=--fresh for timings too
	$(BIN)/python book/_tools/execute.py $(FRESH) $(NOTEBOOKS)

seeds: .venv/.done  ## ask whether what chapters say holds under other random numbers too; NOTEBOOKS=... for some
	$(BIN)/python book/_tools/seeds.py $(NOTEBOOKS)

colab: .venv/.done  ## write copies of the notebooks for Colab into _build/colab
	$(BIN)/python book/_tools/colab.py

handout: .venv/.done  ## write the chapters as a course for nbgrader into _build/handout; NOTEBOOKS=... for some
	$(BIN)/python book/_tools/handout.py $(NOTEBOOKS)

slides: .venv/.done  ## make slides of the chapters, beside their pages in the built site; NOTEBOOKS=... for some
	$(BIN)/python book/_tools/slides.py $(NOTEBOOKS)

serve:           ## show the built site at http://127.0.0.1:8000
	@test -f $(SITE)/index.html || { echo "There is no site in $(SITE) yet. Build it first: make book"; exit 1; }
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(SITE) 8000

clean:           ## remove all that was installed or built
	rm -rf .venv _build

# The stamps: each is older than what it was made from when that has changed, and then made again.
.venv/.done: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "This book needs Python 3.11 or newer, and found none. Name one: make PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	touch $@

$(NODE)/.done: book/_tools/package.json .venv/.done
	mkdir -p $(NODE)
	cp book/_tools/package.json $(NODE)
	cd $(NODE) && PATH="$(CURDIR)/$(BIN):$$PATH" npm install --no-package-lock --ignore-scripts --no-audit --no-fund
	touch $@
