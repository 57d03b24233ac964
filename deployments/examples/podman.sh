#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: podman.sh IMAGE [PROGRAM [ARGUMENT...]]
# Runs a program on GPU 0 of this host, in turn with the GPU's other tenants.
#
# Needs podman 4.1 or later (4.3 and 5.x are tested), and no configuration. podman
# reads /etc/cdi and /var/run/cdi, also without root; podman 5.5 and later read other
# directories with --cdi-spec-dir. With SELinux add --security-opt label=disable. The
# shim replaces an LD_PRELOAD of the image.
set -eu
image=${1:?usage: podman.sh IMAGE [PROGRAM [ARGUMENT...]]}
shift
exec podman run --rm --device nvshare.com/gpu=0 "$image" "$@"
