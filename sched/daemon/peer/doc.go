// SPDX-License-Identifier: Apache-2.0

// Package peer says which process is at the other end of a connection, and
// proves when that process is dead.
//
// What it guarantees:
//
//   - Every answer comes from the kernel: SO_PEERCRED, a pidfd, /proc and the
//     cgroup file system. Nothing that the process sends is used.
//   - A process that lives, and whose files in /proc the scheduler may not read, is ErrHidden; it
//     is not taken for one that has ended.
//   - A pid alone names nobody: a Process also has the start time, and a Peer a
//     pidfd. Only the pidfd proves death.
//   - A process belongs to a container only if the cgroup directory that names
//     the container belongs to root. Any user can make directories, with any
//     names, in a cgroup that was delegated to that user. A process below such a
//     directory counts to the directory's owner, whatever its own user is. So
//     rootless containers of one user share that user's account.
//   - A user is one account as each of the numbers that it can make itself, with what
//     /etc/subuid gives it. A process in a user namespace of its own counts to who made the
//     outermost one. Where the kernel does not say who that is, as without CAP_SYS_PTRACE,
//     a number that is subordinate in /etc/subuid counts to its user, and another process in
//     such a namespace to the user of its session (user-<uid>.slice of systemd). So without
//     all three, as for cron jobs where the scheduler is in a container, subordinate numbers
//     are users. A namespace or a subordinate number of root's changes nothing.
//   - Where the scheduler cannot see the host's cgroup directories (in a
//     container with a cgroup namespace of its own), only directories below
//     systemd's user@<uid>.service are known to be delegated.
package peer
