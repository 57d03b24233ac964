#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Installs the Debian or Ubuntu packages that make demo and make test need,
# if they are missing, after saying which and why. Nothing else is changed,
# and nothing is downloaded but packages from apt.
set -eu

missing=
report=
# need PACKAGE REASON CHECK...: PACKAGE is missing unless CHECK succeeds.
need() {
	package=$1 reason=$2
	shift 2
	if ! "$@" >/dev/null 2>&1; then
		missing="$missing $package"
		report="$report  $package: $reason
"
	fi
}
program() { command -v "$1" || test -x "/usr/sbin/$1"; }
# library NAME: the compiler finds it
library() { test "$(gcc -print-file-name="$1")" != "$1"; }

if ! command -v go >/dev/null 2>&1; then
	echo "Go is missing: install the version in go.mod or newer (https://go.dev/dl), then try again" >&2
	exit 1
fi
need gcc "compiles the shim and the simulated GPU" program gcc
need make "runs the build" program make
need libc6-dev "headers, and the static C library for runc" library libc.a
need libseccomp-dev "runc is built with seccomp, statically" library libseccomp.a
need pkg-config "finds libseccomp for runc" program pkg-config
need mount "mounts inside the throw-away node" program mount
required=$missing
need podman "the third tenant of the demo, and the podman tests (left out without it)" program podman

if [ -z "$missing" ]; then
	exit 0
fi
echo "these packages are needed and missing:" >&2
printf '%s' "$report" >&2
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
	echo "install them as root: apt-get install --no-install-recommends$missing" >&2
	test -z "$required"
	exit
fi
echo "installing them with apt-get" >&2
export DEBIAN_FRONTEND=noninteractive
# Package lists may be stale or absent (fresh images have none).
# shellcheck disable=SC2086 # a list of words
apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1 || {
	apt-get update -qq >&2
	apt-get install -y -qq --no-install-recommends $missing >&2
}
