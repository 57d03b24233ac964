#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: root.sh ARCH OUT      (ARCH as Go has it: amd64 or arm64; BUILD has the shim)
# Builds the files of the node image for ARCH and puts them below OUT: nvshare's
# programs, the shim, the C library they need, and the list of all of it
# (usr/share/nvshare/sbom.spdx.json), with the licences. No shell, no package manager.
#
# The programs load NVML, which needs the C library. So they are linked with the C
# library of the machine that builds the image, and the image contains that library.
set -eu

arch=${1:?usage: root.sh ARCH OUT} out=${2:?usage: root.sh ARCH OUT}
go=${GO:-go}
top=$(cd "$(dirname "$0")/../.." && pwd)
build=${BUILD:-$top/.build}

host=$($go env GOHOSTARCH)
shim=$build/lib/libnvshare.so
if [ "$arch" = arm64 ] && [ "$host" != arm64 ]; then
	shim=$build/lib/aarch64/libnvshare.so
fi
if [ "$arch" = amd64 ] && [ "$host" != amd64 ]; then
	echo "root.sh: the shim for amd64 is built on amd64 only: make this image there" >&2
	exit 1
fi
cc=$(sh "$top/deployments/image/libc.sh" "$arch")

rm -rf "$out"
mkdir -p "$out/usr/bin" "$out/usr/lib/nvshare" "$out/usr/share/nvshare" "$out/etc" "$out/run" "$out/var" "$out/tmp" "$out/proc" "$out/sys" "$out/dev" "$out/host"
ln -s ../run "$out/var/run"
echo 'root:x:0:0:root:/:/nonexistent' >"$out/etc/passwd"
echo 'root:x:0:' >"$out/etc/group"

cd "$top"
# The same flags as in the Makefile, of which netgo and osusergo keep further libraries of
# glibc out.
tags=grpcnotrace,netgo,osusergo
CGO_ENABLED=1 GOOS=linux GOARCH=$arch CC=$cc $go build -trimpath -tags "$tags" -ldflags "${LDFLAGS:--s -w}" -o "$out/usr/bin/" \
	./sched/nvshare-scheduler ./sched/nvsharectl ./plugin/nvshare-plugin
CGO_ENABLED=0 GOOS=linux GOARCH=$arch $go build -trimpath -tags "$tags" -ldflags "${LDFLAGS:--s -w}" -o "$out/usr/bin/" ./cdi/nvshare-cdi-hook ./sched/nvshare-checkpoint ./sched/nvshare-warden
install -m 755 "$shim" "$out/usr/lib/nvshare/libnvshare.so"

sh deployments/image/libc.sh "$arch" "$out" >/dev/null
sh deployments/image/licenses.sh "$out/usr/bin" >"$out/usr/share/nvshare/THIRD_PARTY_LICENSES"
for text in /usr/share/doc/libc6/copyright /usr/share/licenses/glibc/*; do # the C library's, by the distribution
	test ! -f "$text" || cat "$text" >>"$out/usr/share/nvshare/THIRD_PARTY_LICENSES"
done
sh deployments/image/sbom.sh "$out" >"$out/usr/share/nvshare/sbom.spdx.json"
