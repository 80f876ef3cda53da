# The project's commands. `make` alone lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
ARGS ?=

.PHONY: help install install-gpu demo demo-once test test-gpu check check-dashboards check-deploy bench-agreement bench-deployed bench-fidelity bench-hybrid bench-ingress bench-real-engines bench-rivals bench-router-cost bench-routing bench-simulator bench-slo bench-transfer chaos mutations sbom clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' Makefile

install: ## create .venv from the locks (nothing to do when it is up to date)
	@scripts/install

demo: install ## start a prefill and a decode engine on this machine, ask them, stay up until Ctrl-C
	@.venv/bin/baton demo $(ARGS)

demo-once: install ## the same, but end; the last line of stdout is one JSON object
	@.venv/bin/baton demo --once $(ARGS)

install-gpu: ## create .venv-gpu: the build for GPUs, which is tested without one
	@scripts/install gpu

test-gpu: install-gpu ## what can be tested of the build for GPUs on a machine without one
	@scripts/test-gpu $(ARGS)

test-long: install ## tests that start whole deployments, for minutes each: half an hour
	@scripts/test-long $(ARGS)

test: install ## every test whose needs are met here but those that take minutes; ARGS="-m 'not real and not slow and not thorough'" for the quick ones
	@scripts/test $(ARGS)

check: install ## format, lint, types, layers, prose, files
	@scripts/check

check-dashboards: install ## dashboards and rules: queries, schema, promtool, a real Prometheus on a running baton
	@scripts/check-dashboards $(ARGS)

check-deploy: install ## manifests: every artefact by its offline validator, and that a typo in it is found
	@scripts/check-deploy $(ARGS)

bench-agreement: install ## whether baton bench and vllm bench serve agree on one endpoint
	@.venv/bin/python -m benchmarks.bench_agreement $(ARGS)

bench-deployed: install ## whole deployments: a load step, baton apply, wake-ups, late handoffs; ARGS="--part apply"
	@.venv/bin/python -m benchmarks.deployed $(ARGS)

bench-fidelity: install ## how far predictions are from measurements; ARGS="--data FOLDER [--part NAME]"
	@.venv/bin/python -m benchmarks.fidelity $(ARGS)

bench-hybrid: install ## baton's hybrid against colocation and static splits (simulated); ARGS="--data FOLDER"
	@.venv/bin/python -m benchmarks.hybrid $(ARGS)

bench-ingress: install ## what an ingress takes: by token, by replicas up to 1,000, by open stream, in the long run
	@.venv/bin/python -m benchmarks.ingress $(ARGS)

bench-real-engines: install ## baton on real vLLM (CPU) beside vllm serve, a proxy, vllm-router, Ray Serve LLM; ARGS="--repeats 1"
	@.venv/bin/python -m benchmarks.real_engines $(ARGS)

bench-rivals: install ## baton beside vLLM, Dynamo, smg and others: CPU per token, added TTFT; ARGS="--repeats 1 --points 1x512,64x512"
	@.venv/bin/python -m benchmarks.rivals $(ARGS)

bench-router-cost: install ## what a routing decision and the prefix index cost, up to 1,000 replicas
	@.venv/bin/python -m benchmarks.router_cost --keep $(ARGS)

bench-routing: install ## how placement policies compare, on simulated engines in virtual time
	@.venv/bin/python -m benchmarks.routing $(ARGS)

bench-simulator: install ## how long the simulator takes; ARGS="--data FOLDER [--case NAME]"
	@.venv/bin/python -m benchmarks.simulator_speed $(ARGS)

bench-slo: install ## attainment and GPUs used (simulated); ARGS="--data FOLDER [--part NAME]"
	@.venv/bin/python -m benchmarks.slo $(ARGS)

bench-transfer: install ## GB/s of a pull over loopback against NIXL alone and memcpy
	@.venv/bin/python -m benchmarks.transfer $(ARGS)

chaos: install ## faults, loads and abuse, one after the other, into docs/reliability.md; ARGS="--list", "--case F1"
	@.venv/bin/python -m tests.chaos $(ARGS)

mutations: install ## take each protection away in a copy of the tree, and see that a test fails
	@.venv/bin/python -m tests.chaos.mutations $(ARGS)

sbom: install ## a bill of material of what is installed, in CycloneDX: dist/sbom.cdx.json
	@scripts/sbom $(ARGS)

clean: ## remove the environment and every cache
	@rm -rf .venv .venv-gpu dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find platform tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
