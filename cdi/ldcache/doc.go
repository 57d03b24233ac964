// SPDX-License-Identifier: Apache-2.0

// Package ldcache reads and writes the cache of the glibc dynamic linker
// (/etc/ld.so.cache), format "glibc-ld.so.cache1.1".
//
// It exists so that a container's cache can be extended without running any
// program on, or following any path of, a file system that the container's
// author controls. Parse accepts hostile input: it returns an error or a cache
// of bounded size, and never panics. Every dynamic linker since glibc 2.2
// reads what Bytes writes.
package ldcache
