#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: licenses.sh DIRECTORY
# Prints the licences and notices of the other projects whose code is in the programs in
# DIRECTORY: of each Go module, as the Go linker noted it, and of Go itself. Fails on a module
# that has none.
set -eu

programs=$(cd "${1:?usage: licenses.sh DIRECTORY}" && pwd)
go=${GO:-go}
cd "$(dirname "$0")/../.."

# part NAME DIRECTORY: the texts of one project
part() {
	texts=$(find "$2" -maxdepth 1 -type f \( -iname 'licen[sc]e*' -o -iname 'copying*' -o -iname 'notice*' \) | LC_ALL=C sort)
	test -n "$texts" || { echo "licenses.sh: $1 has no licence in $2" >&2; exit 1; }
	printf '%s\n' "$texts" | while read -r text; do
		printf '================ %s: %s\n\n' "$1" "$(basename "$text")"
		cat "$text"
		echo
	done
}

own=$($go env GOROOT)
test -f "$own/LICENSE" || own=$($go list -m -f '{{.Dir}}' golang.org/x/sys) # some distributions' Go lacks it; the text is the same
part "Go's standard library" "$own"
$go version -m "$programs" | awk '$1 == "dep" { print $2 " " $3 }' | LC_ALL=C sort -u | while read -r module version; do
	part "$module $version" "$($go list -m -f '{{.Dir}}' "$module")"
done
