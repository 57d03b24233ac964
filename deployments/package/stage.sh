#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: stage.sh PROGRAMS SHIM OUT
# Puts a release together in OUT: the programs in the directory PROGRAMS, the shim, man
# pages, completions, settings, documents and licences. HERE is a directory of the same programs
# that run on this machine. The same tree and SOURCE_DATE_EPOCH give the same files.
set -eu

programs=${1:?usage: stage.sh PROGRAMS SHIM OUT} shim=${2:?} out=${3:?}
cd "$(dirname "$0")/../.."

rm -rf "$out"
install -D -t "$out" "$programs/nvshare-scheduler" "$programs/nvshare-checkpoint" "$programs/nvshare-warden" "$programs/nvshare-plugin" "$programs/nvsharectl" "$programs/nvshare-cdi-hook" "$shim"
sh deployments/image/licenses.sh "$out" >"$out/THIRD_PARTY_LICENSES"
for page in README.md CHANGELOG.md LICENSE sched/*.md sched/warden/README.md plugin/README.md; do
	install -D -m 644 "$page" "$out/$page"
done
cp -R --preserve=mode deployments "$out/"
rm -r "$out/deployments/package"
for program in nvsharectl nvshare-scheduler nvshare-warden nvshare-plugin; do
	# Defaults from the environment are this machine's.
	env -i SOURCE_DATE_EPOCH="$SOURCE_DATE_EPOCH" "${HERE:-$programs}/$program" pages "$out/share"
done
chmod -R u=rwX,go=rX "$out"
find "$out" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
