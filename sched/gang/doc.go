// SPDX-License-Identifier: Apache-2.0

// Package gang says when the gangs of a node have their turns. A gang is processes that work as
// one, such as the ranks of a job, on one GPU or several. Ranks wait for each other on the GPU, in
// collectives, so a gang has all its GPUs at the same time or none. On each GPU its clients are one
// tenant. A gang is
//
//	resting    no client of it waits
//	wanted     a client waits. Where its turn has come on a GPU the gang is due; others go on
//	called     it is due on all its GPUs, and has a ticket: it is next on each of them, before
//	           gangs with a higher ticket. Holders are revoked; a free GPU is kept for it
//	running    all GPUs are kept, and all clients are granted at once. A turn that is over on one
//	           GPU is over on all. Where a client comes on another GPU, the gang is called there
//	           and makes way at once for a lower ticket
//	stopping   all clients are revoked; the GPUs stay kept until nobody drains
//
// There is no deadlock: tickets rise, so the called gang with the lowest one is before all others on
// each of its GPUs, and waits only for gangs that run or stop, and for drains. Both end: a gang that
// runs is stopped after an eighth of a quantum, and a drain by a fence. Nobody starves: others pass a
// waiting gang only while they are behind it in virtual time, and a gang stays due.
//
// Drains may depend on each other: one rank has half of a collective in its queue, and the other half
// is a call that waits at another rank's gate. So ranks that have drained may make one call each while
// others drain (StepOne), in one order, and none once all others have drained: all stop at the same
// call. A rank whose drain was cut makes none.
//
// A GPU is idle from its own drain to the last drain on the gang's GPUs (TestGangsShare prints what
// that costs). After a restart a gang that had its turn still has it, and no other gang is called for
// a moment (gather), until it is known which GPUs each needs.
package gang
