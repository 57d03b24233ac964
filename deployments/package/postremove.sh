#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
set -e
case $1 in remove | 0) ;; *) exit 0 ;; esac
ldconfig
test ! -d /run/systemd/system || systemctl daemon-reload
