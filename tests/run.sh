#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: run.sh LOGS JOBS SUITE...
# Runs suites (targets of the Makefile), JOBS at a time, in the order given. Those in $BESIDE run
# beside these, one after the other, with the processor time that the others leave: most
# tests wait most of the time. Once they are done, JOBS + 1 of the others run at a time. What a
# suite prints goes to the screen, each line with the suite's name, and to LOGS/SUITE.log. The
# end says what each took, what was left out, which tests failed and passed when run again, and
# where the logs are; CPU is processor time. Ends with status 1 if a suite failed; the others
# run anyway. If it is ended by a signal, it ends what the suites run first. $AT_END, shell, comes last.
set -u

logs=${1:?usage: run.sh LOGS JOBS SUITE...} jobs=${2:?usage: run.sh LOGS JOBS SUITE...}
shift 2
rm -rf "$logs"
mkdir -p "$logs"
start=$(date +%s)
# gotestsum's words for a test, and our C tests' for a part. A suite that is ok has failures
# only of tests that passed when run again.
SKIPPED='^=== SKIP: |SKIPPED|LEFT OUT'
AGAIN='^=== FAIL: |^PASSED AGAIN: '
idle=
if chrt -i 0 true 2>/dev/null; then
	idle='chrt -i 0'
fi
minutes() { printf '%d:%02d' $(($1 / 60)) $(($1 % 60)); }

# suite NAME [PREFIX]: PREFIX goes before make.
suite() {
	began=$(date +%s)
	{
		# A session of its own has all that the suite starts, so that ended() finds it.
		# shellcheck disable=SC2086,SC2016 # words; the inner shell's
		${2:-} setsid -w sh -c 'echo $$ >"$1/$2.session"; [ -e "$1/ended" ] || exec make --no-print-directory "$2"' - "$logs" "$1" 2>&1
		echo $? >"$logs/$1.status"
		rm -f "$logs/$1.session"
		times >"$logs/$1.times"
	} | tee "$logs/$1.log" | sed -u "s/^/$1: /"
	now=$(date +%s)
	skipped=$(grep -c -E "$SKIPPED" "$logs/$1.log")
	result=ok
	[ "$(cat "$logs/$1.status")" = 0 ] || result=FAILED
	[ $result = FAILED ] || grep -E -A 4 "$AGAIN" "$logs/$1.log" | cut -c 1-150 >>"$logs/again.txt"
	# The second line of times: the user's and the system's time of all that the suite ran.
	cpu=$(awk 'NR == 2 { gsub("s", ""); for (i = 1; i <= 2; i++) { split($i, t, "m"); s += 60 * t[1] + t[2] } print int(s) }' "$logs/$1.times")
	printf '%-14s %-7s %7s %7s  %s\n' "$1" $result "$(minutes $((now - began)))" "$(minutes "$cpu")" "$(test "$skipped" = 0 || echo "$skipped left out")" >>"$logs/summary.txt"
	echo "=== make test: $1 $result after $(minutes $((now - began))); $(wc -l <"$logs/summary.txt") of $suites done after $(minutes $((now - start)))" >&2
}

# members SESSION...: the processes of these sessions.
members() {
	sed -n 's/^\([0-9]*\) .*) [^Z] [0-9]* [0-9]* \([0-9]*\) .*/\1 \2/p' /proc/[0-9]*/stat 2>/dev/null |
		awk -v of=" $* " 'index(of, " " $2 " ") { print $1 }'
}
# ended STATUS: no suite begins any more, and what runs ends, if need be by SIGKILL after 10 s.
running=
ended() {
	trap '' HUP INT TERM
	echo "=== make test: ended by a signal" >&2
	# shellcheck disable=SC2086 # words
	kill $running 2>/dev/null
	# Before the sessions are read: a suite that writes its own later sees this file.
	: >"$logs/ended"
	sessions=$(cat "$logs"/*.session 2>/dev/null | tr '\n' ' ')
	signal=TERM tries=0
	while left=$(members "$sessions") && [ -n "$left" ]; do
		# shellcheck disable=SC2086 # words
		[ $((tries % 100)) != 0 ] || kill -$signal $left 2>/dev/null
		tries=$((tries + 1))
		[ $tries -lt 100 ] || signal=KILL
		sleep 0.1
	done
	rm -f "$logs"/*.session "$logs"/*.status "$logs"/*.times
	exit "$1"
}
trap 'sh -c "${AT_END:-}"' EXIT
trap 'ended 129' HUP
trap 'ended 130' INT
trap 'ended 143' TERM

# A line in this pipe for each suite that may begin.
mkfifo "$logs/free"
exec 3<>"$logs/free"
rm "$logs/free"
suites=$# n=0 beside=
begins() {
	echo "=== make test: $1 begins, see $logs/$1.log" >&2
}
for name; do
	case " ${BESIDE:-} " in
	*" $name "*) beside="$beside $name" && continue ;;
	esac
	set -- "$@" "$name"
done
shift $suites
if [ -n "$beside" ]; then
	{
		for name in $beside; do
			begins "$name"
			suite "$name" "$idle" 3>&-
		done
		echo >&3
	} &
	running=$!
fi
for name; do
	[ $n -lt "$jobs" ] || read -r _ <&3
	n=$((n + 1))
	begins "$name"
	{ suite "$name" 3>&-; echo >&3; } &
	running="$running $!"
done
wait
rm -f "$logs"/*.status "$logs"/*.times
echo
if grep -q -h -E "$SKIPPED" "$logs"/*.log; then
	echo "LEFT OUT on this machine (each says why in its log):"
	grep -h -E "$SKIPPED" "$logs"/*.log | sort -u | sed 's/^/  /'
	echo
fi
if [ -s "$logs/again.txt" ]; then
	echo "FAILED, and passed when run again (more is in the log):"
	sed 's/^/  /' "$logs/again.txt"
	echo
fi
printf '%-14s %-7s %7s %7s\n' SUITE RESULT MIN:S CPU
cat "$logs/summary.txt"
printf '%-14s %-7s %7s\n' all '' "$(minutes $(($(date +%s) - start)))"
echo "logs: $logs"
for name in $(sed -n 's/^\([^ ]*\) *FAILED.*/\1/p' "$logs/summary.txt"); do
	echo "FAILED: $name, see $logs/$name.log; of it:"
	# Who has only the end of this output, as from a CI, must find the failure in it.
	grep -E -A 4 'failed|FAIL|panic:|WARNING: |\*\*\*' "$logs/$name.log" | tail -n 14 | cut -c 1-150 | sed 's/^/  /'
done
passed=$(grep -c '^[^ ]* *ok ' "$logs/summary.txt")
echo "$passed passed, $((suites - passed)) failed"
test "$passed" = "$suites"
