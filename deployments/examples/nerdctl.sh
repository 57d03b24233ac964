#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: nerdctl.sh IMAGE [PROGRAM [ARGUMENT...]]
# Runs a program on GPU 0 of this host, in turn with everybody else there.
#
# Needs: nerdctl 2.1 or later. It reads /etc/cdi and /var/run/cdi; without root
# only $XDG_CONFIG_HOME/cdi and $XDG_RUNTIME_DIR/cdi: then first
#   nvsharectl cdi generate --user
# or name this host's directories as in deployments/nerdctl/nerdctl.toml. The
# option --gpus knows other vendors' devices only. The shim takes the place of
# an LD_PRELOAD of the image.
set -eu
image=${1:?usage: nerdctl.sh IMAGE [PROGRAM [ARGUMENT...]]}
shift
exec nerdctl run --rm --device nvshare.com/gpu=0 "$image" "$@"
