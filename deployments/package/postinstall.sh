#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e
ldconfig # so that LD_PRELOAD=libnvshare.so finds the shim
if command -v systemd-sysusers >/dev/null; then
	systemd-sysusers nvshare.conf
fi
test -d /run/systemd/system || exit 0
systemd-tmpfiles --create nvshare.conf
systemctl daemon-reload
# After an upgrade. The socket stays: programs wait in its queue meanwhile.
systemctl try-restart nvshare-scheduler.service nvshare-warden.service nvshare-plugin.service
if ! systemctl --quiet is-enabled nvshare-scheduler.service; then
	echo "to start nvshare: systemctl enable --now nvshare-scheduler nvshare-plugin"
fi
