// SPDX-License-Identifier: Apache-2.0

// Package rundir takes the scheduler's run directory: it makes and locks the
// directory, and opens the sockets.
//
// What it guarantees:
//
//   - One scheduler has the directory at a time. The kernel drops its lock with
//     the process, so a file or socket that was left behind means nothing.
//   - Nothing is used that belongs to another user, or that everybody may replace:
//     neither the directory, nor the lock, nor the part that containers see. No link is
//     followed there.
//   - Each socket has its mode and group before anybody can connect.
//   - Close removes this process's sockets and no others. A socket that systemd made
//     stays, and keeps clients that connect until the next scheduler takes them.
//
// In the directory:
//
//	tenant/scheduler.sock  clients, mode 0666; the directory containers get
//	scheduler.sock         symbolic link to it, for programs on the host
//	tenant/status.sock     the status as each may see it, mode 0666
//	status.sock            symbolic link to it
//	control.sock           package api, mode 0600, or 0660 for a group
//	lock                   held by the running scheduler
package rundir
