#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e
# dpkg says remove, rpm says how many versions stay. An upgrade stops nothing.
case $1 in remove | 0) ;; *) exit 0 ;; esac
if test -d /run/systemd/system; then
	systemctl disable --now nvshare-plugin.service nvshare-scheduler.service nvshare-scheduler.socket nvshare-warden.service
fi
# Shim, hook and CDI specs, which no package manager knows. It refuses while a scheduler runs.
nvsharectl uninstall --placed --prefix /usr
