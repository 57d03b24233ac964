#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: ctr.sh IMAGE PROGRAM [ARGUMENT...]
# Runs a program on GPU 0 of this host, in turn with everybody else there.
#
# Needs: containerd 1.7 or later and its ctr, which reads /etc/cdi and
# /var/run/cdi by itself: enable_cdi is about the CRI, and NRI is not asked. The
# shim takes the place of an LD_PRELOAD of the image.
set -eu
image=${1:?usage: ctr.sh IMAGE PROGRAM [ARGUMENT...]}
shift
exec ctr run --rm --device nvshare.com/gpu=0 "$image" "nvshare-example-$$" "$@"
