#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests that need the shim preloaded: preloaded.sh TESTS SHIM DEBUG-SHIM.
# Each must also leave standard error empty: the shim is silent by default. The first that
# fails runs once more.
set -eu
tests=$1 shim=$2 debug_shim=$3
export LD_LIBRARY_PATH="$tests"
unset NVSHARE_DEBUG NVSHARE_SCHEDULER_LOSS
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
attempt() {
	err=$dir/$(basename "$1").${2:-}
	if ! LD_PRELOAD=$shim "$@" 2>"$err" 3>&- || [ -s "$err" ]; then
		echo "failed, or not silent: $*" >&2
		cat "$err" >&2
		return 1
	fi
}
run() {
	attempt "$@" && return
	if mkdir "$dir/again" 2>/dev/null && attempt "$@"; then
		echo "PASSED AGAIN: $(basename "$1") ${2:-}" >&2
	else
		touch "$dir/failed"
	fi
}
run "$tests/resolve_test"
run "$tests/resolve_linked_test"
for c in $("$tests/reach_test"); do
	run "$tests/reach_test" "$c"
done >"$dir/reach"
# Another library may be preloaded too, before us and after us.
alone=$shim
shim="$tests/libinterposer.so $alone"
run "$tests/reach_linked_test" interposer_before_us
shim="$alone $tests/libinterposer.so"
run "$tests/reach_linked_test" interposer_after_us
shim=$alone
for t in client recovery process stream submit place; do
	# A line in this pipe for each case that may begin.
	mkfifo "$dir/free.$t"
	exec 3<>"$dir/free.$t"
	n=0
	# It asserts the order of locks, and that no driver call is under a lock of the client thread.
	[ $t != stream ] || shim=$debug_shim
	# Most of them wait most of the time.
	for c in $("$tests/${t}_test"); do
		[ $n -lt 12 ] || read -r _ <&3
		{ run "$tests/${t}_test" "$c"; echo >&3; } &
		n=$((n + 1))
	done
	wait
	shim=$alone
	echo "$t: $n cases"
done
[ ! -e "$dir/failed" ] || exit 1
# And it speaks when it is asked to.
NVSHARE_DEBUG=1 LD_PRELOAD=$shim "$tests/client_test" registers_what_it_proved 2>"$dir/debug"
grep -q '^nvshare\[[0-9]*\]: interposed [1-9][0-9]* entry points, 0 lead past the shim$' "$dir/debug" || {
	echo "NVSHARE_DEBUG=1 said:" >&2
	cat "$dir/debug" >&2
	exit 1
}
# Only a debug build stands between a program and the driver's hidden tables.
stands=$(NVSHARE_DEBUG=1 LD_PRELOAD=$debug_shim "$tests/reach_test" export_tables 2>"$dir/tables")
sed -i 's/^.*export table //' "$dir/tables"
printf '%s-0000-0000-0000-000000000000: asked for %s times, result 0\n' \
	6bd50000 1 6bd50000 2 a0940000 1 >"$dir/expected"
if [ "$(cat "$dir/reach") $stands" != "libcuda.so.1 libnvshare.so" ] ||
	! diff "$dir/expected" "$dir/tables" >&2; then
	echo "export tables: release build $(cat "$dir/reach"), debug build $stands" >&2
	exit 1
fi
