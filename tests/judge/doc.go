// SPDX-License-Identifier: Apache-2.0

// Package judge says from a record of GPU work who ran when, and whether two
// processes ever had a GPU at the same time.
//
// It is independent of nvshare. Its evidence is what the GPU did: the simulated GPU's own
// log (ReadLog), or the start and end stamps that cuda-busy --record takes on the device
// (ReadRecords). The verdict is a pure function of this evidence (Judge, Regrant).
//
// A process occupies a GPU from the submission of a piece of work to the work's end, or
// to the death of the process. Two processes that occupy a GPU at the same time overlap,
// which never happens under exclusive grants. Record files have no submissions, so there
// a piece of work occupies the GPU from its start to its end.
//
// Times are nanoseconds of CLOCK_MONOTONIC for the log, and of the GPU's
// global timer for record files of a real GPU.
package judge
