#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: run.sh LOGS LANE...
# A lane is a list of suites (targets of the Makefile), one after the other. Lanes run at
# the same time: most tests wait most of the time. What a suite prints goes to the screen,
# each line with the suite's name, and to LOGS/SUITE.log. The end says what each took, what
# was left out and where the logs are. Ends with status 1 if a suite failed; the others
# run anyway.
set -u

logs=${1:?usage: run.sh LOGS LANE...}
shift
rm -rf "$logs"
mkdir -p "$logs"

lane() {
	for suite; do
		echo "=== make test: $suite begins" >&2
		began=$(date +%s)
		{
			make --no-print-directory "$suite" 2>&1
			echo $? >"$logs/$suite.status"
		} | tee "$logs/$suite.log" | sed -u "s/^/$suite: /"
		took=$(($(date +%s) - began))
		# gotestsum's words for a test, and our C tests' for a part.
		skipped=$(grep -c -E '^=== SKIP: |SKIPPED|LEFT OUT' "$logs/$suite.log")
		result=ok
		[ "$(cat "$logs/$suite.status")" = 0 ] || result=FAILED
		line=$(printf '%-14s %-7s %4d:%02d  %s' "$suite" $result $((took / 60)) $((took % 60)) "$(test "$skipped" = 0 || echo "$skipped left out")")
		echo "$line" >>"$logs/summary.txt"
		echo "=== make test: $line" >&2
	done
}

for suites; do
	lane $suites &
done
wait
rm -f "$logs"/*.status
echo
if grep -q -h -E '^=== SKIP: |SKIPPED|LEFT OUT' "$logs"/*.log; then
	echo "LEFT OUT on this machine (each says why in its log):"
	grep -h -E '^=== SKIP: |SKIPPED|LEFT OUT' "$logs"/*.log | sort -u | sed 's/^/  /'
	echo
fi
printf '%-14s %-7s %7s\n' SUITE RESULT MIN:S
cat "$logs/summary.txt"
echo "logs: $logs"
failed=$(grep -c '^[^ ]* *FAILED' "$logs/summary.txt")
for suite in $(sed -n 's/^\([^ ]*\) *FAILED.*/\1/p' "$logs/summary.txt"); do
	echo "FAILED: $suite, see $logs/$suite.log"
done
echo "$(($(wc -l <"$logs/summary.txt") - failed)) passed, $failed failed"
test "$failed" = 0
