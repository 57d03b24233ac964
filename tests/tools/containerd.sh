#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: containerd.sh VERSION DIR
# Builds containerd VERSION (1.7) and its shim into DIR. Does nothing if DIR has
# them already.
set -eu

version=${1:?usage: containerd.sh VERSION DIR} out=${2:?usage: containerd.sh VERSION DIR}
go=${GO:-go}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/containerd-$version"

want=$(cat go.mod go.sum ../containerd.sh | cksum)
if [ "$(cat "$out/.built-from" 2>/dev/null)" = "$want" ]; then
	exit 0
fi
rm -f "$out/.built-from"
echo "building containerd as pinned in tests/tools/containerd-$version/go.mod; this takes minutes, once" >&2

module=github.com/containerd/containerd
CGO_ENABLED=0 $go build -trimpath -ldflags '-s -w' -tags no_btrfs,no_zfs -o "$out/" \
	"$module/cmd/containerd" "$module/cmd/containerd-shim-runc-v2"

echo "$want" >"$out/.built-from"
