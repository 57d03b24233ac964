// SPDX-License-Identifier: Apache-2.0

// Command scale places thousands of pods with parts of GPUs in a cluster of faked nodes,
// by the real kube-scheduler, API server and etcd. It measures how long that takes, what a
// pod costs, and how well the GPUs are packed, and counts what each device was promised.
// The README beside it says what is real.
package main
