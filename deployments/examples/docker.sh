#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: docker.sh IMAGE [PROGRAM [ARGUMENT...]]
# Runs a program on GPU 0 of this host, in turn with the GPU's other tenants.
#
# Needs Docker 28.2 or later, or Docker 25 or later with the settings of
# deployments/docker/daemon.json in /etc/docker/daemon.json. Docker reads /etc/cdi and
# /var/run/cdi. Do not use --gpus, which is NVIDIA's. The shim replaces an LD_PRELOAD of
# the image.
set -eu
image=${1:?usage: docker.sh IMAGE [PROGRAM [ARGUMENT...]]}
shift
exec docker run --rm --device nvshare.com/gpu=0 "$image" "$@"
