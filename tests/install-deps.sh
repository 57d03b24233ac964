#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: install-deps.sh demo|test|lint
# Installs the missing Debian or Ubuntu packages that make demo, test or lint needs, after
# it has said which and why. It changes nothing else, and downloads only packages from
# apt.
set -eu

goal=${1:?usage: install-deps.sh demo|test|lint}

required=
optional=
report=
# need PACKAGE REASON CHECK...: PACKAGE is missing unless CHECK succeeds.
need() {
	missing "$@" || required="$required $package"
}
# want is the same as need, for a package that can be left out.
want() {
	missing "$@" || optional="$optional $package"
}
missing() {
	package=$1 reason=$2
	shift 2
	"$@" >/dev/null 2>&1 || {
		report="$report  $package: $reason
"
		return 1
	}
}
program() { command -v "$1" || test -x "/usr/sbin/$1"; }
# installed FILE: below the directory of an architecture's libraries
installed() { for file in /usr/lib/*/"$1"; do test -e "$file" && return; done; }
# library COMPILER NAME: the compiler finds it
library() { path=$("$1" -print-file-name="$2") && test "$path" != "$2"; }

# Go is not installed from apt, because distributions have old versions. Go 1.21 or later
# downloads the version that go.mod names.
if ! said=$(cd "$(dirname "$0")/tools" && "${GO:-go}" list -m 2>&1); then
	printf '%s\n' "$said" >&2
	echo "Go is missing or too old: install the current one (https://go.dev/dl), then try again" >&2
	exit 1
fi
need gcc "compiles the shim and the simulated GPU" program gcc
need make "runs the build" program make
need libc6-dev "headers, and the static C library for runc" library gcc libc.a
need libseccomp-dev "runc is built with seccomp, statically" library gcc libseccomp.a
need pkg-config "finds libseccomp for runc" program pkg-config
need mount "mounts inside the throw-away node" program mount
want podman "the demo's third tenant and the podman tests; left out without it" program podman
if [ "$goal" = lint ]; then
	required=
	optional=
	report=
fi
if [ "$goal" != demo ]; then
	want shellcheck "checks shell scripts; left out without it" program shellcheck
	want cppcheck "checks the shim; left out without it" program cppcheck
	want clang-tidy "checks the shim; left out without it" program clang-tidy
fi
if [ "$goal" = test ]; then
	arm64=aarch64-linux-gnu-gcc
	want gcc-aarch64-linux-gnu "the shim's arm64 build; left out without it" program $arm64
	want libc6-dev-arm64-cross "the C library for that build" library $arm64 libc.so
	want qemu-user "runs the arm64 build's tests; left out without it" program qemu-aarch64
	want musl-tools "programs with another C library than glibc; left out without it" program musl-gcc
	want strace "compares programs' system calls with and without the shim" program strace
	need iproute2 "addresses of the Kubernetes node" program ip
	want rpm "installs the rpm of the release; left out without it" program rpm
	want python3 "the shim in a Python program; left out without it" program python3
	want valgrind "counts the instructions that the shim adds; left out without it" program valgrind
	want spin "checks the model of grants and restarts; left out without it" program spin
	want chromium "sees the page of nvsharectl web; left out without it" program chromium
	want bash-completion "nvsharectl's completion in bash; left out without it" test -e /usr/share/bash-completion/bash_completion
	want zsh "the same in zsh; left out without it" program zsh
	want fish "the same in fish; left out without it" program fish
	# Libraries that people preload beside the shim.
	want libjemalloc2 "beside the shim; left out without it" installed libjemalloc.so.2
	want libtcmalloc-minimal4 "beside the shim; left out without it" installed libtcmalloc_minimal.so.4
	want libeatmydata1 "beside the shim; left out without it" installed libeatmydata.so
	want faketime "beside the shim; left out without it" installed faketime/libfaketime.so.1
fi

if [ -z "$required$optional" ]; then
	exit 0
fi
echo "make $goal needs these packages, which are missing:" >&2
printf '%s' "$report" >&2
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
	echo "install them as root: apt-get install --no-install-recommends$required$optional" >&2
	test -z "$required"
	exit
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1
# Waits for another apt-get: a fresh machine updates itself.
apt() { apt-get -y -qq -o DPkg::Lock::Timeout=300 "$@" </dev/null >>"$log" 2>&1; }
# The package lists may be missing (fresh images have none) or old.
install() { apt install --no-install-recommends "$@" || { apt update && apt install --no-install-recommends "$@"; }; }

echo "installing them with apt-get" >&2
# shellcheck disable=SC2086 # lists of words
if install $required $optional; then
	exit 0
fi
# shellcheck disable=SC2086
if [ -n "$required" ] && ! install $required; then
	cat "$log" >&2
	echo "apt-get could not install$required (its output is above): install them another way, then try again" >&2
	exit 1
fi
for package in $optional; do
	install "$package" || {
		tail -n 3 "$log" >&2
		echo "apt-get could not install $package: going on without it" >&2
	}
done
