#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the cases of a test, so many at a time, each on simulated GPUs of its own:
# alone.sh simulated.sh TEST SIMGPU GPUS MIB JOBS [SHIM]. Without SHIM it is inside the
# program. Standard error must stay empty. The first case that fails runs once more.
set -eu
test=$1 simgpu=$2 gpus=$3 mib=$4 jobs=$5 shim=${6:-}
dir=$TMPDIR
export LD_LIBRARY_PATH="$simgpu"
attempt() {
	export NVSHARE_SIMGPU_DIR="$dir/$1.$2"
	mkdir "$NVSHARE_SIMGPU_DIR"
	printf 'gpus=%s\nmemory_mib=%s\n' "$gpus" "$mib" >"$NVSHARE_SIMGPU_DIR/config"
	if ! timeout 15m env LD_PRELOAD="$shim" "$test" "$1" 2>"$dir/$1.err" 3>&- || [ -s "$dir/$1.err" ]; then
		echo "failed, not silent, or not over after 15 minutes: $(basename "$test") $1" >&2
		cat "$dir/$1.err" >&2
		[ -s "$dir/$1.err" ] || "$test" | grep -qxF "$1" || echo "it has no such case, but these: $("$test")" >&2
		return 1
	fi
}
run() {
	attempt "$1" first && return
	if mkdir "$dir/again" 2>/dev/null && attempt "$1" again; then
		echo "PASSED AGAIN: $(basename "$test") $1" >&2
	else
		touch "$dir/failed"
	fi
}
# A line in this pipe for each case that may begin.
mkfifo "$dir/free"
exec 3<>"$dir/free"
n=0
for c in ${CASES:-$("$test")}; do
	[ $n -lt "$jobs" ] || read -r _ <&3
	{ run "$c"; echo >&3; } &
	n=$((n + 1))
done
wait
[ ! -e "$dir/failed" ] || exit 1
echo "$(basename "$test"): $n cases"
