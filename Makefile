# SPDX-License-Identifier: Apache-2.0
#
# make demo   two pods and a podman container share one GPU, with a verdict
# make test   every test; installs what it needs (says so first)
# make help   the other targets

BUILD   := $(CURDIR)/.build
BIN     := $(BUILD)/bin
TOOLS   := $(BUILD)/tools
VERSION ?= $(shell sed -n 's/^## \[\([0-9][^]]*\)\].*/\1/p' CHANGELOG.md | head -n 1)
LDFLAGS := -s -w -X github.com/nvshare/nvshare/sched/api.Version=$(VERSION)
GO      ?= go
# sudo's PATH lacks the directory that go.dev/dl says to install Go in.
export PATH := $(PATH):/usr/local/go/bin
# Go's own stamp of the commit fails in a clone that another user owns.
export GOFLAGS := $(GOFLAGS) -buildvcs=false

# go-nvml binds functions that nvml.h marks deprecated.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

# A GPU host's demo uses the GPU; SIM=1 forces the simulated one.
SIM   ?=
GOAL  := demo
STEPS ?= 1000000000
# Of make test: a quarter of a minute of a processor, and the same seeds each time.
TEST_STEPS := 5000000
EXECS ?= 50000
FUZZ  := sched/wire:FuzzDecode sched/daemon/state:FuzzState sched/daemon:FuzzRecords sched/daemon:FuzzControl \
	plugin:FuzzRequest plugin:FuzzParseRequest plugin:FuzzShare sched/api:FuzzParseMemory cdi/ldcache:FuzzParse
SEED  ?= 0

IMAGE    ?= localhost/nvshare
ENGINE   ?= podman
HOSTARCH := $(shell $(GO) env GOHOSTARCH 2>/dev/null)
ARCH     ?= $(HOSTARCH)

PREFIX  ?= /usr/local
DESTDIR ?=

.DEFAULT_GOAL := build
# What is installed comes first; sub-makes run their jobs in parallel.
.NOTPARALLEL:
.PHONY: help build shim simgpu binaries tools root deps demo test test-unit test-c test-compat test-e2e runtimes compat stress bench bench-nri sim model fuzz generate \
	engines test-engines gpu-bundle release tarball install uninstall static image-root image push buildx-load buildx-push tools-k8s e2e-k8s clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

build: shim binaries ## the shim, the daemons and the tools of the product

shim: ## .build/lib/libnvshare.so
	@$(MAKE) --no-print-directory -C hook OUT=$(BUILD)

simgpu: ## the simulated GPU and the test workload
	@$(MAKE) --no-print-directory -C tests/simgpu OUT=$(BUILD)

# The hook runs in containers' root file systems and on any host: static.
binaries: ## nvshare-scheduler, nvshare-plugin, nvsharectl, nvshare-cdi-hook
	@mkdir -p $(BIN)
	$(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/ ./sched/nvshare-scheduler ./sched/nvsharectl ./plugin/nvshare-plugin
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cdi/nvshare-cdi-hook

root:
	@test "$$(id -u)" = 0 || { echo "make $(GOAL) needs root, for namespaces, mounts and cgroups: sudo make $(GOAL)" >&2; exit 1; }

test: GOAL := test
deps: ## installs the packages that demo or test needs, if any is missing
	@sh tests/install-deps.sh $(GOAL)

tools: deps ## containerd, runc, crictl at the versions pinned in tests/tools
	@sh tests/tools/build.sh $(TOOLS)

demo: root deps build simgpu tools ## the main job, on a real or simulated GPU
	$(GO) build -trimpath -o $(BIN)/ ./tests/demo
	SIM=$(SIM) $(BIN)/demo --build-dir $(BUILD)

test: root deps test-c test-unit test-compat test-e2e e2e-k8s test-engines ## everything

test-c: shim simgpu binaries
	@$(MAKE) --no-print-directory -C tests/simgpu OUT=$(BUILD) test
	@$(MAKE) --no-print-directory -C hook OUT=$(BUILD) test
	@$(MAKE) --no-print-directory -C tests/bench OUT=$(BUILD) check

test-unit: shim simgpu
	$(GO) vet ./...
	$(GO) vet -tags e2e ./tests/e2e
	NVSHARE_TEST_SIMGPU=$(BUILD)/simgpu $(GO) test ./...
	@$(MAKE) --no-print-directory sim STEPS=$(TEST_STEPS) SEED=1

test-compat: build simgpu
	$(GO) vet -tags compat ./tests/compat
	@$(MAKE) --no-print-directory -C tests/compat OUT=$(BUILD) test

compat: GOAL := test
compat: root deps build simgpu runtimes ## the shim in images of other releases and with NVIDIA's runtime; fetches them
	@$(MAKE) --no-print-directory -C tests/compat OUT=$(BUILD) full

# On containerd 1.7 and 2.0, which drop the CDI devices of plugins.
RUNTIMES := 1.7 2.0
RUNTIME_TESTS := BadRequest|Unannotated|Suffixes|DeviceNames|PreloadIsKept|ControlSocket|ContainersOfAPod|Churn|Images|Musl|FailClosed|KilledPlugin|KilledContainerd
runtimes: GOAL := test
runtimes: root deps build simgpu tools ## pods on older containerds, which it builds (minutes, once)
	@set -e; for v in $(RUNTIMES); do \
		sh tests/tools/containerd.sh $$v $(BUILD)/containerd-$$v; \
		NVSHARE_CONTAINERD=$(BUILD)/containerd-$$v $(GO) test -count=1 -tags e2e -timeout 10m -run '$(RUNTIME_TESTS)' ./tests/e2e; \
	done

test-e2e: build simgpu tools
	$(GO) test -count=1 -tags e2e -timeout 15m ./tests/e2e

test-engines: release simgpu tools
	$(GO) vet -tags engines ./tests/engines
	$(GO) test -count=1 -tags engines -timeout 10m ./tests/engines

engines: GOAL := test
engines: root deps release simgpu tools ## the examples with podman and Docker of later releases; fetches them
	NVSHARE_ENGINES=full $(GO) test -count=1 -tags engines -timeout 20m -v ./tests/engines

tools-k8s: deps
	@sh tests/tools/k8s/build.sh $(BUILD)/tools-k8s

e2e-k8s: GOAL := test
e2e-k8s: root deps build simgpu tools tools-k8s image-root ## the manifests on a real Kubernetes of one node, built from source
	$(GO) vet -tags k8s ./tests/kubernetes
	$(GO) test -count=1 -tags k8s -timeout 30m ./tests/kubernetes

stress: shim simgpu ## 64 threads and a million revokes, also under ThreadSanitizer (minutes)
	@$(MAKE) --no-print-directory -C hook/test OUT=$(BUILD) all
	@$(MAKE) --no-print-directory -C hook/test OUT=$(BUILD) stress

bench: build simgpu ## what the shim costs a call, on a driver that does nothing
	@$(MAKE) --no-print-directory -C tests/bench OUT=$(BUILD)

bench-nri: GOAL := test
bench-nri: root build simgpu tools ## what nvshare costs the creation of a container, on real containerds (minutes)
	$(GO) build -o $(BUILD)/bench/nvshare-bench-nri ./tests/bench/nri
	$(BUILD)/bench/nvshare-bench-nri -build $(BUILD) -results tests/bench/results
	$(GO) test -run '^$$' -bench CreateContainer -benchtime 5000x ./plugin

sim: ## the scheduler core in virtual time: make sim STEPS=1000000000 SEED=42
	STEPS=$(STEPS) SEED=$(SEED) $(GO) test -count=1 -timeout 0 -run 'TestSim$$' -v ./sched/sim

model: ## the protocol in Spin, with the counterexamples of what it would be without its parts
	$(GO) test -count=1 -v ./tests/model

# Minimising what is only interesting takes longer than all the rest.
fuzz: ## what others write: EXECS=50000 executions of each fuzz target
	@set -e; for t in $(FUZZ); do echo "$$t"; $(GO) test -run '^$$' -fuzz "^$${t#*:}\$$" -fuzztime $(EXECS)x -fuzzminimizetime 10x ./$${t%:*}; done

generate: ## the control API's Go code and the golden frames
	@$(MAKE) --no-print-directory -C sched/api generate

gpu-bundle: static simgpu tools ## .build/gpu-bundle.tar.xz: everything a GPU host without network needs
	@sh tests/gpu/bundle.sh $(BUILD)

# The programs of a release run on the build machine's glibc or a later one;
# STATIC=1: on any, but without NVML they know neither the GPUs' memory nor load.
RELEASE := $(BUILD)/release
STATIC  ?=

release: build $(if $(STATIC),static) ## .build/release: what a host gets, ready for nvsharectl install
	@rm -rf $(RELEASE)
	@install -D -t $(RELEASE) $(addprefix $(if $(STATIC),$(BUILD)/static/bin,$(BIN))/, \
		nvshare-scheduler nvshare-plugin nvsharectl nvshare-cdi-hook) $(BUILD)/lib/libnvshare.so
	@install -m 644 -t $(RELEASE) README.md CHANGELOG.md LICENSE
	@cp -R --preserve=mode deployments $(RELEASE)/

# Twice the same tree, twice the same bytes. Without a directory around it: the
# deployment guide moves its files from where it was unpacked.
tarball: release ## .build/nvshare-vVERSION.tar.gz, and its checksum
	tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct 2>/dev/null || echo 0)} \
		-C $(RELEASE) -cf - $$(ls $(RELEASE)) | gzip -n >$(BUILD)/nvshare-v$(VERSION).tar.gz
	@cd $(BUILD) && sha256sum nvshare-v$(VERSION).tar.gz | tee nvshare-v$(VERSION).tar.gz.sha256

install: release ## into PREFIX (/usr/local), below DESTDIR; root for the default
	$(RELEASE)/nvsharectl install --prefix $(PREFIX) $(if $(DESTDIR),--root $(DESTDIR))

uninstall: build ## what install put there, and what nvshare-plugin did
	$(BIN)/nvsharectl uninstall --prefix $(PREFIX) $(if $(DESTDIR),--root $(DESTDIR))

static: shim ## .build/static: binaries for any host or image
	@mkdir -p $(BUILD)/static/bin
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o $(BUILD)/static/bin/ \
		./sched/nvshare-scheduler ./sched/nvsharectl ./plugin/nvshare-plugin ./cdi/nvshare-cdi-hook

# The image's programs are linked with the C library, for NVML; see root.sh.
image-root: ## .build/image/ARCH/root: the files of the node image; ARCH=arm64 for the other one
	@$(MAKE) --no-print-directory -C hook OUT=$(BUILD) $(if $(filter $(ARCH),$(HOSTARCH)),all,aarch64)
	LDFLAGS='$(LDFLAGS)' VERSION=$(VERSION) sh deployments/image/root.sh $(ARCH) $(BUILD)/image/$(ARCH)/root

image: image-root ## the node image IMAGE:VERSION of what was compiled here, by ENGINE (podman)
	$(ENGINE) build -f Containerfile --platform linux/$(ARCH) --build-arg VERSION=$(VERSION) \
		--build-context files=$(BUILD)/image/$(ARCH) -t $(IMAGE):$(VERSION) $(BUILD)/image

push: ## that image to its registry: make image push IMAGE=registry.example/nvshare
	$(ENGINE) push $(IMAGE):$(VERSION)

BUILDX = docker buildx build --build-arg VERSION=$(VERSION) -t $(IMAGE):$(VERSION)
buildx-load: ## the node image compiled in a container, for docker here
	$(BUILDX) --load .

buildx-push: ## the same for linux/amd64 and linux/arm64, to a registry
	$(BUILDX) --platform linux/amd64,linux/arm64 --push .

clean:
	rm -rf $(BUILD)
