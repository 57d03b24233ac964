// SPDX-License-Identifier: Apache-2.0

package daemon

// failpoint names a place in the loop at which tests end the daemon, as SIGKILL
// would. Outside tests it costs one comparison with nil.
type failpoint string

// Where they are: around all that leaves the daemon or that a restart depends
// on. "in" is between the two halves of something: the page and the frame, or
// writing the state file and putting it in its place.
const (
	atFrame        failpoint = "a frame was received, and nothing done about it"
	atDecided      failpoint = "the core has decided, nothing is carried out"
	beforePersist  failpoint = "before the state file is written"
	inPersist      failpoint = "the state file is written, but not in its place"
	afterPersist   failpoint = "the state file is in its place"
	beforeGrant    failpoint = "before the gate opens"
	inGrant        failpoint = "the gate is open, GRANT is not sent"
	afterGrant     failpoint = "GRANT is sent"
	beforeRevoke   failpoint = "before the gate is shut"
	inRevoke       failpoint = "the gate is shut, REVOKE is not sent"
	afterRevoke    failpoint = "REVOKE is sent"
	beforeClose    failpoint = "before the gate of an early release is shut"
	afterClose     failpoint = "the gate of an early release is shut"
	beforeAdopt    failpoint = "before the gate of a holder that is back opens"
	afterAdopt     failpoint = "the gate of a holder that is back is open"
	beforeAttached failpoint = "before ATTACHED is sent"
	afterAttached  failpoint = "ATTACHED is sent"
	beforePause    failpoint = "before the gate is shut for a latency tenant"
	afterPause     failpoint = "the gate is shut for a latency tenant"
	beforeResume   failpoint = "before the gate opens again after a latency tenant"
	afterResume    failpoint = "the gate is open again after a latency tenant"
	afterReleased  failpoint = "a grant has ended"
	beforeFence    failpoint = "before a fence is acted on"
	afterFence     failpoint = "a fence is acted on"
	beforeNotice   failpoint = "before the page says who waits"
	afterNotice    failpoint = "the page says who waits"
	beforeWelcome  failpoint = "before WELCOME is sent"
	afterWelcome   failpoint = "WELCOME is sent"
	beforeReserved failpoint = "memory is accounted for, RESERVED is not sent"
	afterReserved  failpoint = "RESERVED is sent"
	beforeBury     failpoint = "a process has died, its grant is not reclaimed"
	afterBury      failpoint = "a dead process is forgotten"
	beforeRestore  failpoint = "an earlier holder is found, the core does not know"
	afterRestore   failpoint = "the core knows an earlier holder"
	atMoved        failpoint = "a report of moved memory has come, nothing is done about it"
	beforeRoom     failpoint = "before the page says how much room there is"
	inRoom         failpoint = "the page says how much room there is, ROOM is not sent"
	afterRoom      failpoint = "ROOM is sent"
	beforeArena    failpoint = "a segment of the arena is made and not sent"
	afterArena     failpoint = "a segment of the arena is sent"
	afterLost      failpoint = "a connection is lost, and the core knows"

	beforeCheckpoint failpoint = "a process is ready to be checkpointed, nobody does it yet"
	afterCheckpoint  failpoint = "a process is checkpointed, nothing is recorded"
	beforeReturn     failpoint = "before a process is restored"
	afterReturn      failpoint = "a process is restored, it does not know"

	beforeFile   failpoint = "a file is recorded, and not there yet"
	inFile       failpoint = "memory is in a file, and nobody knows"
	afterFile    failpoint = "memory is in a file, its pages are not given back"
	afterEmptied failpoint = "the pages of what is in a file are given back"
	beforeRead   failpoint = "before memory is read back"
	inRead       failpoint = "memory is read back, and the record says that it is in its file"
	afterRead    failpoint = "memory is read back and recorded, its file is there"
)

// reach is called at each failpoint.
func (n *node) reach(p failpoint) {
	if n.failpoint != nil {
		n.failpoint(p)
	}
}
