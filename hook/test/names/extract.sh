#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Lists what a CUDA header declares: extract.sh CUDA.H [HEADER...] >cuda-VERSION.txt
#
# A line is the name of an export and the size of each parameter as the ABI
# passes it: 1, 2, 4, 8 an integer or pointer, f4 a float, s8 a struct by value.
# Further headers (cudaGL.h, cudaEGL.h, cudaVDPAU.h, cudaProfiler.h) are taken
# along; what they include of OpenGL, EGL and VDPAU need not be installed.
set -eu
header=$1
version=$(sed -n 's/^#define CUDA_VERSION \([0-9]*\).*/\1/p' "$header" | head -1)
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir "$tmp/GL" "$tmp/EGL" "$tmp/vdpau"
echo 'typedef unsigned int GLuint, GLenum;' >"$tmp/GL/gl.h"
echo 'typedef void *EGLImageKHR, *EGLStreamKHR, *EGLSyncKHR, *EGLDisplay; typedef int EGLint;' \
	>"$tmp/EGL/egl.h"
: >"$tmp/EGL/eglext.h"
printf '%s\n' '#include <stdint.h>' 'typedef uint32_t VdpDevice, VdpVideoSurface, VdpOutputSurface;' \
	'typedef int VdpGetProcAddress(VdpDevice, uint32_t, void **);' >"$tmp/vdpau/vdpau.h"

cat >"$tmp/sizes.h" <<'END'
#include <cstddef>
#include <cstdio>
#include <type_traits>
template <class T> void parameter()
{
	std::printf(" %s%zu", std::is_floating_point<T>::value ? "f" :
		std::is_class<T>::value ? "s" : "", sizeof(T));
}
template <class> struct prototype;
template <class R, class... A> struct prototype<R(A...)> {
	static void print(const char *name)
	{
		int all[] = { (std::fputs(name, stdout), 0), (parameter<A>(), 0)... };
		(void)all;
		std::puts("");
	}
};
END
# As an application sees the names, and as the driver itself does: all there
# ever were, those of the per-thread default stream among them.
for view in '' -D__CUDA_API_VERSION_INTERNAL; do
	{
		printf '#include <%s>\n' GL/gl.h EGL/egl.h vdpau/vdpau.h
		for h; do
			echo "#include \"$(realpath "$h")\""
		done
	} >"$tmp/all.h"
	${CXX:-g++} $view -E -P -x c++ -I "$tmp" -I "$(dirname "$header")" "$tmp/all.h" | tr '\n' ' ' |
		grep -oE 'CUresult +cu[A-Z][A-Za-z0-9_]* *\(' | sed 's/CUresult *//; s/[ (]//g' |
		sort -u >"$tmp/names"
	{
		printf '#include "sizes.h"\n#include "all.h"\n'
		sed 's/^/#undef /' "$tmp/names"
		echo 'int main() {'
		sed 's/.*/prototype<decltype(::&)>::print("&");/' "$tmp/names"
		echo '}'
	} >"$tmp/list.cc"
	${CXX:-g++} $view -std=c++11 -w -fpermissive -I "$tmp" -I "$(dirname "$header")" \
		-o "$tmp/list" "$tmp/list.cc"
	"$tmp/list"
done | sort -u >"$tmp/out"
echo "# CUDA $((version / 1000)).$((version % 1000 / 10)): $(for h; do basename "$h"; done | tr '\n' ' ' |
	sed 's/ $//; s/ /, /g')"
cat "$tmp/out"
