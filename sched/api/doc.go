// SPDX-License-Identifier: Apache-2.0

// Package api is the control API of nvshare-scheduler: the messages and the
// ttrpc service of control.proto, and Dial to reach a running scheduler.
//
// control.sock is for root and the members of --control-group. status.sock answers everybody, with
// what they may know. Fields are only ever added, so a client of another version works.
//
// control.pb.go and control_ttrpc.pb.go are generated; `make -C sched/api
// generate` reproduces them and says with which versions.
package api
