#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: run.sh [RESULTS-DIR] [FLAG...] [STEP...]
# On a GPU host, as root, from the unpacked bundle: the steps named, or the
# first six. Writes RESULTS-DIR.
#   demo      the demo on the real GPU
#   launch    what the shim adds to a launch and to other calls
#   handover  how long the GPU stands still at a hand-over
#   gemm      two PyTorch containers that share the GPU
#   matrix    many kinds of work, alone and beside another (9 minutes; with
#             --quick 3), in PyTorch, JAX and CuPy as far as they are there
#   memory    what a process with a memory limit is told and given
#   shares    how exact compute limits and requests are
#   programs  real programs that share the GPU (decoders, trainings, servers):
#             natively, and in each mode (7 minutes; with --quick 4)
#   tenants   what 2 to 16 tenants get done together
#   priority  short requests beside tenants that saturate the GPU
#   swap      how long the GPU takes to pass to a tenant whose memory is away,
#             two of 16 GiB, then two of up to 60, then 16 again in PyTorch's
#             expandable segments' way (3 minutes)
#   alloc     what allocations cost, and PyTorch while all fits, with swapping
#             on (4 minutes)
#   makespan  tenants whose memory does not fit together, against one after the
#             other (4 minutes)
#   containers  rows of the matrix in two containers, and CDI without NRI
#             (3.5 minutes)
#   gang      a job on two GPUs beside tenants of one, and beside another job
#   two-gpu   processes that use two GPUs each
# Frameworks are looked for in python3 (PYTHON names another).
# bin/nvshare-gpu -h explains the flags.
set -u

here=$(cd "$(dirname "$0")" && pwd)
results=$here/results
case ${1:-} in
-* | '' | demo | launch | handover | gemm | matrix | memory | shares | programs | tenants | priority | swap | alloc | makespan | containers | gang | two-gpu) ;;
*) results=$1 && shift ;;
esac
mkdir -p "$results"
results=$(cd "$results" && pwd)

# The demo is a program of its own; the rest is passed on.
demo=no others=no left=$#
while [ "$left" -gt 0 ]; do
	left=$((left - 1))
	case $1 in
	demo) demo=yes ;;
	launch | handover | gemm | matrix | memory | shares | programs | tenants | priority | swap | alloc | makespan | containers | gang | two-gpu) others=yes && set -- "$@" "$1" ;;
	*) set -- "$@" "$1" ;;
	esac
	shift
done
if [ $demo$others = nono ]; then
	demo=yes others=yes
fi

{
	date -u +%Y-%m-%dT%H:%M:%SZ
	echo "commit $(cat "$here/commit")"
	uname -srm
	nvidia-smi --query-gpu=name,uuid,driver_version,memory.total,pcie.link.gen.max --format=csv,noheader
	nproc
} >"$results/host.txt" 2>&1
cat "$results/host.txt"

status=0
if [ $demo = yes ]; then
	"$here/bin/demo" --build-dir "$here" >"$results/demo.txt" 2>&1 || status=1
	cat "$results/demo.txt"
fi
if [ $others = yes ]; then
	"$here/bin/nvshare-gpu" --bundle "$here" --results "$results" "$@" || status=1
fi
exit $status
