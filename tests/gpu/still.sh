#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: still.sh RESULTS-DIR [STEP...]
# Run it on a GPU host, as root, from the unpacked bundle. It runs steps with --swap-memory auto and without
# in turn, three times each: while all memory fits, every row is to be within its spread. By default these are
# launch, handover, preempt, priority, programs and shares (40 minutes; the last two are short ones).
# RESULTS-DIR gets a directory for each run.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
results=${1:?usage: still.sh RESULTS-DIR [STEP...]}
shift
[ $# -gt 0 ] || set -- launch handover preempt priority programs shares --quick --cell 4
for round in 1 2 3; do
	for memory in 0 auto; do
		"$here/run.sh" "$results/$memory-$round" --scheduler-args "--swap-memory $memory" "$@"
	done
done
