# Every command a developer or CI runs. `make demo` and `make test` need nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= $(HOME)/.cache/kvservice/vllm-0.32.0
MODEL_CACHE ?= $(HOME)/.cache/kvservice/models
PAGE_PACKAGES ?= $(HOME)/.cache/kvservice/playwright-1.65.2
REMOTE_PACKAGES ?= $(HOME)/.cache/kvservice/remote-1
CHROMIUM ?= chromium
PROMTOOL ?= promtool
KILLS ?= 40
SEED ?=
RUN := PYTHONSAFEPATH=1 $(VENV)/bin/
STAMP := $(VENV)/.installed

.PHONY: setup demo serve test crash simulation vllm-env test-vllm page-env test-page test-heavy remote-env test-remote check-alerts check proto bench bench-first-layer bench-slow-links bench-vllm bench-vllm-rounds bench-vllm-gaps bench-quality lock clean

setup: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-deps --requirement requirements.lock
	$(VENV)/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: setup
	$(RUN)kvservice demo

serve: setup
	$(RUN)kvservice serve

test: setup
	$(RUN)pytest

# vLLM's own environment, outside the checkout: 3.4 GB, 2-3 minutes the first time.
vllm-env:
	$(PYTHON) deploy/vllm_environment.py $(VLLM_VENV)

# setup too: SmolLM2 is converted there.
test-vllm: setup vllm-env
	PYTHONSAFEPATH=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VLLM_VENV)/bin/python -m pytest tests/vllm \
		--model-cache=$(MODEL_CACHE) --model-python=$(VENV)/bin/python

# Playwright in a folder of its own, outside the checkout: 180 MB. The browser is the system's: apt-get install chromium.
page-env: setup
	test -e $(PAGE_PACKAGES)/playwright || $(VENV)/bin/pip install --quiet --target $(PAGE_PACKAGES) playwright==1.65.2

# The page in a real browser; its screenshots are in build/page afterwards.
test-page: setup page-env
	PYTHONPATH=$(PAGE_PACKAGES) $(RUN)pytest tests/page/browser --chromium=$(CHROMIUM)

# Several nodes as processes, on hosts of their own (root, iproute2), and plans against long runs: five minutes.
test-heavy: setup
	$(RUN)pytest -m heavy

# What engines of cold storage need, in a folder of its own, outside the checkout.
remote-env: setup
	test -e $(REMOTE_PACKAGES)/obstore || $(VENV)/bin/pip install --quiet --target $(REMOTE_PACKAGES) \
		obstore redis 'moto[server]' mooncake-transfer-engine-non-cuda dnspython

# Against real servers on loopback: Redis, etcd, an S3 server, Mooncake. apt-get install redis-server etcd-server
test-remote: remote-env
	PATH=$(REMOTE_PACKAGES)/bin:$$PATH PYTHONPATH=$(REMOTE_PACKAGES) $(RUN)pytest tests/remote tests/peers tests/sharing --require-servers

# Prometheus's own check of alerts and their tests: apt-get install prometheus brings promtool.
check-alerts:
	cd deploy/prometheus && $(PROMTOOL) check config prometheus.yml && $(PROMTOOL) test rules alerts_test.yml

# The nightly run is `make crash KILLS=500`; a failure prints the seed for SEED=.
crash: setup
	$(RUN)pytest tests/server/test_ssd_bit_flips.py -m crash --quiet
	$(RUN)pytest tests/crash -m crash --kills $(KILLS) $(if $(SEED),--seed $(SEED))

# The nightly run of the simulated node: half an hour to an hour and a half.
simulation: setup
	$(RUN)pytest tests/simulation --capture=no --faults 100000 --lives 1000 --flips 300

check: setup
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)pytest tests/test_architecture.py tests/test_tidy.py --quiet

proto: setup
	$(RUN)python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/kvservice/wire/v1/*.proto
	rm -f kvservice/wire/v1/peer_pb2_grpc.py kvservice/wire/v1/record_pb2_grpc.py kvservice/wire/v1/ssd_pb2_grpc.py

bench: setup
	for question in restore transport catalog ssd ssd_restore recovery eviction collective curves; do $(RUN)python bench/$$question.py || exit 1; done

# Times to the first token on the real vLLM, against no cache and against LMCache: about ten minutes, on a quiet machine.
bench-vllm: setup vllm-env
	model=$$($(RUN)python -c "import sys, pathlib, kvservice.client.demo.model as m; print(m.smollm2(pathlib.Path(sys.argv[1])))" $(MODEL_CACHE)) \
		&& PYTHONSAFEPATH=1 $(VLLM_VENV)/bin/python bench/vllm_ttft.py --model $$model

# When may a restore begin, of what another node has: two nodes and an engine's client, a minute.
bench-first-layer: setup
	$(RUN)python bench/first_layer.py

# Exact records and such of 8 bits a value over links of 100 Mbit to 10 Gbit a second, and what the 8 bits cost in answers.
bench-slow-links: setup
	PYTHONPATH=. $(RUN)python bench/slow_links.py
	PYTHONPATH=. $(RUN)python -m bench.quality.rounding --cache $(MODEL_CACHE)

# Rounds inside vLLM: time, bytes and agreement against full prefill; four minutes.
bench-vllm-rounds: setup vllm-env
	model=$$($(RUN)python -c "import sys, pathlib, kvservice.client.demo.model as m; print(m.smollm2(pathlib.Path(sys.argv[1])))" $(MODEL_CACHE)) \
		&& PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR) $(VLLM_VENV)/bin/python -m bench.vllm_rounds --model $$model

# How long a request that decodes waits while a round's pass runs, and while prompts are prefilled; a minute each.
bench-vllm-gaps: setup vllm-env
	model=$$($(RUN)python -c "import sys, pathlib, kvservice.client.demo.model as m; print(m.smollm2(pathlib.Path(sys.argv[1])))" $(MODEL_CACHE)) \
		&& PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR) $(VLLM_VENV)/bin/python -m bench.vllm_gaps --model $$model

# What reuse costs in quality and saves in bytes: half an hour to an hour of one core, a page at the end.
bench-quality: setup
	PYTHONPATH=. $(RUN)python -m bench.quality measure --cache $(MODEL_CACHE)
	PYTHONPATH=. $(RUN)python -m bench.quality collect
	PYTHONPATH=. $(RUN)python -m bench.quality page

# From an environment that was set up or upgraded by hand.
lock:
	$(RUN)python deploy/lock.py > requirements.lock.new
	mv requirements.lock.new requirements.lock

clean:
	rm -rf build dist *.egg-info $(VENV)
