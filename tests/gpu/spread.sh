#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# Usage: spread.sh RESULTS-DIR [PLAN]
# Runs steps side by side on a host with several GPUs, as root. Each run of PLAN has its part of
# the processors. A step uses the first GPUs that it sees, so a run on others sees only these. Without PLAN it runs four-gpus.plan,
# which measures everything in half an hour. The driver starts and ends processes under locks that
# all its GPUs have in common, so the longest pauses are better measured without others.
# A line of PLAN has the GPUs (N of /dev/nvidiaN, separated by commas), a name, which is
# that of the directory in RESULTS-DIR, and what run.sh is given. A line begins when the
# lines before it that use one of its GPUs have ended.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${1:?usage: spread.sh RESULTS-DIR [PLAN]}"
results=$(cd "$1" && pwd)
plan=${2:-$here/four-gpus.plan}
gpus=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
[ "$gpus" -gt 0 ] || { echo "spread.sh: no /dev/nvidia0: run it on a GPU host" >&2; exit 1; }
each=$(($(nproc) / gpus))
[ "$each" -gt 0 ] || { echo "spread.sh: fewer processors than GPUs" >&2; exit 1; }

# sees runs a command that sees only some of the GPUs. A directory in place of /dev has no
# other ones; nobody can write there, so the driver's libraries cannot add them.
# shellcheck disable=SC2016 # the inner shell expands it
sees='
new=$(mktemp -d) && mount -t tmpfs -o mode=755 dev "$new" || exit 1
for path in /dev/*; do
	name=${path#/dev/}
	case $name in nvidia[0-9]*) case ,$0, in *,${name#nvidia},*) ;; *) continue ;; esac ;; esac
	if [ -L "$path" ]; then
		cp -P "$path" "$new/$name"
	elif [ -d "$path" ]; then
		mkdir "$new/$name" && mount --rbind "$path" "$new/$name"
	else
		touch "$new/$name" && mount --bind "$path" "$new/$name"
	fi || exit 1
done
mount -o remount,ro "$new" && mount --move "$new" /dev && rmdir "$new" && exec "$@"'

declare -A last=()
while read -r on name args; do
	case $on in '' | '#'*) continue ;; esac
	before='' cpus=''
	for gpu in ${on//,/ }; do
		before+=" ${last[$gpu]:-}"
		cpus+=,$((gpu % gpus * each))-$((gpu % gpus * each + each - 1))
	done
	(
		for pid in $before; do tail --pid="$pid" -f /dev/null; done
		echo "$(date -u +%T) GPU $on: $name"
		mkdir -p "$results/$name"
		case $on in 0 | 0,1) with=(env) ;; *) with=(unshare -m --propagation private bash -c "$sees" "$on") ;; esac
		# shellcheck disable=SC2086 # args are words
		if ! taskset -c "${cpus#,}" "${with[@]}" \
			"$here/run.sh" "$results/$name" $args >"$results/$name/run.txt" 2>"$results/$name/stderr.txt" </dev/null; then
			echo "GPU $on: $name failed: see $results/$name/stderr.txt" >&2
		fi
		echo "$(date -u +%T) GPU $on: $name ended"
	) &
	for gpu in ${on//,/ }; do last[$gpu]=$!; done
done <"$plan"
wait
