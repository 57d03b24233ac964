// SPDX-License-Identifier: Apache-2.0

// Package peer says which process is at the other end of a connection, and proves when it is dead.
//
// What it guarantees:
//
//   - Every answer comes from the kernel: SO_PEERCRED, a pidfd, /proc and the cgroup file system.
//   - A process whose files in /proc the scheduler may not read is ErrHidden, and not taken for dead.
//     A pid alone names nobody; only the pidfd proves death.
//   - A process belongs to a container only if the cgroup directory that names the container belongs
//     to root. One below a directory of a user counts to that user, whatever its own user is.
//   - A user is one account as each of the numbers that it can make itself (/etc/subuid). A process in a
//     user namespace counts to who made the outermost one. Where the kernel does not say who that is, as
//     without CAP_SYS_PTRACE, a subordinate number counts to its user, and another process there to the
//     user of its session (user-<uid>.slice). Without all three, subordinate numbers are users.
//   - Where the scheduler cannot see the host's cgroup directories, only those below systemd's
//     user@<uid>.service are known to be a user's.
package peer
