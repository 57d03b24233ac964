#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: alone.sh COMMAND...
# Runs a command, a test, so that the machine has nothing of it, and it nothing of the machine's
# nvshare. TMPDIR is a new directory, of a short path because sockets are made there. Below it are
# NVSHARE_RUN_DIR, where no scheduler listens, and NVSHARE_SIMGPU_DIR; other settings of programs
# under nvshare are not set. However the command ends, what it has left running is ended, and the
# directory is removed. The Makefiles of C tests have this in the place of a shell.
set -u
unset LD_PRELOAD CUDA_VISIBLE_DEVICES CUDA_MPS_PIPE_DIRECTORY NVSHARE_DEBUG NVSHARE_SCHEDULER_LOSS NVSHARE_ENABLE_SINGLE_OVERSUB NVSHARE_MOVE_ALL NVSHARE_GPU \
	NVSHARE_SIMGPU NVSHARE_SIMGPU_TENANT NVSHARE_SIMGPU_DEVICES NVSHARE_SIMGPU_RM NVSHARE_SIMGPU_PEERS NVSHARE_SIMGPU_VERSION
dir=$(mktemp -d "${TEST_TMP:-/tmp}/nv.XXXXXX") || exit
chmod 755 "$dir" # for tests that run as other users
# left: the processes with this TMPDIR, in whatever session. This shell got it later than at its start.
left() { grep -lzx "TMPDIR=$dir" /proc/[0-9]*/environ 2>/dev/null | cut -d / -f 3; }
clean() {
	while pids=$(left) && [ -n "$pids" ]; do
		# shellcheck disable=SC2086 # words
		kill -KILL $pids 2>/dev/null
	done
	rm -rf --one-file-system "$dir"
}
trap clean EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
TMPDIR=$dir NVSHARE_RUN_DIR=$dir/run NVSHARE_SIMGPU_DIR=$dir/simgpu "$@"
