// SPDX-License-Identifier: Apache-2.0

// Package judge says from a record of GPU work who ran when, and whether two
// processes ever had a GPU at the same time.
//
// It is independent of nvshare: its evidence is what the GPU did, either the
// simulated GPU's own log (ReadLog) or the start and end stamps that
// cuda-busy --record takes on the device (ReadRecords). The verdict is a pure
// function of that evidence (Judge, Regrant).
//
// A process occupies a GPU from the submission of a piece of work to its end,
// cut off at the death of the process. Two processes that occupy a GPU at the
// same time overlap; under exclusive grants that never happens. Record files
// hold no submissions: there a piece of work occupies from start to end.
//
// Times are nanoseconds of CLOCK_MONOTONIC for the log, and of the GPU's
// global timer for record files of a real GPU.
package judge
