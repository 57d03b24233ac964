#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: run.sh [RESULTS-DIR] [FLAG...] [STEP...] | [RESULTS-DIR] suites|servers|warden FLAG... | --help
# Run it on a GPU host, as root, from the unpacked bundle. It runs the steps that are
# named, or the first six, and writes their results to RESULTS-DIR.
#   demo      the demo on the real GPU
#   launch    what the shim adds to a launch and to other calls
#   handover  how long the GPU is idle at a hand-over
#   gemm      two PyTorch containers that share the GPU
#   matrix    many kinds of work, alone and beside another process (9 minutes; with
#             --quick 3), in those of PyTorch, JAX and CuPy that are installed
#   memory    what a process with a memory limit sees and gets
#   shares    how exact compute limits and requests are
#   programs  real programs that share the GPU (decoders, trainings, servers):
#             natively, and in each mode (25 minutes; with --quick 10)
#   alone     what the shim costs real programs that share the GPU with nobody: three
#             processes of each kind, one at a time (10 minutes; --only names programs)
#   oversub   real programs whose memory does not fit together (9 minutes; with --quick 3)
#   tenants   how much work 2 to 16 tenants do together
#   priority  short requests beside tenants that saturate the GPU
#   preempt   hand-over, short requests and a core limit beside kernels of 50 ms and 1 s
#             (2.5 minutes)
#   swap      how long a hand-over to a tenant takes whose memory is away: two of
#             16 GiB, two of up to 60, and two of 16 with memory as PyTorch's
#             expandable segments make it (3 minutes)
#   content   what moves of two pools that are mostly zero, of weights that do not change, and of
#             weights that do: as it is, with all copied, and natively; and how fast the shim looks (4 minutes)
#   suspend   a PyTorch process of 8 GiB off the GPU with its context and back, ten times;
#             then 20 programs like model servers on a GPU that looks like 24 GiB (5 to 8 minutes; with
#             --quick fewer servers). --servers 100 --model llama-1b --server-gpu-mib 0 --only servers has as
#             many language models on the whole GPU, and tries how many start natively
#   rl        two jobs that generate with a language model, score in Python and train, each with 70 % of
#             the GPU's memory: together, natively together, and one after the other (6 minutes)
#   alloc     with swapping on, what allocations cost, and PyTorch while all memory
#             fits (4 minutes)
#   makespan  tenants whose memory does not fit together, compared with one after
#             the other (4 minutes)
#   containers  rows of the matrix in two containers, and CDI without NRI
#             (3.5 minutes)
#   overlap   small kernels of several processes: the driver's time slices, plain MPS and
#             overlap groups; members' limits, a group beside an outsider, and faults; then
#             decoders, also beside GEMM (9 minutes; with --quick 5)
#   starts    tenants that start at the same time, 20 times (3 minutes)
#   gang      a job on two GPUs beside tenants of one, some with limits, beside another job, and
#             beside short requests (3.5 minutes; with --quick 1)
#   tensor    two language models, each split over the same two GPUs, with NCCL, that promise 1.5 times
#             the memory: together, one after the other, and 200 switches (8 minutes)
#   two-gpu   processes that use two GPUs each
#   migrate   a PyTorch training of 8 GiB that changes its GPU twenty times, against one
#             that stays: pauses, and whether the losses are the same (4 minutes; two GPUs)
#   suites    suites that others wrote (CUDA samples, tests of CuPy, PyTorch, Numba, JAX), from paths
#             on this host: what is not as natively. No other step goes with it; suites.py --help has its flags
#   servers   language models behind HTTP servers that share a GPU, each way, against one that has it
#             (9 minutes on one GPU). No other step goes with it; servers.py --help has its flags
#   warden    PyTorch programs without a shim, held by the scheduler and nvshare-warden: slices, core limits, a
#             fence, a memory limit (3 minutes); with --orders a script gives the orders, and kills the
#             warden (2 minutes). No other step goes with it
# The frameworks are those of python3; PYTHON names another interpreter.
# bin/nvshare-gpu -h explains the flags.
set -u
asked=$*

here=$(cd "$(dirname "$0")" && pwd)
case " $* " in
*" -h "* | *" --help "*) sed -n '/^# Usage:/,/^set -u/s/^# \{0,1\}//p' "$0" && exit ;;
esac
if [ ! -x "$here/bin/nvshare-gpu" ]; then
	echo "run.sh: $here is not an unpacked bundle: run make gpu-bundle, unpack .build/gpu-bundle.tar.xz, and run the run.sh in it" >&2
	exit 2
fi
results=$here/results
case ${1:-} in
-* | '' | demo | launch | handover | gemm | matrix | memory | shares | programs | alone | oversub | tenants | priority | preempt | swap | content | suspend | rl | alloc | makespan | containers | overlap | starts | gang | tensor | two-gpu | migrate | suites | servers | warden) ;;
*) results=$1 && shift ;;
esac
mkdir -p "$results"
results=$(cd "$results" && pwd)

# These are programs of their own, with flags whose values may be called as steps are.
own='' left=$#
case ${1:-} in
suites | servers | warden) own=$1 left=0 && shift ;;
esac
# The demo is a program of its own; other steps and flags go to nvshare-gpu.
demo=no others=no
while [ "$left" -gt 0 ]; do
	left=$((left - 1))
	case $1 in
	demo) demo=yes ;;
	launch | handover | gemm | matrix | memory | shares | programs | alone | oversub | tenants | priority | preempt | swap | content | suspend | rl | alloc | makespan | containers | overlap | starts | gang | tensor | two-gpu | migrate) others=yes && set -- "$@" "$1" ;;
	*) set -- "$@" "$1" ;;
	esac
	shift
done
if [ "$own$demo$others" = nono ]; then
	demo=yes others=yes
fi

{
	date -u +%Y-%m-%dT%H:%M:%SZ
	echo "commit $(cat "$here/commit")"
	uname -srm
	nvidia-smi --query-gpu=name,uuid,driver_version,memory.total,pcie.link.gen.max --format=csv,noheader
	nproc
	echo "run.sh $asked"
} >"$results/host.txt" 2>&1
cat "$results/host.txt"

status=0
if [ $demo = yes ]; then
	"$here/bin/demo" --build-dir "$here" >"$results/demo.txt" 2>&1 || status=1
	cat "$results/demo.txt"
fi
if [ -n "$own" ]; then
	"${PYTHON:-python3}" "$here/$own.py" "$results" "$@" || status=$?
fi
if [ $others = yes ]; then
	"$here/bin/nvshare-gpu" --bundle "$here" --results "$results" "$@" || status=1
fi
case $others$own in yes* | *servers)
	# Some steps have no table in the report, so that a run may leave nothing for it.
	"$here/bin/nvshare-report" -o "$results/report" "$results" || true
	;;
esac
exit $status
