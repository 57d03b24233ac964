#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: images.sh DIRECTORY SUITE ARCHITECTURE PACKAGE...
# Unpacks packages of a Debian release, and all that they depend on, into DIRECTORY, as
# a root file system. Maintainer scripts do not run, and this machine's package state is
# not changed. Packages come from this machine's own source, with component non-free.
# Exit status 3: this machine has no Debian source.
set -eu
root=$1 suite=$2 arch=$3
shift 3
export LC_ALL=C
keys=/usr/share/keyrings/debian-archive-keyring.gpg
site=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
	awk '$1 == "Debian" && $2 !~ /security/ { print $2; exit }')
if [ -z "$site" ] || [ ! -e "$keys" ]; then
	echo "no Debian source is configured here" >&2
	exit 3
fi
apt=$root.apt
rm -rf "$root" "$root.tmp"
mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$root.tmp"
: >"$apt/status"
echo "deb [signed-by=$keys] $site $suite main non-free" >"$apt/sources.list"
get() {
	apt-get -y -qq -o Dir::Etc::sourcelist="$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null \
		-o Dir::Etc::parts=/dev/null -o Dir::Etc::preferencesparts=/dev/null \
		-o Dir::State="$apt/state" -o Dir::State::status="$apt/status" -o Dir::Cache="$apt/cache" \
		-o APT::Architecture="$arch" -o APT::Architectures="$arch" -o Acquire::Languages=none \
		-o APT::Install-Recommends=false -o APT::Sandbox::User=root -o Acquire::Check-Valid-Until=false \
		-o Debug::NoLocking=1 "$@"
}
get update
case $1 in
--only)
	# Without dependencies.
	shift
	(cd "$apt/cache/archives" && get download "$@")
	;;
*) get install --download-only "$@" ;;
esac
# Newer releases have a merged /usr, with which older ones work too.
for dir in bin sbin lib lib32 lib64; do
	mkdir -p "$root.tmp/usr/$dir"
	ln -s "usr/$dir" "$root.tmp/$dir"
done
for deb in "$apt"/cache/archives/*.deb; do
	dpkg-deb --fsys-tarfile "$deb" |
		tar -x -C "$root.tmp" --keep-directory-symlink --no-same-owner --warning=no-timestamp --exclude=./dev
done
# Links become relative, so that a compiler outside can follow them.
find "$root.tmp/usr/lib" "$root.tmp/usr/lib64" -type l -lname '/*' | while read -r link; do
	ln -sfrn "$root.tmp$(readlink "$link")" "$link"
done
mv "$root.tmp" "$root"
rm -rf "$apt"
