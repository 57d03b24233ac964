#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that need the shim preloaded: preloaded.sh TESTS SHIM.
# Each must also leave standard error empty: the shim is silent by default.
set -eu
tests=$1 shim=$2
export LD_LIBRARY_PATH="$tests"
unset NVSHARE_DEBUG NVSHARE_SCHEDULER_LOSS
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
run() {
	err=$dir/$(basename "$1").${2:-}
	if ! LD_PRELOAD=$shim "$@" 2>"$err" || [ -s "$err" ]; then
		echo "failed, or not silent: $*" >&2
		cat "$err" >&2
		touch "$dir/failed"
	fi
}
run "$tests/resolve_test"
run "$tests/resolve_linked_test"
for t in client recovery; do
	n=0
	# Most of them wait most of the time.
	for c in $("$tests/${t}_test"); do
		run "$tests/${t}_test" "$c" &
		n=$((n + 1))
		[ $((n % 6)) -ne 0 ] || wait
	done
	wait
	echo "$t: $n cases"
done
[ ! -e "$dir/failed" ] || exit 1
# And it speaks when it is asked to.
NVSHARE_DEBUG=1 LD_PRELOAD=$shim "$tests/client_test" registers_what_it_proved 2>"$dir/debug"
grep -q '^nvshare\[[0-9]*\]: interposed 2 entry points, 0 lead past the shim$' "$dir/debug" || {
	echo "NVSHARE_DEBUG=1 said:" >&2
	cat "$dir/debug" >&2
	exit 1
}
