#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: coverage.sh OUT
# Adds up which lines of the shim ran in programs and libraries below OUT that were built
# with --coverage, and have run: OUT/lines names each line with its count, OUT/shim.txt
# has the part of each file and of all.
set -eu

out=${1:?usage: coverage.sh OUT}
cd "$(dirname "$0")/.."
# A line that several programs have counts as often as it ran in all of them. The paths are
# those of the compiler's command line, from here or from the folder of the tests.
find "$out" -name '*.gcda' -exec gcov --stdout {} + 2>"$out/gcov.log" | awk -F: -v lines="$out/lines" '
	$2 + 0 == 0 && $3 == "Source" { file = $4; sub(/^\.\.\//, "", file); next }
	file !~ /^(os|core|rm|memory|swap|cuda|nvml)\/[^.]*\.[ch]$/ { next }
	$2 + 0 > 0 && $1 !~ /-$/ { at = file ":" $2 + 0; n = $1; gsub(/[^0-9]/, "", n); ran[at] += n; of[at] = file }
	END {
		for (at in ran) {
			print at, ran[at] >lines
			all[of[at]]++; total++
			if (ran[at] > 0) { reached[of[at]]++; sum++ }
		}
		if (total == 0) exit 1
		for (file in all) printf "%-28s %5.1f%% of %d lines\n", file, 100 * reached[file] / all[file], all[file] | "sort"
		close("sort")
		printf "the shim (hook): %.1f%% of %d lines\n", 100 * sum / total, total
	}' >"$out/shim.txt"
sort -t: -k1,1 -k2n -o "$out/lines" "$out/lines"
