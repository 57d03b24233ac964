#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: build.sh DIR LATER
# Builds Kubernetes' own programs into DIR, at the version that go.mod here pins. All else is what
# tests/tools/k8s/build.sh has made in LATER. Does nothing if DIR has them already.
set -eu

out=${1:?usage: build.sh DIR LATER}
later=${2:?usage: build.sh DIR LATER}
go=${GO:-go}
mkdir -p "$out"
out=$(cd "$out" && pwd)
later=$(cd "$later" && pwd)
cd "$(dirname "$0")"

want=$(cat go.mod go.sum main.go build.sh | cksum)
if [ "$(cat "$out/.built-from" 2>/dev/null)" = "$want" ]; then
	exit 0
fi
rm -f "$out/.built-from"
version=$($go list -m -f '{{.Version}}' k8s.io/kubernetes)
echo "building Kubernetes $version; this takes 5 to 10 minutes on two cores, once" >&2

minor=${version#v1.}
of=k8s.io/component-base/version
CGO_ENABLED=0 $go build -trimpath -o "$out/kubernetes" -ldflags "-s -w -X $of.gitVersion=$version -X $of.gitMajor=1 -X $of.gitMinor=${minor%%.*} -X $of.gitTreeState=clean" .
for name in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
	ln -sf kubernetes "$out/$name"
done
for name in etcd kubectl helm cni; do
	ln -sfn "$later/$name" "$out/$name"
done

echo "$want" >"$out/.built-from"
