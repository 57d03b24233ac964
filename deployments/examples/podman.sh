#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: podman.sh IMAGE [PROGRAM [ARGUMENT...]]
# Runs a program on GPU 0 of this host, in turn with everybody else there.
#
# Needs: podman 4.1 or later, 4.3 and 5.x are tested; nothing to configure. It
# reads /etc/cdi and /var/run/cdi, without root too; of podman 5.5 see
# --cdi-spec-dir for other places. With SELinux add --security-opt label=disable.
# The shim takes the place of an LD_PRELOAD of the image.
set -eu
image=${1:?usage: podman.sh IMAGE [PROGRAM [ARGUMENT...]]}
shift
exec podman run --rm --device nvshare.com/gpu=0 "$image" "$@"
