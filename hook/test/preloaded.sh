#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that need the shim preloaded: preloaded.sh TESTS SHIM.
# Each must also leave standard error empty: the shim is silent by default.
set -eu
tests=$1 shim=$2
export LD_LIBRARY_PATH="$tests"
unset NVSHARE_DEBUG NVSHARE_SCHEDULER_LOSS
err=$(mktemp)
trap 'rm -f "$err"' EXIT
run() {
	if ! LD_PRELOAD=$shim "$@" 2>"$err" || [ -s "$err" ]; then
		echo "failed, or not silent: $*" >&2
		cat "$err" >&2
		exit 1
	fi
}
run "$tests/resolve_test"
run "$tests/resolve_linked_test"
n=0
for c in $("$tests/client_test"); do
	run "$tests/client_test" "$c"
	n=$((n + 1))
done
echo "client: $n cases"
# And it speaks when it is asked to.
NVSHARE_DEBUG=1 LD_PRELOAD=$shim "$tests/client_test" registers_what_it_proved 2>"$err"
grep -q '^nvshare\[[0-9]*\]: interposed 2 entry points, 0 lead past the shim$' "$err" || {
	echo "NVSHARE_DEBUG=1 said:" >&2
	cat "$err" >&2
	exit 1
}
