// SPDX-License-Identifier: Apache-2.0

// Package release tests what make release makes, for this machine's architecture: two
// builds have the same bytes, and each kind of package installs nvshare and removes it
// again. Run it with make test-release, as root.
package release
