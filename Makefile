# Each target sets up what it needs (scripts/setup.sh) and nothing twice; no activated
# environment is needed. PYTHON=/path/to/python3.12 picks the interpreter of a first set-up.

BIN := .venv/bin

.PHONY: help
help:
	@echo "make demo     set up, start the daemon, show four clients streaming at once"
	@echo "make test     set up, run every test: first those without a model, then the real ones"
	@echo "make foreign  llama.cpp's own server tests against this daemon; ARGS=--short for half a minute"
	@echo "make clients  a session of every client that people use, unmodified; installs 2 GB; ARGS='litellm aiperf' for some"
	@echo "make browsers the chat page in Chromium and Firefox, where they are installed"
	@echo "make check    lint, format, types, import rules, freshness of generated docs"
	@echo "make docs     render the generated parts of docs/"
	@echo "make bench    throughput and overhead, beside llama.cpp's own programs if they are here"
	@echo "make fuzz     fuzz the wire protocol, HTTP and schemas for half a minute; ARGS='--seconds 600' for ten"
	@echo "make mutations  put seeded faults into a copy of the code and see that the tests notice; ARGS=slot for some"
	@echo "make dist     wheels and source archives into dist/; VARIANTS='x64 haswell' for these CPUs only"
	@echo "make wheels   llama.cpp's wheel alone"
	@echo "make try-dist install what is in dist/ without a compiler and get a first token"
	@echo "make release  dist/ as it is published: wheels, sources, Debian package, formula, installer, checksums"
	@echo "make deb      a Debian package of what is in dist/"
	@echo "make install  this checkout into PREFIX (~/.local), also to update; make uninstall"
	@echo "make setup    only set up .venv and llama.cpp"
	@echo "make clean    remove .venv and caches of this checkout (compiled wheels stay)"

.PHONY: setup
setup:
	@sh scripts/setup.sh

# Everything but llama.cpp, which takes minutes to compile the first time.
.PHONY: setup-checks
setup-checks:
	@sh scripts/setup.sh --no-llama

.PHONY: demo
demo: setup
	@$(BIN)/uma-trio demo

# And with the client packages of the HTTP APIs, whose sessions are tests, and what drives a Chromium if there is one.
.PHONY: setup-test
setup-test:
	@sh scripts/setup.sh --sdk

.PHONY: test
test: setup-test
	@$(BIN)/python -m compileall -q uma_trio protocol/uma_protocol sim/uma_trio_sim cluster/uma_trio_cluster  # or each daemon would compile
	-@$(BIN)/python scripts/foreign_server_tests.py --fetch  # without the archive, tests with its templates skip
	@$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

.PHONY: browsers
browsers: setup-test
	@$(BIN)/python -m pytest tests/test_page.py tests/test_page_browser.py tests/test_page_firefox.py $(ARGS)

.PHONY: foreign
foreign: setup-test
	@$(BIN)/python scripts/foreign_server_tests.py $(ARGS)

.PHONY: clients
clients: setup-test
	@$(BIN)/python scripts/clients.py $(ARGS)

.PHONY: check
check: setup-checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_docs_fresh.py

.PHONY: docs
docs: setup-checks
	@for script in docs/*.py; do $(BIN)/python $$script || exit 1; done

.PHONY: bench
bench: setup
	@$(BIN)/python -m benches throughput
	@$(BIN)/python -m benches overhead

.PHONY: fuzz
fuzz: setup-checks
	@$(BIN)/python -m fuzz $(ARGS)

.PHONY: mutations
mutations: setup-test
	@$(BIN)/python scripts/mutations.py $(ARGS)

.PHONY: dist
dist: setup-checks
	@$(BIN)/python packaging/make_dist.py --variants "$(VARIANTS)"

.PHONY: wheels
wheels: setup-checks
	@$(BIN)/python packaging/make_dist.py --only wheels --variants "$(VARIANTS)"

.PHONY: try-dist
try-dist: setup-checks
	@$(BIN)/python packaging/try_dist.py

.PHONY: release
release: setup-checks
	@$(BIN)/python packaging/make_release.py --variants "$(VARIANTS)"

.PHONY: deb
deb: setup-checks
	@$(BIN)/python packaging/make_deb.py

PREFIX ?= $(HOME)/.local

.PHONY: install
install: setup
	@$(BIN)/python packaging/install.py --prefix "$(PREFIX)"

.PHONY: uninstall
uninstall:
	@sh packaging/install.sh --prefix "$(PREFIX)" --remove

.PHONY: clean
clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
