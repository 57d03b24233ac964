// SPDX-License-Identifier: Apache-2.0

// Package journal makes the log of a daemon. Each line goes to standard error as text; where
// that is systemd's journal, the line is an entry with a priority and fields: NVSHARE_GPU,
// NVSHARE_CLIENT, NVSHARE_PID, NVSHARE_COMMAND, NVSHARE_CONTAINER, NVSHARE_REASON. So
// journalctl NVSHARE_GPU=UUID finds the lines about one GPU.
//
// An entry whose text holds control characters cannot forge another: they are replaced. A
// line that the journal refuses goes to standard error.
package journal
