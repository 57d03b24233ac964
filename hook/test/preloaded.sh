#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the cases of a test with the shim preloaded, 12 at a time: alone.sh preloaded.sh TEST SHIM...
# Each must also leave standard error empty: the shim is silent by default. The first that
# fails runs once more.
set -eu
test=$1
shift
shim=$*
LD_LIBRARY_PATH=$(dirname "$test")
export LD_LIBRARY_PATH
dir=$TMPDIR
attempt() {
	err=$dir/$1.err
	if ! timeout 15m env LD_PRELOAD="$shim" "$test" "$1" 2>"$err" 3>&- || [ -s "$err" ]; then
		echo "failed, not silent, or not over after 15 minutes: $(basename "$test") $1" >&2
		cat "$err" >&2
		[ -s "$err" ] || "$test" | grep -qxF "$1" || echo "it has no such case, but these: $("$test")" >&2
		return 1
	fi
}
run() {
	attempt "$1" && return
	if mkdir "$dir/again" 2>/dev/null && attempt "$1"; then
		echo "PASSED AGAIN: $(basename "$test") $1" >&2
	else
		touch "$dir/failed"
	fi
}
# A line in this pipe for each case that may begin.
mkfifo "$dir/free"
exec 3<>"$dir/free"
n=0
# Most of them wait most of the time.
for c in ${CASES:-$("$test")}; do
	[ $n -lt 12 ] || read -r _ <&3
	{ run "$c"; echo >&3; } &
	n=$((n + 1))
done
wait
[ ! -e "$dir/failed" ] || exit 1
echo "$(basename "$test"): $n cases"
