#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: build.sh DIR
# Builds the container programs that the demo and the tests run into DIR, at the
# versions that go.mod here pins. Does nothing if DIR has them already.
set -eu

out=${1:?usage: build.sh DIR}
go=${GO:-go}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")"

want=$(cat go.mod go.sum build.sh | cksum)
if [ "$(cat "$out/.built-from" 2>/dev/null)" = "$want" ]; then
	exit 0
fi
rm -f "$out/.built-from"
echo "building containerd, runc and crictl as pinned in tests/tools/go.mod; this takes minutes, once" >&2

# With these tags all programs share what is compiled, also with nvshare's.
CGO_ENABLED=0 $go build -trimpath -ldflags '-s -w' -tags grpcnotrace,netgo,osusergo,no_btrfs,no_zfs -o "$out/" \
	github.com/containerd/containerd/v2/cmd/containerd \
	github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2 \
	github.com/containerd/containerd/v2/cmd/ctr
CGO_ENABLED=0 $go build -trimpath -ldflags '-s -w' -tags grpcnotrace,netgo,osusergo -o "$out/" sigs.k8s.io/cri-tools/cmd/crictl
# Static, because runc starts itself again inside containers' mount namespaces.
CGO_ENABLED=1 $go build -trimpath -ldflags "-s -w -extldflags '-static'" -tags grpcnotrace,netgo,osusergo,seccomp \
	-o "$out/" github.com/opencontainers/runc

echo "$want" >"$out/.built-from"
