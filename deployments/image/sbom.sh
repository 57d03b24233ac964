#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: sbom.sh ROOT
# Prints a list of parts in SPDX 2.3: the Go modules of the programs in ROOT/usr/bin, as
# the Go linker noted them, and the C library.
set -eu

root=${1:?usage: sbom.sh ROOT}
go=${GO:-go}
top=$(cd "$(dirname "$0")/../.." && pwd)
version=${VERSION:-$(sed -n 's/^## \[\([0-9][^]]*\)\].*/\1/p' "$top/CHANGELOG.md" | head -n 1)}
libc=$(strings -a "$root"/lib/*/libc.so.6 2>/dev/null | sed -n 's/^GNU C Library (\(.* \)\{0,1\}\([^ ]*\)) stable release version.*/\2/p' | head -n 1)
sums=$(cd "$root" && find usr/bin usr/lib lib lib64 -type f 2>/dev/null | sort | xargs sha256sum)
# Two documents may not have the same name space: those of two architectures differ.
space=https://github.com/nvshare/nvshare/sbom/$version-$(echo "$sums" | sha256sum | cut -c1-16)
# The date is the last commit's, or the epoch's, so that the same tree gives the same list.
date=$(date -u -d "@${SOURCE_DATE_EPOCH:-$(git -C "$top" log -1 --format=%ct 2>/dev/null || echo 0)}" +%Y-%m-%dT%H:%M:%SZ)

$go version -m "$root"/usr/bin/* | awk -v version="$version" -v libc="$libc" -v date="$date" -v sums="$sums" -v space="$space" '
function package(id, name, version, purl,   more) {
	more = purl == "" ? "" : sprintf(", \"externalRefs\": [{\"referenceCategory\": \"PACKAGE-MANAGER\", \"referenceType\": \"purl\", \"referenceLocator\": \"%s\"}]", purl)
	packages = packages sprintf("%s\n    {\"SPDXID\": \"SPDXRef-%s\", \"name\": \"%s\", \"versionInfo\": \"%s\", \"downloadLocation\": \"NOASSERTION\", \"filesAnalyzed\": false%s}", comma, id, name, version, more)
	relations = relations sprintf(",\n    {\"spdxElementId\": \"SPDXRef-nvshare\", \"relationshipType\": \"DEPENDS_ON\", \"relatedSpdxElement\": \"SPDXRef-%s\"}", id)
	comma = ","
}
/^[^\t].*: go[0-9]/ { go = $NF }
$1 == "dep" { if (!(($2 "@" $3) in seen)) { seen[$2 "@" $3] = 1; order[++n] = $2 " " $3 } }
END {
	for (i = 1; i <= n; i++) {
		split(order[i], m, " ")
		package("go-" i, m[1], m[2], "pkg:golang/" m[1] "@" m[2])
	}
	package("go-std", "stdlib", substr(go, 3), "pkg:golang/stdlib@" substr(go, 3))
	if (libc != "") package("libc", "glibc", libc, "")
	count = split(sums, line, "\n")
	for (i = 1; i <= count; i++) {
		split(line[i], f, "  ")
		files = files sprintf("%s\n    {\"SPDXID\": \"SPDXRef-file-%d\", \"fileName\": \"./%s\", \"checksums\": [{\"algorithm\": \"SHA256\", \"checksumValue\": \"%s\"}]}", i > 1 ? "," : "", i, f[2], f[1])
		contents = contents sprintf(",\n    {\"spdxElementId\": \"SPDXRef-nvshare\", \"relationshipType\": \"CONTAINS\", \"relatedSpdxElement\": \"SPDXRef-file-%d\"}", i)
	}
	printf "{\n  \"spdxVersion\": \"SPDX-2.3\", \"dataLicense\": \"CC0-1.0\", \"SPDXID\": \"SPDXRef-DOCUMENT\",\n"
	printf "  \"name\": \"nvshare-%s\", \"documentNamespace\": \"%s\",\n", version, space
	printf "  \"creationInfo\": {\"created\": \"%s\", \"creators\": [\"Tool: nvshare-sbom\"]},\n", date
	printf "  \"packages\": [\n    {\"SPDXID\": \"SPDXRef-nvshare\", \"name\": \"nvshare\", \"versionInfo\": \"%s\", \"downloadLocation\": \"NOASSERTION\", \"filesAnalyzed\": false, \"licenseDeclared\": \"Apache-2.0\"},%s\n  ],\n", version, packages
	printf "  \"files\": [%s\n  ],\n", files
	printf "  \"relationships\": [\n    {\"spdxElementId\": \"SPDXRef-DOCUMENT\", \"relationshipType\": \"DESCRIBES\", \"relatedSpdxElement\": \"SPDXRef-nvshare\"}%s%s\n  ]\n}\n", relations, contents
}'
