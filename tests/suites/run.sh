#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: run.sh LOGS JOBS SUITE...
# Runs suites (targets of the Makefile), JOBS at a time, in the order given. Those in $BESIDE run
# beside these, one after the other, with the processor time that the others leave: most
# tests wait most of the time. Once they are done, JOBS + 1 of the others run at a time. What a
# suite prints goes to LOGS/SUITE.log, and to the screen, each line with the suite's name. The
# end says what each took, what was left out, which tests failed and passed when run again, and
# where the logs are; CPU is the processor time of the suite's cgroup, in which its daemons are, and its
# containers are not. Ends with status 1 if a suite failed; the others
# run anyway. If it is ended by a signal, it ends what the suites run first. $AT_END, shell, comes last.
#
# No suite outlives its tests: each is a session, and a cgroup where these can be made (root and
# cgroup v2). What is left in them when the suite ends is ended, by SIGTERM, and after $GRACE
# seconds (10) by SIGKILL. A suite that has not ended after its time in $BOUNDS (SUITE:TIME..., as
# of sleep; an hour) is ended, too, and has failed. Every $PROGRESS seconds (30) a line says what runs.
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

say() { echo "=== make test: $*" >&2; }

# A cgroup for all suites, below the one that this runs in.
cgroups=
for root in /sys/fs/cgroup /sys/fs/cgroup/unified; do
	own=$root$(sed -n 's/^0:://p' /proc/self/cgroup)
	if [ -w "$own/cgroup.procs" ] && mkdir "$own/nvshare-tests-$$" 2>/dev/null; then
		cgroups=$own/nvshare-tests-$$
		break
	fi
done
[ -n "$cgroups" ] || say "no cgroup can be made here: a process of a suite that makes a session of its own can outlive it"

# suite NAME [PREFIX]: PREFIX goes before make. A subshell, whose variables are its own.
suite() (
	began=$(date +%s)
	bound=60m
	for pair in ${BOUNDS:-}; do
		[ "${pair%%:*}" != "$1" ] || bound=${pair#*:}
	done
	[ -z "$cgroups" ] || mkdir "$cgroups/$1"
	: >"$logs/$1.log"
	# No pipe: its reader would wait for all who hold it, like a daemon that a test left behind.
	# shellcheck disable=SC2086,SC2016 # words; the inner shell's
	${2:-} setsid sh -c '
		echo $$ >"$1/$2.session"
		[ -z "$3" ] || echo $$ >"$3/$2/cgroup.procs"
		[ -e "$1/ended" ] || exec make --no-print-directory "$2"' - "$logs" "$1" "$cgroups" >>"$logs/$1.log" 2>&1 &
	pid=$!
	{
		timeout "$bound" tail -n +1 -s 0.2 -f --pid=$pid "$logs/$1.log"
		if [ $? = 124 ]; then
			: >"$logs/$1.late"
			{
				echo "FAILED: $1 had not ended after $bound and is ended; these are its processes:"
				list "$1"
			} | tee -a "$logs/$1.log"
		fi
	} | sed -u "s/^/$1: /"
	[ ! -e "$logs/$1.late" ] || end "$1"
	wait $pid
	status=$?
	# A process may be about to end.
	[ -z "$(members "$1")" ] || sleep 1
	[ -z "$(members "$1")" ] || list "$1" | sed "s/^/$1: /" >>"$logs/behind.txt"
	end "$1"
	cpu=
	if [ -n "$cgroups" ]; then
		cpu=$(minutes $(($(sed -n 's/^usage_usec //p' "$cgroups/$1/cpu.stat") / 1000000)))
		find "$cgroups/$1" -depth -type d -exec rmdir {} +
	fi
	rm -f "$logs/$1.session"
	now=$(date +%s)
	skipped=$(grep -c -E "$SKIPPED" "$logs/$1.log")
	result=ok notes=
	[ $status = 0 ] && [ ! -e "$logs/$1.late" ] || result=FAILED
	[ $result = FAILED ] || grep -E -A 4 "$AGAIN" "$logs/$1.log" | cut -c 1-150 >>"$logs/again.txt"
	[ "$skipped" = 0 ] || notes="$skipped left out"
	[ ! -e "$logs/$1.late" ] || notes="${notes:+$notes, }had not ended"
	printf '%-14s %-7s %7s %7s  %s\n' "$1" $result "$(minutes $((now - began)))" "$cpu" "$notes" >>"$logs/summary.txt"
	say "$1 $result after $(minutes $((now - began))); $(wc -l <"$logs/summary.txt") of $suites done after $(minutes $((now - start)))"
)

# members SUITE...: the processes of these suites.
members() {
	of=
	for name; do
		of="$of $(cat "$logs/$name.session" 2>/dev/null)"
		[ -z "$cgroups" ] || find "$cgroups/$name" -name cgroup.procs -exec cat {} + 2>/dev/null
	done
	sed -n 's/^\([0-9]*\) .*) [^Z] [0-9]* [0-9]* \([0-9]*\) .*/\1 \2/p' /proc/[0-9]*/stat 2>/dev/null |
		awk -v of="$of " 'index(of, " " $2 " ") { print $1 }'
}
# list SUITE: its processes, for people.
list() {
	for pid in $(members "$1" | sort -un); do
		[ ! -r "/proc/$pid/cmdline" ] || echo "  $pid $(tr '\0' ' ' <"/proc/$pid/cmdline" | cut -c 1-120)"
	done
}
# end SUITE...: their processes end.
end() {
	signal=TERM tries=0
	while left=$(members "$@") && [ -n "$left" ]; do
		# shellcheck disable=SC2086 # words
		[ $((tries % (10 * ${GRACE:-10}))) != 0 ] || kill -$signal $left 2>/dev/null
		tries=$((tries + 1))
		[ $tries -lt $((10 * ${GRACE:-10})) ] || signal=KILL
		sleep 0.1
	done
}
# ended STATUS: no suite begins any more, and what runs ends.
running=
progress=
ended() {
	trap '' HUP INT TERM
	say "ended by a signal"
	# shellcheck disable=SC2086 # words
	kill $running $progress 2>/dev/null
	# Before the sessions are read: a suite that writes its own later sees this file.
	: >"$logs/ended"
	# shellcheck disable=SC2046 # words
	end $(cd "$logs" && ls -- *.session 2>/dev/null | sed 's/\.session$//')
	[ -z "$cgroups" ] || find "$cgroups" -depth -type d -exec rmdir {} + 2>/dev/null
	rm -f "$logs"/*.session
	exit "$1"
}
# now_running: the suites that run, each with its time.
now_running() {
	now=$(date +%s)
	for file in "$logs"/*.session; do
		began=$(stat -c %Y "$file" 2>/dev/null) || continue
		file=${file##*/}
		printf '%s (%s) ' "${file%.session}" "$(minutes $((now - began)))"
	done
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
begins() { say "$1 begins, see $logs/$1.log"; }
for name; do
	case " ${BESIDE:-} " in
	*" $name "*) beside="$beside $name" && continue ;;
	esac
	set -- "$@" "$name"
done
shift $suites
# Its sleep holds no output, because it goes on for a while when the loop is ended.
while sleep "${PROGRESS:-30}" 3>&- >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
	[ -z "$(now_running)" ] || say "$(minutes $(($(date +%s) - start))), running: $(now_running)"
done 3>&- &
progress=$!
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
# shellcheck disable=SC2086 # words
wait $running
kill $progress 2>/dev/null
[ -z "$cgroups" ] || rmdir "$cgroups"
rm -f "$logs"/*.late
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
if [ -s "$logs/behind.txt" ]; then
	echo "LEFT BEHIND by a suite, and ended:"
	sed 's/^/  /' "$logs/behind.txt"
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
