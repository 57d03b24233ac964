#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Prolog, Epilog and TaskProlog of Slurm, in one file. A job with --gres=shard:N has N parts of its
# GPU's memory at most, and the same part of its time whenever it wants it; each job is a tenant.
# ../recipes/slurm.md has the settings of Slurm that it needs.
set -eu
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# Of this node: how many shards a GPU has, and what memory a shard is.
shards_of_gpu=4
mib_of_shard=19456
shim=/usr/local/lib/libnvshare.so # of a package: /usr/lib/libnvshare.so
# shellcheck source=/dev/null
if [ -r /etc/slurm/nvshare.conf ]; then . /etc/slurm/nvshare.conf; fi

case $SLURM_SCRIPT_CONTEXT in
prolog_slurmd) # root, before the job; a failure has Slurm drain the node and start the job elsewhere
	test -n "${SLURM_JOB_GPUS-}" || exit 0
	gres=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%b) # gres/shard:2, gres/shard:h100:2, gres/shard
	case $gres in
	*shard*) shards=$(printf '%s\n' "$gres" | sed -n 's/.*shard:\([^,:]*:\)\{0,1\}\([0-9][0-9]*\).*/\2/p') ;;
	*) exit 0 ;; # the whole GPU
	esac
	shards=${shards:-1}
	nvsharectl describe "job_$SLURM_JOB_ID" --engine slurm --name "$SLURM_JOB_USER-$SLURM_JOB_ID" --gpu "$SLURM_JOB_GPUS" \
		--memory-limit "$((shards * mib_of_shard))Mi" --core-request "$((100 * shards / shards_of_gpu))"
	;;
prolog_task) # the job's user; Slurm puts what it prints into the environment of the program
	test -z "${CUDA_VISIBLE_DEVICES-}" || echo "export LD_PRELOAD=$shim${LD_PRELOAD:+:$LD_PRELOAD}"
	;;
epilog_slurmd) # root
	nvsharectl describe "job_$SLURM_JOB_ID" --end || : # it is not worth draining the node
	;;
esac
