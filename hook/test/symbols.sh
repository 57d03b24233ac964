#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What the built shim needs and exports: symbols.sh LIBRARY... nanosleep is not among it: a
# program's thread that is cancelled would end there, inside a call of the driver.
set -eu
here=$(dirname "$0")
hook=$here/..
both="__cxa_atexit __errno_location clock_gettime close connect dl_iterate_phdr __environ environ fcntl getauxval getpid lseek memcmp memcpy memmem memmove memset mmap mremap munmap ppoll prctl
pthread_mutex_lock pthread_mutex_unlock pthread_setcancelstate sched_yield secure_getenv shutdown
snprintf socket strcmp strcspn strerror strlen strncmp strrchr strspn strstr syscall vsnprintf write"
both=$(echo $both)
for lib; do
	# glibc 2.17 must be enough.
	newest=$(readelf -W -V "$lib" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
	[ "$(printf '%s\nGLIBC_2.17\n' "$newest" | sort -V | tail -1)" = GLIBC_2.17 ] || {
		echo "$lib needs $newest:" >&2
		readelf -W --dyn-syms "$lib" | grep "$newest" >&2
		exit 1
	}
	# An image may have no other library of glibc's.
	needs=$(readelf -d "$lib" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p')
	[ "$needs" = libc.so.6 ] || {
		echo "$lib needs" $needs >&2
		exit 1
	}
	# A program that musl loads must not fail for a name that only glibc has. Add
	# what both have; declare the rest weak.
	for name in $(readelf -W --dyn-syms "$lib" | awk '$7 == "UND" && $5 == "GLOBAL" { print $8 }'); do
		case " $both " in
		*" ${name%%@*} "*) ;;
		*)
			echo "$lib needs ${name%%@*}, which musl may not have" >&2
			exit 1
			;;
		esac
	done
	# Exactly the interposed names are exported, and those without a version.
	names() { # the table, expanded
		printf '#include "%s/cuda/symbols.h"\n%s\n%s\n' "$hook" \
			'#define G(name, P, A, key) @name' '#define H(name) @name' |
			cat - "$here/names.txt" | ${CC:-gcc} -E -P -iquote "$hook/os" -iquote "$hook/core" -iquote "$hook/memory" - | tr -s ' ;' '\n' |
			sed -n 's/^@//p'
		printf 'dlsym\ndlvsym\nioctl\n'
	}
	readelf -W --dyn-syms "$lib" | awk '$7 != "UND" && $5 == "GLOBAL" { print $8 }' | sort >"$lib.exports"
	names | sort >"$lib.table"
	diff -u "$lib.table" "$lib.exports" >&2 || {
		echo "$lib: exports (+) differ from symbols.h (-)" >&2
		exit 1
	}
	rm -f "$lib.exports" "$lib.table"
	echo "symbols: $lib: $newest is enough"
done
