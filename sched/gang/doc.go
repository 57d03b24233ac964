// SPDX-License-Identifier: Apache-2.0

// Package gang says when the gangs of a node have their turns. A gang is processes that work as one, such as the ranks of a job, on one GPU or
// several. Ranks wait for each other on the GPU, in collectives, so a rank that has
// its GPU without the other ranks only blocks that GPU. A gang has all its GPUs at the
// same time or none. On each GPU the clients of a gang are one tenant.
//
//	resting    no client of the gang waits.
//	wanted     a client waits. The gang takes its place in the order of each of its
//	           GPUs. Where its turn has come the gang is due, and others go on.
//	called     the gang is due on all its GPUs, and gets a ticket. It is next on each
//	           of them, before gangs with a higher ticket and all that are not called.
//	           Holders are revoked. A GPU that becomes free is kept for the gang. If its
//	           limit allows it no grant any more, it has to become due anew.
//	running    all GPUs are kept. All clients are granted at once, also those that ask
//	           later. When the turn is over on one GPU it is over on all. If a client
//	           comes on another GPU meanwhile, the gang is called there, and lacks that
//	           GPU. While it does, it makes way at once for a gang with a lower ticket.
//	stopping   all clients are revoked. The GPUs stay kept until nobody drains.
//
// There is no deadlock. A GPU is kept only for a gang that is called, runs or stops.
// A gang is called on all its GPUs at the same moment, and tickets rise. So, among the
// gangs that are called, the one with the lowest ticket is before all others on each
// of its GPUs, also on a GPU where it is new and that is kept for a higher ticket. It
// waits only for gangs that run or stop, and for drains. Both end. A gang that runs is
// stopped where another one is called, after an eighth of a quantum at the latest. A
// gang that stops waits for its drains only, and a drain ends by a fence if not
// otherwise. (A drain that waits for a rank that came late, on a GPU that another gang
// keeps for the same reason, ends by a fence only.) So the gang with the lowest ticket
// gets its GPUs, and then the next one.
//
// Nobody starves. Others pass a gang that waits only while they are behind it in
// virtual time, and a gang stays due. Others are not pushed aside for ever either: a
// call takes a turn of the gang on each of its GPUs, also where none of its clients
// asked.
//
// Ranks that are idle keep their grants. Beside latency tenants they give them back, because these
// do not wait for the turn to end, and have half of the time while it lasts.
//
// Drains may depend on each other: one rank has half of a collective in its queue, and
// the other half is a call that waits at the gate of another rank. So the ranks that
// have drained, and wait at the gate, may make one call each while others drain
// (StepOne). The calls of all ranks have one order, and no rank makes a call once all
// others have drained, so all ranks stop at the same call. A rank whose drain was cut makes
// none: its channels are off.
//
// The costs: a GPU is idle from its own drain to the last drain on the gang's GPUs,
// twice a turn. Jobs of two GPUs keep them busy for 84 % alone (TestGangsShare prints
// the figures). Two such jobs that take turns keep them busy for 82 % with turns of 20
// ms, and for 84 % with 100 ms. One beside a tenant on each GPU: 90 and 92 % together,
// where 92 % would be without a loss. Jobs that overlap on a part of their GPUs cost
// more: while one has its turn, the other GPUs of the others are idle. Three jobs on
// three GPUs, each on two, keep them busy for 56 %.
//
// After a restart of the caller, a gang that had its turn still has it, as Restore
// says. With MaxRecorded holders of a GPU the gang drains first, as everybody does. No
// other gang is called for a moment (gather): where the ranks of two gangs come back
// in turns, each gang would get a GPU before it is known to need the other's GPU, and
// would drain there for a rank that waits.
package gang
