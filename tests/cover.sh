#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: cover.sh DIR
# Builds the shim into DIR with counters, runs its tests, and prints for each folder of
# hook how many of its lines ran. A process that is killed counts nothing, so the figures
# are a lower bound. DIR/hook.txt has each file.
set -eu

mkdir -p "${1:?usage: cover.sh DIR}"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")/.."

find "$out" -name '*.gcda' -delete
export CFLAGS='-O1 -g --coverage -fprofile-update=atomic' LDFLAGS=--coverage
make --no-print-directory -C hook OUT="$out" all
unset CFLAGS LDFLAGS
make --no-print-directory -C tests/simgpu OUT="$out"
# Tests that compare the library's size or symbols differ here: make test-c judges.
make --no-print-directory -k -C hook/test OUT="$out" test >"$out/hook.log" 2>&1 || echo "some tests do not pass with counters: $out/hook.log"

for layer in os core rm memory swap cuda nvml; do
	for file in hook/"$layer"/*.c; do
		gcov -n -o "$out/obj/hook/$layer" "$file" 2>/dev/null |
			awk -v want="$file" '/^File / { here = index($0, substr(want, 6)) > 0 } here && /^Lines executed/ { split($2, p, /[:%]/); print p[2], $4, want; exit }'
	done
done >"$out/hook.txt"
awk '{ split($3, p, "/"); ran[p[2]] += $1 * $2 / 100; all[p[2]] += $2; r += $1 * $2 / 100; a += $2 }
END { for (l in all) printf "hook/%-8s %5.1f %% of %d lines\n", l, 100 * ran[l] / all[l], all[l] | "sort"; close("sort"); if (a) printf "%-13s %5.1f %% of %d lines\n", "shim", 100 * r / a, a; else exit 1 }' "$out/hook.txt"
