// SPDX-License-Identifier: Apache-2.0

package node

// Failpoint names a place in the loop at which tests end the daemon, as SIGKILL
// would. Outside tests it costs one comparison with nil.
type Failpoint string

// Where they are: around all that leaves the daemon or that a restart depends
// on. "in" is between the two halves of something: the page and the frame, or
// writing the state file and putting it in its place.
const (
	AtFrame        Failpoint = "a frame was received, and nothing done about it"
	AtDecided      Failpoint = "the core has decided, nothing is carried out"
	BeforePersist  Failpoint = "before the state file is written"
	InPersist      Failpoint = "the state file is written, but not in its place"
	AfterPersist   Failpoint = "the state file is in its place"
	BeforeGrant    Failpoint = "before the gate opens"
	InGrant        Failpoint = "the gate is open, GRANT is not sent"
	AfterGrant     Failpoint = "GRANT is sent"
	BeforeRevoke   Failpoint = "before the gate is shut"
	InRevoke       Failpoint = "the gate is shut, REVOKE is not sent"
	AfterRevoke    Failpoint = "REVOKE is sent"
	BeforeClose    Failpoint = "before the gate of an early release is shut"
	AfterClose     Failpoint = "the gate of an early release is shut"
	BeforeAdopt    Failpoint = "before the gate of a holder that is back opens"
	AfterAdopt     Failpoint = "the gate of a holder that is back is open"
	BeforeAttached Failpoint = "before ATTACHED is sent"
	AfterAttached  Failpoint = "ATTACHED is sent"
	BeforePause    Failpoint = "before the gate is shut for a latency tenant"
	AfterPause     Failpoint = "the gate is shut for a latency tenant"
	BeforeResume   Failpoint = "before the gate opens again after a latency tenant"
	AfterResume    Failpoint = "the gate is open again after a latency tenant"
	AfterReleased  Failpoint = "a grant has ended"
	BeforeFence    Failpoint = "before a fence is acted on"
	AfterFence     Failpoint = "a fence is acted on"
	BeforeNotice   Failpoint = "before the page says who waits"
	AfterNotice    Failpoint = "the page says who waits"
	BeforeWelcome  Failpoint = "before WELCOME is sent"
	AfterWelcome   Failpoint = "WELCOME is sent"
	BeforeReserved Failpoint = "memory is accounted for, RESERVED is not sent"
	AfterReserved  Failpoint = "RESERVED is sent"
	BeforeBury     Failpoint = "a process has died, its grant is not reclaimed"
	AfterBury      Failpoint = "a dead process is forgotten"
	BeforeRestore  Failpoint = "an earlier holder is found, the core does not know"
	AfterRestore   Failpoint = "the core knows an earlier holder"
	AtMoved        Failpoint = "a report of moved memory has come, nothing is done about it"
	BeforeRoom     Failpoint = "before the page says how much room there is"
	InRoom         Failpoint = "the page says how much room there is, ROOM is not sent"
	AfterRoom      Failpoint = "ROOM is sent"
	BeforeArena    Failpoint = "a segment of the arena is made and not sent"
	AfterArena     Failpoint = "a segment of the arena is sent"
	AfterLost      Failpoint = "a connection is lost, and the core knows"

	BeforeCheckpoint Failpoint = "a process is ready to be checkpointed, nobody does it yet"
	AfterCheckpoint  Failpoint = "a process is checkpointed, nothing is recorded"
	BeforeReturn     Failpoint = "before a process is restored"
	AfterReturn      Failpoint = "a process is restored, it does not know"

	BeforeFile   Failpoint = "a file is recorded, and not there yet"
	InFile       Failpoint = "memory is in a file, and nobody knows"
	AfterFile    Failpoint = "memory is in a file, its pages are not given back"
	AfterEmptied Failpoint = "the pages of what is in a file are given back"
	BeforeRead   Failpoint = "before memory is read back"
	InRead       Failpoint = "memory is read back, and the record says that it is in its file"
	AfterRead    Failpoint = "memory is read back and recorded, its file is there"
)

// Reach is called at each failpoint.
func (n *Node) Reach(p Failpoint) {
	if n.Failpoint != nil {
		n.Failpoint(p)
	}
}
