// SPDX-License-Identifier: Apache-2.0

// Package manual writes the man pages of a program from its cobra commands. The same tree,
// environment and SOURCE_DATE_EPOCH give the same bytes.
package manual
