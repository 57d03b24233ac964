#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: run.sh [NODES:PODS:PROFILE...]
# Measures the clusters named, or all of the README, and writes the results, the picture and
# the table of the README. GOGC, unless it is set, is 400 for the control plane. Needs root
# and what make tools-k8s builds. Run it on a machine that does nothing else.
set -eu
cd "$(dirname "$0")/../../.."
go build -trimpath -o .build/scale ./tests/kubernetes/scale
[ $# -gt 0 ] || set -- 10:80:best-fit 30:240:best-fit 100:800:best-fit 300:2400:best-fit 600:4000:best-fit 1250:4000:best-fit \
	100:800:spread 1250:4000:spread
for run; do
	nodes=${run%%:*} rest=${run#*:}
	env -u GOGC .build/scale -nodes "$nodes" -pods "${rest%%:*}" -profile "${rest#*:}" -gogc "${GOGC-400}"
done
.build/scale -report
