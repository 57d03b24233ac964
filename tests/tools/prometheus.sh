#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: prometheus.sh DIR
# Unpacks Debian's or Ubuntu's package of Prometheus, with its promtool, into DIR. It is
# not installed: an installed one starts a server on the machine, now and at each boot.
# Does nothing if DIR has it, or the machine. Without the package the tests that need it
# are left out, and say so.
set -eu

out=${1:?usage: prometheus.sh DIR}
if [ -x "$out/usr/bin/prometheus" ] || command -v prometheus >/dev/null || ! command -v apt-get >/dev/null; then
	exit 0
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cd "$dir"
echo "unpacking the package prometheus into $out, for the tests of the dashboard and the alerts" >&2
# apt-get fetches it as a user of its own.
chmod 755 .
apt-get download -qq prometheus >log 2>&1 || {
	apt-get update -qq >>log 2>&1
	apt-get download -qq prometheus >>log 2>&1
} || {
	cat log >&2
	echo "apt-get could not fetch prometheus (its output is above): the tests of the dashboard and the alerts are left out" >&2
	exit 0
}
mkdir -p "$out"
dpkg -x prometheus_*.deb "$out"
