#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: build.sh DIR
# Builds the programs of a Kubernetes cluster of one node into DIR, at the versions that
# go.mod here pins. Does nothing if DIR has them already.
set -eu

out=${1:?usage: build.sh DIR}
go=${GO:-go}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")"

want=$(cat go.mod go.sum main.go build.sh | cksum)
if [ "$(cat "$out/.built-from" 2>/dev/null)" = "$want" ]; then
	exit 0
fi
rm -f "$out/.built-from"
echo "building etcd, Kubernetes, helm and CNI plugins as pinned in tests/tools/k8s/go.mod; this takes 5 to 10 minutes on two cores, once" >&2

version=$($go list -m -f '{{.Version}}' k8s.io/kubernetes)
minor=${version#v1.}
of=k8s.io/component-base/version
CGO_ENABLED=0 $go build -trimpath -o "$out/node1" -ldflags "-s -w -X $of.gitVersion=$version -X $of.gitMajor=1 -X $of.gitMinor=${minor%%.*} -X $of.gitTreeState=clean" .
for name in etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kubectl helm; do
	ln -sf node1 "$out/$name"
done
plugins=github.com/containernetworking/plugins/plugins
mkdir -p "$out/cni"
CGO_ENABLED=0 $go build -trimpath -ldflags '-s -w' -o "$out/cni/" $plugins/main/bridge $plugins/main/loopback $plugins/ipam/host-local

echo "$want" >"$out/.built-from"
