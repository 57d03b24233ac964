#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: lint.sh DIR
# Checks the sources, with the Go programs that go.mod here pins, which it builds into
# DIR once; with shellcheck, cppcheck and clang-tidy where they are installed, whose
# versions it names; and the dashboard, where there is npm. Each check that is left out is
# named. Ends with status 1 if a check finds anything.
set -u

out=${1:?usage: lint.sh DIR}
go=${GO:-go}
mkdir -p "$out"
out=$(cd "$out" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../../.." || exit 1

want=$(cat "$here/go.mod" "$here/go.sum" | cksum)
if [ "$(cat "$out/.built-from" 2>/dev/null)" != "$want" ]; then
	echo "building staticcheck, govulncheck and actionlint as pinned in tests/tools/lint/go.mod; this takes minutes, once" >&2
	(cd "$here" && CGO_ENABLED=0 $go build -trimpath -ldflags '-s -w' -o "$out/" tool) || exit 1
	echo "$want" >"$out/.built-from"
fi

failed=
check() {
	name=$1
	shift
	echo "lint: $name" >&2
	"$@" || failed="$failed $name"
}
left_out() { echo "lint: LEFT OUT: $*" >&2; }
# These are lists of files; no name has a space.
scripts=$(git ls-files '*.sh' 2>/dev/null || find . -name '*.sh' -not -path './.build/*')

check staticcheck "$out/staticcheck" -tags e2e,engines,k8s,compat,release ./...
if command -v shellcheck >/dev/null; then
	# shellcheck disable=SC2086
	check "shellcheck $(shellcheck --version | sed -n 's/^version: //p')" shellcheck --severity=warning $scripts
else
	left_out "shellcheck, which is not installed"
fi
check actionlint "$out/actionlint" .github/workflows/*.yaml
if command -v cppcheck >/dev/null; then
	# It takes a bare address that is kept for a time for one that is kept for ever, and
	# does not see which branches exclude each other: the sanitizers of hook/test do.
	check "$(cppcheck --version)" cppcheck --quiet --error-exitcode=1 --enable=warning,portability --std=c11 -D__x86_64__ '-DElfW(t)=Elf64_##t' \
		--suppress=autoVariables --suppress=uninitvar --suppress=legacyUninitvar --suppress=ctuuninitvar \
		-Ihook -Ihook/os -Ihook/core -Ihook/rm -Ihook/memory -Ihook/swap -Ihook/cuda -Ihook/nvml \
		hook/os hook/core hook/rm hook/memory hook/swap hook/cuda hook/nvml
else
	left_out "cppcheck, which is not installed"
fi
# hook/.clang-tidy says which checks, and why others are left out. The analyzer looks at TIDY_NODES states of
# a function (max-nodes), into what it calls, too: with 75000 it takes twice as long, with all (225000) six times. A file that was clean is not checked again while it, what it includes, the checks and
# clang-tidy are the same.
tidy() {
	mkdir -p "$out/tidy"
	printf '%s\0' hook/*/*.c | grep -zv '^hook/test/' | xargs -0 -n 1 -P "$(nproc)" sh -c '
		clean=$1 nodes=$2 file=$3
		set -- -std=c11 -D_GNU_SOURCE -Ihook -Ihook/os -Ihook/core -Ihook/rm -Ihook/memory -Ihook/swap -Ihook/cuda -Ihook/nvml
		clean=$clean/$({ clang-tidy --version && echo "$nodes" && cat hook/.clang-tidy && cc -E -CC "$@" "$file"; } | sha256sum | cut -d " " -f 1)
		[ -e "$clean" ] || { clang-tidy --quiet "$file" -- "$@" -Xclang -analyzer-config -Xclang max-nodes="$nodes" 2>/dev/null && : >"$clean"; }' sh "$out/tidy" "${TIDY_NODES:-25000}"
}
if command -v clang-tidy >/dev/null; then
	check "clang-tidy $(clang-tidy --version | sed -n 's/.*version //p')" tidy
else
	left_out "clang-tidy, which is not installed"
fi
if command -v npm >/dev/null; then
	echo "lint: the dashboard, by Grafana's types" >&2
	sh "$here/../grafana/check.sh" "$out/grafana"
	case $? in
	0) ;;
	3) left_out "the dashboard by Grafana's types, which npm could not fetch" ;;
	*) failed="$failed dashboard" ;;
	esac
else
	left_out "the dashboard by Grafana's types: there is no npm"
fi
# GOVULNDB names another copy of the database: a URL, or file:///DIRECTORY.
# It reads all sources first, 17 s of processor time, so without a network it is not started.
if [ -n "${GOVULNDB:-}" ] || ! command -v curl >/dev/null || curl --fail --silent --max-time 60 --output /dev/null https://vuln.go.dev/index/db.json; then
	said=$("$out/govulncheck" ${GOVULNDB:+-db "$GOVULNDB"} ./sched/... ./plugin/... ./cdi/... 2>&1)
else
	said="fetching vulnerabilities"
	false
fi
case $?/$said in
0/*) echo "lint: govulncheck: nothing known" >&2 ;;
*"fetching vulnerabilities"*) left_out "govulncheck, which cannot reach its database (set GOVULNDB to a copy)" ;;
*)
	printf '%s\n' "$said" >&2
	failed="$failed govulncheck"
	;;
esac

test -z "$failed" || { echo "lint: found by:$failed" >&2; exit 1; }
