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
# sudo's PATH lacks the directory in which go.dev/dl says to install Go.
export PATH := $(PATH):/usr/local/go/bin
# Without gRPC's trace pages the linker can drop methods that nobody calls: Kubernetes'
# client makes the plugin 56 MB large otherwise, and 35 MB so. Without netgo and osusergo
# programs load further libraries of glibc at run time.
TAGS := grpcnotrace,netgo,osusergo
# What is built, tested and released has the same flags, so that each package is compiled
# once for all: with these tags almost all are the same with and without cgo, too.
# Go's own stamp of the commit fails in a clone that another user owns.
export GOFLAGS := $(GOFLAGS) -buildvcs=false -trimpath -tags=$(TAGS)

# go-nvml binds functions that nvml.h marks deprecated.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

# The demo uses the machine's GPU if there is one; SIM=1 forces the simulated GPU.
SIM   ?=
GOAL  := demo
STEPS ?= 1000000000
# The steps of TestSim in make test: 3 s on one core, with the same seed each time. make sim takes the many.
TEST_STEPS := 400000
EXECS ?= 50000
FUZZ  := sched/wire:FuzzDecode sched/daemon/state:FuzzState sched/daemon:FuzzRecords sched/daemon:FuzzControl \
	plugin:FuzzRequest plugin:FuzzParseRequest plugin:FuzzShare sched/api:FuzzParseMemory cdi/ldcache:FuzzParse
SEED  ?= 1

IMAGE    ?= localhost/nvshare
ENGINE   ?= podman
HOSTARCH := $(shell $(GO) env GOHOSTARCH 2>/dev/null)
ARCH     ?= $(HOSTARCH)

# For what is C: make on all processors.
MAKE_C := $(MAKE) --no-print-directory -j$(shell nproc)

RESULTS ?= tests/gpu/results tests/bench/results

PREFIX  ?= /usr/local
DESTDIR ?=

.DEFAULT_GOAL := build
# Prerequisites run in order, because installing packages comes first; sub-makes run
# their jobs in parallel.
.NOTPARALLEL:
.PHONY: help env shell build shim simgpu binaries tools root deps demo test test-unit test-race coverage test-c test-compat test-e2e runtimes crio compat stress bench report pictures bench-nri sim model fuzz generate \
	engines slurm apptainer test-engines lint golangci gpu-bundle stage release test-release install uninstall static image-root image push buildx-load buildx-push tools-k8s e2e-k8s e2e-k8s-old kueue clean

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

build: shim binaries ## the shim, the daemons and the tools of the product

shim: ## .build/lib/libnvshare.so
	@$(MAKE_C) -C hook OUT=$(BUILD)

simgpu: ## the simulated GPU and the test workload
	@$(MAKE_C) -C tests/simgpu OUT=$(BUILD)

# The hook is static, because it runs in containers' root file systems and on any host.
# nvshare-checkpoint loads the C library and the driver without a C compiler's help.
binaries: ## nvshare-scheduler, nvshare-warden, nvshare-checkpoint, nvshare-plugin, nvsharectl, nvshare-cdi-hook
	@mkdir -p $(BIN)
	$(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/ ./sched/nvshare-scheduler ./sched/nvsharectl ./plugin/nvshare-plugin
	CGO_ENABLED=0 $(GO) build -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cdi/nvshare-cdi-hook ./sched/nvshare-checkpoint ./sched/nvshare-warden

env: ## for a shell: eval "$(make -s env)" gives go these flags; it compiles everything again with others
	@echo "export GOFLAGS='$(strip $(GOFLAGS))' CGO_CFLAGS='$(CGO_CFLAGS)' TAGS='$(TAGS)'"

shell: ## a shell in which go has these flags, and tests find the simulated GPU
	@unset MAKEFLAGS MFLAGS MAKELEVEL; TAGS='$(TAGS)' NVSHARE_TEST_SIMGPU=$(BUILD)/simgpu exec "$${SHELL:-sh}"

# What root has built by sudo is its caller's again, who builds on.
GIVE_BACK := if [ -n "$$SUDO_UID" ]; then chown -R -h "$$SUDO_UID:$$SUDO_GID" $(BUILD); fi

root:
	@test "$$(id -u)" = 0 || { echo "make $(GOAL) needs root, for namespaces, mounts and cgroups: sudo make $(GOAL)" >&2; exit 1; }

test: GOAL := test
deps: ## install the packages that demo or test needs, if any is missing
	@sh tests/install-deps.sh $(GOAL)

tools: deps ## containerd, runc, crictl at the versions pinned in tests/tools
	@sh tests/tools/build.sh $(TOOLS)

demo: root deps build simgpu tools ## two pods and a podman container share one GPU; SIM=1 simulates it
	$(GO) build -o $(BIN)/ ./tests/demo
	SIM=$(SIM) $(BIN)/demo --build-dir $(BUILD); status=$$?; $(GIVE_BACK); exit $$status

lint: GOAL := lint
lint: deps ## of make test: staticcheck, govulncheck, shellcheck, actionlint, cppcheck, clang-tidy and the dashboard
	@sh tests/tools/lint/lint.sh $(BUILD)/tools-lint

# Not of make test, whose lint runs staticcheck: this program takes long to build.
golangci: ## golangci-lint as pinned in tests/tools/golangci, with .golangci.yml (minutes, to build it once)
	CGO_ENABLED=0 $(GO) build -C tests/tools/golangci -o $(BUILD)/tools-lint/ tool
	$(BUILD)/tools-lint/golangci-lint run ./...

# Each suite can be run alone. A suite that fails does not keep the others from running, and one
# that has not ended after the time beside it is ended: on a machine that does much else, too, the
# longest takes half of that. What it builds first counts: e2e-k8s builds Kubernetes. The limit of
# go test, for a package, is below these, because it says where the tests hang.
# JOBS of them run at a time, in this order: those first that wait most of the time, for a cluster or for
# turns, so that none of them is left at the end with nothing beside it. Nothing in those of BESIDE waits or has a time limit of its own: they have the
# processor time that the others leave.
BOUNDS := e2e-k8s:90m test-e2e:60m test-unit:60m test-race:60m test-c:45m test-compat:45m test-release:60m lint:60m test-engines:60m
SUITES := $(foreach b,$(BOUNDS),$(firstword $(subst :, ,$b)))
BESIDE := lint test-release
JOBS ?= 2
test: root deps build simgpu ## every test (less than 20 minutes on 2 cores, and 10 minutes once, to build Kubernetes); make test SUITES='test-c lint' runs some
	@exec env BESIDE='$(BESIDE)' BOUNDS='$(BOUNDS)' AT_END='$(GIVE_BACK)' sh tests/suites/run.sh $(BUILD)/log $(JOBS) $(SUITES)

# $(call TEST,PACKAGES) names each package as it ends, and in the end each test that failed or was
# skipped. A failed test runs once more, alone; run.sh says so of one that passes then. More than
# a test and its parts (4), or a data race, is no bad luck. go vet runs once, in test-unit: go
# test's own, smaller one would look at all dependencies again.
TEST = $(GO) tool -modfile=tests/tools/summary/go.mod gotestsum --format pkgname-and-test-fails \
	--rerun-fails=1 --rerun-fails-max-failures=4 --rerun-fails-abort-on-data-race --packages="$(1)" -- -vet=off

# Tests make sockets, whose paths are short, and start programs as other users, who must
# be able to enter the directory. TMPDIR may be long or closed.
TEST_TMP ?= /tmp
test-c test-unit test-race test-compat test-e2e test-engines test-release e2e-k8s e2e-k8s-old: export TMPDIR := $(TEST_TMP)

test-c: shim simgpu binaries ## of make test: the shim and the simulated GPU, in C
	@$(MAKE_C) -C tests/simgpu OUT=$(BUILD) test
	@$(MAKE_C) -C hook OUT=$(BUILD) test
	@$(MAKE_C) -C tests/bench OUT=$(BUILD) check

# The daemons are tested with the race detector, everything else without.
RACED := ./sched/daemon/... ./plugin/... ./cdi/...
BENCHED = $$(grep -rl --include='*_test.go' '^func Benchmark' cdi plugin sched tests | xargs -n 1 dirname | sort -u | sed 's,^,./,')
TESTED_ENV = PATH="$$PATH:$(BUILD)/prometheus/usr/bin" NVSHARE_TEST_SIMGPU=$(BUILD)/simgpu

test-unit: shim simgpu binaries ## of make test: everything in Go that needs no containers, but test-race
	$(GO) vet -tags $(TAGS),e2e,engines,k8s,release $$($(GO) list -tags $(TAGS),e2e,engines,k8s,release ./... | grep -v /sched/cuda$$)
	$(GO) vet -tags $(TAGS),compat ./tests/compat
	$(GO) vet -trimpath=false ./sched/cuda
	@sh tests/tools/prometheus.sh $(BUILD)/prometheus
	@# Those that wait most begin first, so that the others' work fills the time.
	STEPS=$(TEST_STEPS) $(TESTED_ENV) $(call TEST,./tests/robustness ./tests/watch ./tests/gpu $$($(GO) list ./... | grep -vxF "$$($(GO) list $(RACED))")) -p 3 -parallel 4 -timeout 40m
	@# Each benchmark once, so that none is broken when somebody measures; with -short the long ones of fewest clients.
	$(GO) test -vet=off -short -run '^$$' -bench . -benchtime 1x $(BENCHED) >$(BUILD)/benchmarks.txt 2>&1 || { cat $(BUILD)/benchmarks.txt; exit 1; }

test-race: shim simgpu binaries ## of make test: the daemons, under Go's race detector
	@sh tests/tools/prometheus.sh $(BUILD)/prometheus
	@# The detector's programs stay for a second at their end, for races of other threads; some tests start many.
	GORACE=atexit_sleep_ms=100 $(TESTED_ENV) $(call TEST,$(RACED)) -race -p 3 -timeout 40m

test-compat: build simgpu ## of make test: the shim in other people's programs
	@$(MAKE_C) -C tests/compat OUT=$(BUILD) test

compat: GOAL := test
compat: root deps build simgpu runtimes ## the shim in images of other releases and with NVIDIA's runtime, which it downloads
	@$(MAKE_C) -C tests/compat OUT=$(BUILD) full

RUNTIMES := 1.7
RUNTIME_TESTS := BadRequest|Unannotated|Suffixes|DeviceNames|PreloadIsKept|ControlSocket|ContainersOfAPod|Churn|Images|Musl|FailClosed|KilledPlugin|KilledContainerd
runtimes: GOAL := test
runtimes: root deps build simgpu tools ## pods on containerd 1.7, which it builds once (minutes)
	@set -e; for v in $(RUNTIMES); do \
		sh tests/tools/containerd.sh $$v $(BUILD)/containerd-$$v; \
		NVSHARE_CONTAINERD=$(BUILD)/containerd-$$v $(GO) test -count=1 -tags $(TAGS),e2e -timeout 60m -run '$(RUNTIME_TESTS)' ./tests/e2e; \
	done

crio: GOAL := test
crio: root deps build simgpu tools ## pods on CRI-O, whose programs crio and pinns are in the folder CRIO; with podman and conmon
	NVSHARE_CRIO=$(abspath $(CRIO)) $(GO) test -count=1 -tags $(TAGS),e2e -timeout 60m -run '$(RUNTIME_TESTS)|ShimAndScheduler|Live|MemoryLimit|Placement|OverlapGroup(OfPods|Faults|IsOf|Refused)' ./tests/e2e

test-e2e: build simgpu tools ## of make test: pods and containers, on a real containerd, and the demo; root
	$(call TEST,./tests/e2e ./tests/demo) -p 1 -count=1 -tags $(TAGS),e2e -timeout 40m

test-engines: stage simgpu tools ## of make test: the examples of deployments, install and uninstall; root
	$(call TEST,./tests/engines) -count=1 -tags $(TAGS),engines -timeout 40m

kueue: ## the sample for Kueue in Kueue's own code, which it builds once (minutes)
	cd tests/kueue && $(GO) vet . && $(GO) test -count=1 .

engines: GOAL := test
engines: root deps stage simgpu tools ## the examples with podman and Docker of later releases, which it downloads
	NVSHARE_ENGINES=full $(GO) test -count=1 -tags $(TAGS),engines -timeout 60m -v ./tests/engines

slurm: GOAL := test
slurm: root deps build simgpu tools ## jobs of Debian's Slurm, which it unpacks, with the recipe's settings (4 minutes)
	NVSHARE_ENGINES=full $(GO) test -count=1 -tags $(TAGS),engines -timeout 20m -run TestSlurm -v ./tests/engines

apptainer: GOAL := test
apptainer: root deps build simgpu tools ## containers of Debian's Apptainer, which it unpacks, by the recipe's commands
	NVSHARE_ENGINES=full $(GO) test -count=1 -tags $(TAGS),engines -timeout 20m -run TestApptainer -v ./tests/engines

tools-k8s: deps ## Kubernetes, etcd and CNI plugins at the versions pinned in tests/tools/k8s
	@sh tests/tools/k8s/build.sh $(BUILD)/tools-k8s

e2e-k8s: GOAL := test
e2e-k8s: root deps build simgpu tools tools-k8s image-root ## the manifests on a real Kubernetes of one node, which it builds once
	$(call TEST,./tests/kubernetes) -count=1 -tags $(TAGS),k8s -timeout 40m

e2e-k8s-old: GOAL := test
e2e-k8s-old: root deps build simgpu tools tools-k8s image-root ## pods that ask by resources, on Kubernetes 1.34, which it builds once
	@sh tests/tools/k8s-1.34/build.sh $(BUILD)/tools-k8s-1.34 $(BUILD)/tools-k8s
	NVSHARE_KUBERNETES=$(BUILD)/tools-k8s-1.34 $(GO) test ./tests/kubernetes -run 'TestAdvertise$$' -count=1 -tags $(TAGS),k8s -timeout 40m

# The shim is built anew, because its programs count the lines that they reach.
coverage: COVERED := $(BUILD)/coverage
coverage: simgpu ## .build/coverage: which lines of the scheduler's core and of the shim the tests reach (minutes)
	@mkdir -p $(COVERED) && cp -a $(BUILD)/simgpu $(BUILD)/bin $(COVERED)/
	$(GO) test -coverprofile=$(COVERED)/machine.out -coverpkg=./sched,./sched/account,./sched/gang,./sched/timeslice,./sched/base,./sched/residency ./sched ./sched/timeslice ./sched/residency ./tests/sim
	@$(MAKE) --no-print-directory -C hook OUT=$(COVERED) coverage
	@$(GO) tool cover -func=$(COVERED)/machine.out | awk 'END { print "the scheduler'"'"'s core (sched): " $$NF }'
	@tail -n 1 $(COVERED)/shim.txt
	@echo "by function: go tool cover -func=$(COVERED)/machine.out; by file: $(COVERED)/shim.txt; by line: $(COVERED)/lines"

stress: shim simgpu ## 64 threads and a million revokes, also under ThreadSanitizer, and a thousand deaths of the scheduler (minutes)
	@$(MAKE) --no-print-directory -C hook/test OUT=$(BUILD) all
	@$(MAKE) --no-print-directory -C hook/test OUT=$(BUILD) stress
	NVSHARE_TEST_KILL_SEEDS=1000 $(GO) test -count=1 -run 'TestKilledAnywhere$$' ./sched/daemon

bench: build simgpu ## what the shim adds to a call of a driver that does nothing
	@$(MAKE) --no-print-directory -C tests/bench OUT=$(BUILD)
	@$(MAKE) --no-print-directory report

report: ## .build/report/report.html: tables and pictures of the raw results, or of RESULTS=DIRECTORY
	$(GO) run ./tests/report -o $(BUILD)/report $(RESULTS)

pictures: build simgpu ## tests/watch/pictures: top, status and the page, as README shows them; root, tmux, chromium
	GOFLAGS='$(GOFLAGS) -ldflags=-X=github.com/nvshare/nvshare/sched/api.Version=$(VERSION)' $(GO) run ./tests/watch/pictures --build-dir $(BUILD)

bench-nri: GOAL := test
bench-nri: root build simgpu tools ## what nvshare adds to the creation of a container, on real containerd (minutes)
	$(GO) build -o $(BUILD)/bench/nvshare-bench-nri ./tests/bench/nri
	$(BUILD)/bench/nvshare-bench-nri -build $(BUILD) -results tests/bench/results
	$(GO) test -run '^$$' -bench CreateContainer -benchtime 5000x ./plugin

sim: ## faults of the scheduler's core in virtual time: make sim STEPS=1000000000 SEED=random
	STEPS=$(STEPS) SEED=$(SEED) $(GO) test -count=1 -timeout 0 -run 'TestSim$$|TestCohorts$$|TestMemoryOfOthers$$' -v ./tests/sim

model: ## the protocol in Spin; without each of its parts, a counterexample
	NVSHARE_MODEL=1 $(GO) test -count=1 -v ./tests/model

# Minimising inputs that only reach new code takes longer than all other work.
fuzz: ## hostile input: EXECS=50000 executions of each fuzz target
	@set -e; for t in $(FUZZ); do echo "$$t"; $(GO) test -run '^$$' -fuzz "^$${t#*:}\$$" -fuzztime $(EXECS)x -fuzzminimizetime 10x ./$${t%:*}; done

generate: ## the Go code of the control API
	@$(MAKE) --no-print-directory -C sched/api generate

gpu-bundle: shim static simgpu tools ## .build/gpu-bundle.tar.xz: tests/gpu for a GPU host without network
	@sh tests/gpu/bundle.sh $(BUILD)

# The programs that are linked with the C library need glibc 2.34. The static ones run on
# any host, but without NVML, and so do not know the GPUs' memory and load.
STAGE  := $(BUILD)/release
STATIC ?=
ARCHES ?= amd64 arm64
# The time in all files of a release: the last commit's.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

stage: build $(if $(STATIC),static) ## .build/release: this host's release, ready for nvsharectl install
	@HERE=$(BIN) sh deployments/package/stage.sh $(if $(STATIC),$(BUILD)/static/$(HOSTARCH),$(BIN)) $(BUILD)/lib/libnvshare.so $(STAGE)

# The man pages are printed, and the packages' files installed, by this host's static programs.
release: ## .build/dist: tarballs, deb, rpm and SBOM for ARCHES (amd64 arm64), the chart for IMAGE, checksums
	@set -e; for arch in $(ARCHES); do sh deployments/image/libc.sh $$arch >/dev/null; done # fails before it takes time
	@set -e; for arch in $(sort $(HOSTARCH) $(ARCHES)); do $(MAKE) --no-print-directory static ARCH=$$arch; done
	@set -e; for arch in $(ARCHES); do $(MAKE) --no-print-directory image-root ARCH=$$arch; done
	@HERE=$(BUILD)/static/$(HOSTARCH) VERSION=$(VERSION) IMAGE=$(IMAGE) sh deployments/package/build.sh $(BUILD) $(ARCHES)

test-release: shim simgpu ## of make test: the files of make release; root
	@$(MAKE_C) -C hook OUT=$(BUILD) aarch64
	NVSHARE_TEST_BUILD=$(BUILD) $(call TEST,./tests/release) -count=1 -tags $(TAGS),release -timeout 40m

install: stage ## install into PREFIX (/usr/local), below DESTDIR; the default needs root
	$(STAGE)/nvsharectl install --prefix $(PREFIX) $(if $(DESTDIR),--root $(DESTDIR))

uninstall: build ## remove what install and nvshare-plugin put there
	$(BIN)/nvsharectl uninstall --prefix $(PREFIX) $(if $(DESTDIR),--root $(DESTDIR))

static: ## .build/static/ARCH: programs for any host or image
	@mkdir -p $(BUILD)/static/$(ARCH)
	CGO_ENABLED=0 GOARCH=$(ARCH) $(GO) build -ldflags '$(LDFLAGS)' -o $(BUILD)/static/$(ARCH)/ \
		./sched/nvshare-scheduler ./sched/nvshare-checkpoint ./sched/nvshare-warden ./sched/nvsharectl ./plugin/nvshare-plugin ./cdi/nvshare-cdi-hook

# The image's programs are linked with the C library, because NVML needs it; see root.sh.
image-root: ## .build/image/ARCH/root: the files of the node image; ARCH=amd64 or arm64
	@$(MAKE_C) -C hook OUT=$(BUILD) $(if $(filter $(ARCH),$(HOSTARCH)),all,aarch64)
	BUILD=$(BUILD) LDFLAGS='$(LDFLAGS)' VERSION=$(VERSION) sh deployments/image/root.sh $(ARCH) $(BUILD)/image/$(ARCH)/root

image: image-root ## the node image IMAGE:VERSION of what is compiled here, by ENGINE (podman)
	$(ENGINE) build -f Containerfile --platform linux/$(ARCH) --build-arg VERSION=$(VERSION) \
		--build-context files=$(BUILD)/image/$(ARCH) -t $(IMAGE):$(VERSION) $(BUILD)/image

push: ## push that image: make image push IMAGE=registry.example/nvshare
	$(ENGINE) push $(IMAGE):$(VERSION)

# podman reads .dockerignore too, BuildKit no .containerignore.
BUILDX = docker buildx build -f Containerfile --build-arg VERSION=$(VERSION) -t $(IMAGE):$(VERSION)
buildx-load: ## the node image, compiled in a container, for this host's docker
	$(BUILDX) --load .

buildx-push: ## the same for linux/amd64 and linux/arm64, pushed to a registry
	$(BUILDX) --platform linux/amd64,linux/arm64 --push .

clean: ## remove .build
	rm -rf $(BUILD)
