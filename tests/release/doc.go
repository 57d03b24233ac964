// SPDX-License-Identifier: Apache-2.0

// Package release tests what make release makes, for amd64 and arm64 where the machine has
// a cross compiler: two builds for this machine's architecture have the same bytes, and the checksums,
// the lists of parts and the programs are right. Each kind of package for this machine's architecture installs
// nvshare and removes it again; programs for arm64 run in an emulator. Run it with make
// test-release, as root.
package release
