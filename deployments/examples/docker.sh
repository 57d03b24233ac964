#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: docker.sh IMAGE [PROGRAM [ARGUMENT...]]
# Runs a program on GPU 0 of this host, in turn with everybody else there.
#
# Needs: Docker 28.2 or later; from 25 on, if deployments/docker/daemon.json is
# part of /etc/docker/daemon.json. It reads /etc/cdi and /var/run/cdi. --gpus is
# NVIDIA's and not needed. The shim takes the place of an LD_PRELOAD of the image.
set -eu
image=${1:?usage: docker.sh IMAGE [PROGRAM [ARGUMENT...]]}
shift
exec docker run --rm --device nvshare.com/gpu=0 "$image" "$@"
