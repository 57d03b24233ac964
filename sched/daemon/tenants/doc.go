// SPDX-License-Identifier: Apache-2.0

// Package tenants has what containers and users may have of GPUs, and are promised, in shares.json;
// and who containers are whose engines do not tell when they end.
//
// What it guarantees:
//
//   - A term that somebody has set goes before that of an annotation, and one for a GPU before one for
//     all.
//   - No more than 100 % of a GPU is promised, unless pods came while nobody could refuse them.
//   - What root sets is recorded before it is in force. What an engine says is in force at once, and
//     recorded a little later.
//   - The rules of the command line hold for pods, whoever describes them.
//   - A container that an OCI hook has described is forgotten at the death of its first process.
package tenants
