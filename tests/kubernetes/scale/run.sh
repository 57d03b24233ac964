#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: run.sh [NODES:PODS:PROFILE...]
# Measures the clusters named, or all of the README, and draws the results. Needs root and
# what make tools-k8s builds. Run it on a machine that does nothing else.
set -eu
cd "$(dirname "$0")/../../.."
go build -o .build/scale ./tests/kubernetes/scale
[ $# -gt 0 ] || set -- 1250:4000:best-fit 1250:4000:spread 600:4000:best-fit 300:2400:best-fit 100:800:best-fit 30:240:best-fit 10:80:best-fit \
	600:4000:spread 300:2400:spread 100:800:spread 30:240:spread 10:80:spread 1250:1000:stock
for run; do
	nodes=${run%%:*} rest=${run#*:}
	.build/scale -nodes "$nodes" -pods "${rest%%:*}" -profile "${rest#*:}"
done
.build/scale -plot
