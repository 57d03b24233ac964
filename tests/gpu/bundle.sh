#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: bundle.sh BUILD-DIR
# Makes BUILD-DIR/gpu-bundle.tar.xz: all files that a GPU host needs to run tests/gpu
# without network, Go or NVIDIA's container toolkit. `make static simgpu tools` must
# have run; `make gpu-bundle` does both. On the GPU host, as root:
#   tar xJf gpu-bundle.tar.xz && gpu-bundle/run.sh [RESULTS-DIR] [STEP...]
set -eu

build=$(cd "${1:?usage: bundle.sh BUILD-DIR}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
go=${GO:-go}
out=$build/gpu-bundle
rm -rf "$out"
mkdir -p "$out/bin" "$out/nvml" "$out/lib" "$out/tools"

cd "$root"
# These programs are static, because the host's C library may be any version. They find
# GPUs without NVML.
cp "$build"/static/"$(${GO:-go} env GOHOSTARCH)"/* "$out/bin/"
CGO_ENABLED=0 $go build -trimpath -ldflags '-s -w' -o "$out/bin/" ./tests/demo
CGO_ENABLED=0 $go build -trimpath -ldflags '-s -w' -o "$out/bin/nvshare-gpu" ./tests/gpu
CGO_ENABLED=0 $go build -trimpath -ldflags '-s -w' -o "$out/bin/nvshare-report" ./tests/report
# Only a program that is linked with the C library can load NVML. Swapping needs NVML to
# know how much memory a GPU has.
$go build -trimpath -ldflags '-s -w' -o "$out/nvml/" ./sched/nvshare-scheduler
cp "$out/bin/nvshare-checkpoint" "$out/nvml/" # which the scheduler looks for beside itself
# These are linked by the driver's soname: on the host, the real driver has this name.
for program in cuda-busy hand-over short-request launch-cost swap-load link-limit alloc-cost names-memory pointers gpu-sizes rm-probe; do
	cp "$build/bin/$program" "$out/bin/"
done
cp "$build/lib/libnvshare.so" "$out/lib/"
for tool in containerd containerd-shim-runc-v2 ctr runc crictl; do
	cp "$build/tools/$tool" "$out/tools/"
done
cp tests/gpu/run.sh tests/gpu/spread.sh tests/gpu/still.sh tests/gpu/four-gpus.plan tests/gpu/*.py tests/gpu/suites.explained "$out/"
mkdir "$out/loads"
cp tests/gpu/loads/*.py "$out/loads/"
git describe --always --dirty >"$out/commit" 2>/dev/null || echo unknown >"$out/commit"
# The Go programs have much in common: a dictionary that reaches over all of them, and the
# filter for x86 code, halve the archive. xz then takes two minutes and 1.4 GiB.
tar -C "$build" -cf - gpu-bundle | xz -T1 --x86 --lzma2=preset=6,dict=128MiB >"$build/gpu-bundle.tar.xz"
ls -l "$build/gpu-bundle.tar.xz"
