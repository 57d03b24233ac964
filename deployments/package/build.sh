#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# Usage: build.sh BUILD ARCH...      (ARCH as Go has it: amd64 or arm64)
# Makes the files of a release in BUILD/dist: for each ARCH two tarballs, a deb, an rpm
# and the list of parts; the chart, with IMAGE as its image; and the checksums of all. BUILD/image/ARCH/root and
# BUILD/static/ARCH hold the programs; the Makefile's target release builds them. The
# same tree, compilers and SOURCE_DATE_EPOCH give the same bytes. GZIP_LEVEL: of the tarballs (6).
set -eu

build=${1:?usage: build.sh BUILD ARCH...}
shift
go=${GO:-go}
here=$(cd "$(dirname "$0")" && pwd)
dist=$build/dist
umask 022

tools=$build/tools-package
want=$(cat "$here/go.mod" "$here/go.sum" | cksum)
if [ "$(cat "$tools/.built-from" 2>/dev/null)" != "$want" ]; then
	echo "building nfpm as pinned in deployments/package/go.mod" >&2
	mkdir -p "$tools"
	(cd "$here" && CGO_ENABLED=0 $go build -trimpath -ldflags '-s -w' -o "$tools/" tool)
	echo "$want" >"$tools/.built-from"
fi

# The tarball has no top directory, because users choose the directory into which they
# unpack it.
pack() {
	# shellcheck disable=SC2046 # names without spaces
	tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$SOURCE_DATE_EPOCH" -C "$1" -cf - $(ls "$1") | gzip -n "-${GZIP_LEVEL:-6}" >"$2"
}

rm -rf "$dist"
mkdir -p "$dist"
for arch; do
	name=$dist/nvshare-v$VERSION-linux-$arch
	programs=$build/image/$arch/root/usr/bin
	shim=$build/image/$arch/root/usr/lib/nvshare/libnvshare.so
	work=$build/package/$arch
	rm -rf "$work"
	mkdir -p "$work/root"
	sh "$here/stage.sh" "$build/static/$arch" "$shim" "$work/static"
	pack "$work/static" "$name-static.tar.gz"
	sh "$here/stage.sh" "$programs" "$shim" "$work/release"
	pack "$work/release" "$name.tar.gz"
	cp "$build/image/$arch/root/usr/share/nvshare/sbom.spdx.json" "$name.spdx.json"

	# The installer's own list of files is for hosts without a package manager.
	"$HERE/nvsharectl" install --from "$work/release" --prefix /usr --root "$work/root" >/dev/null
	rm "$work/root/usr/lib/nvshare/manifest"
	doc=$work/root/usr/share/doc/nvshare
	mkdir -p "$doc"
	cp -R --preserve=mode "$work/release/README.md" "$work/release/CHANGELOG.md" "$work/release/deployments" "$work/release/sched" "$work/release/plugin" "$doc/"
	cp "$work/release/LICENSE" "$doc/copyright"
	cp "$work/release/THIRD_PARTY_LICENSES" "$doc/"
	chmod -R u=rwX,go=rX "$work/root"
	cp "$here/nfpm.yaml" "$here"/*install.sh "$here"/*remove.sh "$work/"
	find "$work" -exec touch -h -d "@$SOURCE_DATE_EPOCH" {} +
	for kind in deb rpm; do
		(cd "$work" && ARCH=$arch MAINTAINER=${MAINTAINER:-nvshare <nvshare@localhost>} \
			"$tools/nfpm" package --config nfpm.yaml --packager $kind --target "$dist/" >nfpm.log) || {
			cat "$work/nfpm.log" >&2
			exit 1
		}
	done
done
work=$build/package/chart
rm -rf "$work"
mkdir -p "$work"
cp -R --preserve=mode "$here/../helm/nvshare" "$work/"
sed -i "s,localhost/nvshare,$IMAGE," "$work/nvshare/values.yaml"
chmod -R u=rwX,go=rX "$work"
pack "$work" "$dist/nvshare-$VERSION.tgz"
cd "$dist"
sha256sum -- * >SHA256SUMS
cat SHA256SUMS
