#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs each C test with a state directory of its own.
export LD_LIBRARY_PATH="$LIB"
passed=0 failed=0
for t in "$@"; do
	# shellcheck disable=SC2016 # the inner shell's
	if ../suites/alone.sh sh -c 'mkdir "$NVSHARE_SIMGPU_DIR" &&
		printf "gpus=3\nmemory_mib=64\nlog_records=4096\n" >"$NVSHARE_SIMGPU_DIR/config" && timeout 600 "$0"' "$t"; then
		echo "ok   $(basename "$t")"
		passed=$((passed + 1))
	else
		echo "FAIL $(basename "$t")"
		failed=$((failed + 1))
	fi
done
# nothing but the API may be seen from outside, what tests need (a count of calls, and a fault), and the kernel's ioctl
if nm -D --defined-only "$LIB/libcuda.so.1" | grep -v ' T cu[A-Z]' | grep -v -e ' T simgpu_calls$' -e ' T simgpu_fail$' -e ' T simgpu_intercept$' -e ' T ioctl$'; then
	echo "FAIL exports of libcuda.so.1"
	failed=$((failed + 1))
else
	echo "ok   exports"
	passed=$((passed + 1))
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
