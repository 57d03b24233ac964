// SPDX-License-Identifier: Apache-2.0

// Package overlap runs the MPS control daemons of overlap groups, one for each group and
// GPU. It promises:
//
//   - Nothing exists while no group is wanted: no process, no directory. A group that is
//     not wanted any more ends after a moment, with its servers and its directory.
//   - A daemon that has ended is started again, after a pause that doubles up to a minute.
//     Every start and every command to a daemon ends after Patience.
//   - Daemons outlive the scheduler, so that members work on while it restarts. The next
//     scheduler takes them over by the record that each has below its directory, or ends
//     them. A record is written before the daemon runs.
//   - What members may write is only in the directories pipe and shm, which belong to
//     their user. Nothing that they write there is followed or believed.
package overlap
