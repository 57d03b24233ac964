#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: ctr.sh IMAGE PROGRAM [ARGUMENT...]
# Runs a program on GPU 0 of this host, in turn with the GPU's other tenants.
#
# Needs containerd 1.7 or later and its ctr. ctr itself reads /etc/cdi and
# /var/run/cdi, whatever containerd's settings of CDI and NRI are. The shim replaces
# an LD_PRELOAD of the image.
set -eu
image=${1:?usage: ctr.sh IMAGE PROGRAM [ARGUMENT...]}
shift
exec ctr run --rm --device nvshare.com/gpu=0 "$image" "nvshare-example-$$" "$@"
