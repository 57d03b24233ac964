#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: nerdctl.sh IMAGE [PROGRAM [ARGUMENT...]]
# Runs a program on GPU 0 of this host, in turn with the GPU's other tenants.
#
# Needs nerdctl 2.1 or later. nerdctl reads /etc/cdi and /var/run/cdi; without root it
# reads only $XDG_CONFIG_HOME/cdi and $XDG_RUNTIME_DIR/cdi. Then first run
#   nvsharectl cdi generate --user
# or name the host's directories as in deployments/nerdctl/nerdctl.toml. Do not use
# --gpus, which knows other vendors' devices only. The shim replaces an LD_PRELOAD of
# the image.
set -eu
image=${1:?usage: nerdctl.sh IMAGE [PROGRAM [ARGUMENT...]]}
shift
exec nerdctl run --rm --device nvshare.com/gpu=0 "$image" "$@"
