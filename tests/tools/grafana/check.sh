#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: check.sh DIR
# Checks the dashboard of the chart against the types that Grafana publishes, at the
# version in package.json, which npm puts into DIR once. Status 3: npm could not.
set -eu

out=${1:?usage: check.sh DIR}
here=$(cd "$(dirname "$0")" && pwd)
dashboard=$here/../../../deployments/helm/nvshare/monitoring/dashboard.json

mkdir -p "$out"
if ! cmp -s "$here/package-lock.json" "$out/.built-from"; then
	cp "$here/package.json" "$here/package-lock.json" "$here/typed.mjs" "$out/"
	(cd "$out" && npm ci --ignore-scripts --no-audit --no-fund >npm.log 2>&1) || { tail -n 3 "$out/npm.log" >&2; exit 3; }
	cp "$here/package-lock.json" "$out/.built-from"
fi
cp "$here/typed.mjs" "$out/"
cd "$out"
understands() {
	node typed.mjs "$1" >dashboard.ts
	node_modules/.bin/tsc --noEmit --strict --skipLibCheck --module nodenext --moduleResolution nodenext --target es2022 dashboard.ts
}
understands "$dashboard"
# The check itself finds what is wrong: the name of a field, and the value of one.
for wrong in 's/"gridPos"/"gridpos"/' 's/"absolute"/"absolut"/'; do
	sed "$wrong" "$dashboard" >wrong.json
	if understands wrong.json >/dev/null; then
		echo "check.sh: the types do not find $wrong" >&2
		exit 1
	fi
done
