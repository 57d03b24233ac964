#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What the shim says when it is asked to: alone.sh speaks.sh TESTS SHIM DEBUG-SHIM.
set -eu
tests=$1 shim=$2 debug_shim=$3
export LD_LIBRARY_PATH="$tests"
dir=$TMPDIR
NVSHARE_DEBUG=1 LD_PRELOAD=$shim "$tests/client_test" registers_what_it_proved 2>"$dir/debug"
grep -q '^nvshare\[[0-9]*\]: interposed [1-9][0-9]* entry points, 0 lead past the shim$' "$dir/debug" || {
	echo "NVSHARE_DEBUG=1 said:" >&2
	cat "$dir/debug" >&2
	exit 1
}
# Only a debug build stands between a program and the driver's hidden tables.
release=$(LD_PRELOAD=$shim "$tests/reach_test" export_tables)
stands=$(NVSHARE_DEBUG=1 LD_PRELOAD=$debug_shim "$tests/reach_test" export_tables 2>"$dir/tables")
sed -i 's/^.*export table //' "$dir/tables"
printf '%s-0000-0000-0000-000000000000: asked for %s times, result 0\n' \
	6bd50000 1 6bd50000 2 a0940000 1 >"$dir/expected"
if [ "$release $stands" != "libcuda.so.1 libnvshare.so" ] ||
	! diff "$dir/expected" "$dir/tables" >&2; then
	echo "export tables: release build $release, debug build $stands" >&2
	exit 1
fi
