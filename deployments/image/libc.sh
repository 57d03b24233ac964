#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: libc.sh ARCH [OUT]
# Prints the C compiler for ARCH. Copies that compiler's C library to OUT, at the
# paths where programs look for it.
set -eu

arch=${1:?usage: libc.sh ARCH [OUT]} out=${2:-}
case $arch in
amd64) triple=x86_64-linux-gnu loader=lib64/ld-linux-x86-64.so.2 ;;
arm64) triple=aarch64-linux-gnu loader=lib/ld-linux-aarch64.so.1 ;;
*) echo "libc.sh: $arch: nvshare is built for amd64 and arm64" >&2 && exit 2 ;;
esac
cc=gcc
if [ "$arch" != "$(${GO:-go} env GOHOSTARCH)" ]; then
	cc=$triple-gcc
fi
if ! command -v "$cc" >/dev/null; then
	echo "libc.sh: no $cc: install gcc-$(echo $triple | tr _ -) and libc6-dev-$arch-cross" >&2
	exit 1
fi
echo "$cc"
test -n "$out" || exit 0

copy() { install -D -m "$1" "$(readlink -f "$($cc -print-file-name="$2")")" "$out/$3"; }
copy 755 "$(basename $loader)" $loader
for name in libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1; do
	copy 644 $name lib/$triple/$name
done
