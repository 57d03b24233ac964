#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: stage.sh PROGRAMS SHIM OUT
# Puts a release together in OUT: the programs in the directory PROGRAMS, the shim, man
# pages, completions, settings and pages. NVSHARECTL is an nvsharectl that runs here. The
# same tree and SOURCE_DATE_EPOCH give the same files.
set -eu

programs=${1:?usage: stage.sh PROGRAMS SHIM OUT} shim=${2:?} out=${3:?}
cd "$(dirname "$0")/../.."

rm -rf "$out"
install -D -t "$out" "$programs/nvshare-scheduler" "$programs/nvshare-checkpoint" "$programs/nvshare-plugin" "$programs/nvsharectl" "$programs/nvshare-cdi-hook" "$shim"
for page in README.md CHANGELOG.md LICENSE sched/README.md sched/metrics.md plugin/README.md; do
	install -D -m 644 "$page" "$out/$page"
done
cp -R --preserve=mode deployments "$out/"
rm -r "$out/deployments/package"
NVSHARE_RUN_DIR='' NVSHARE_SIMGPU='' "${NVSHARECTL:-$programs/nvsharectl}" pages "$out/share"
chmod -R u=rwX,go=rX "$out"
find "$out" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
