#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: run.sh LOGS SUITE...
# Runs each suite (a target of the Makefile) with what it prints on the screen and in
# LOGS/SUITE.log. Says which suite runs, and at the end what each took, what was left out
# and where the logs are. Ends with status 1 if a suite failed; the others run anyway.
set -u

logs=${1:?usage: run.sh LOGS SUITE...}
shift
rm -rf "$logs"
mkdir -p "$logs"
failed=0 done=0 summary=$logs/summary.txt
for suite; do
	done=$((done + 1))
	echo "=== make test: suite $done of $#: $suite" >&2
	began=$(date +%s)
	{
		make --no-print-directory "$suite" 2>&1
		echo $? >"$logs/status"
	} | tee "$logs/$suite.log"
	took=$(($(date +%s) - began))
	# gotestsum's words for a test, and our C tests' for a part.
	skipped=$(grep -c -E '^=== SKIP: |SKIPPED|LEFT OUT' "$logs/$suite.log")
	result=ok
	if [ "$(cat "$logs/status")" != 0 ]; then
		result=FAILED failed=$((failed + 1))
	fi
	printf '%-14s %-7s %4d:%02d  %s\n' "$suite" $result $((took / 60)) $((took % 60)) "$(test "$skipped" = 0 || echo "$skipped left out")" >>"$summary"
done
rm -f "$logs/status"
echo
if grep -q -h -E '^=== SKIP: |SKIPPED|LEFT OUT' "$logs"/*.log; then
	echo "LEFT OUT on this machine (each says why in its log):"
	grep -h -E '^=== SKIP: |SKIPPED|LEFT OUT' "$logs"/*.log | sort -u | sed 's/^/  /'
	echo
fi
printf '%-14s %-7s %7s\n' SUITE RESULT MIN:S
cat "$summary"
echo "logs: $logs"
if [ $failed != 0 ]; then
	sed -n 's/^\([^ ]*\) *FAILED.*/FAILED: \1, see '"$(echo "$logs" | sed 's/[\/&]/\\&/g')"'\/\1.log/p' "$summary"
fi
echo "$(($# - failed)) passed, $failed failed"
test $failed = 0
