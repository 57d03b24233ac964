#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What the shim says when it is asked to: alone.sh speaks.sh TESTS SHIM DEBUG-SHIM.
set -eu
tests=$1 shim=$2 debug_shim=$3
export LD_LIBRARY_PATH="$tests"
dir=$TMPDIR
NVSHARE_DEBUG=1 LD_PRELOAD=$shim "$tests/client_test" registers_what_it_proved 2>"$dir/debug"
grep -q '^nvshare\[[0-9]*\]: interposed [1-9][0-9]* entry points, 0 bypass the shim$' "$dir/debug" || {
	echo "NVSHARE_DEBUG=1 said:" >&2
	cat "$dir/debug" >&2
	exit 1
}
# Nothing stands between a program and the driver's hidden tables.
for library in "$shim" "$debug_shim"; do
	stands=$(LD_PRELOAD=$library "$tests/reach_test" export_tables)
	[ "$stands" = libcuda.so.1 ] || {
		echo "export tables of $library: $stands" >&2
		exit 1
	}
done
