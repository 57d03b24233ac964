#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: run.sh [RESULTS-DIR]
# On a GPU host, as root, from the unpacked bundle: the demo on the real GPU,
# the cost of a launch, and two PyTorch containers that share the GPU. Needs
# python3 with PyTorch for the last (PYTHON names it). Writes RESULTS-DIR.
set -u

here=$(cd "$(dirname "$0")" && pwd)
results=${1:-$here/results}
mkdir -p "$results"
results=$(cd "$results" && pwd)

{
	date -u +%Y-%m-%dT%H:%M:%SZ
	echo "commit $(cat "$here/commit")"
	uname -srm
	nvidia-smi --query-gpu=name,uuid,driver_version,memory.total,pcie.link.gen.max --format=csv,noheader
	nproc
} >"$results/host.txt" 2>&1
cat "$results/host.txt"

status=0
"$here/bin/demo" --build-dir "$here" >"$results/demo.txt" 2>&1 || status=1
cat "$results/demo.txt"
"$here/bin/nvshare-gpu" --bundle "$here" --results "$results" || status=1
exit $status
