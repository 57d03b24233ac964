// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/page"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// client is one process, from its first REGISTER to its death. It may have
// several connections, of which it uses GPUs over at most one: the latest with
// an ATTACH that is more than a question.
type client struct {
	*peer.Peer
	id       sched.ClientID
	conn     *conn         // nil: none, or lost
	page     *page.Page    // of the latest conn; nil: it has used no GPU yet
	reg      wire.Register // of the latest conn
	attached map[*gpu]*attachment
	canMove  bool           // its shim can move memory; of the latest conn
	named    *api.Container // its container's names when they were last known: the end of a process may come after they are forgotten
}

// attachment is a client's use of one GPU.
type attachment struct {
	client  *client
	gpu     *gpu
	page    *page.Page // of the connection over which it attached, with the channel
	channel uint16
	ordinal uint32
	stats   wire.Stats
	told    wire.Notice

	fixed     wire.Fixed // why nothing of its memory can be moved
	fixedTold uint16     // the reasons that were told, by bit
	answered  bool       // ATTACHED was sent
	reserves  bool       // it reserves memory: its shim holds memory limits
	held      bool       // by a drained GPU: the core does not know what the client wants
	moves     bool       // its tenant leaves the GPU for another one: the same
	wants     bool       // while either is so
}

// slotOn returns the client's attachment to a GPU if its page has a slot for it; nil: it uses
// no such GPU, or has registered again and is yet to attach there.
func (cl *client) slotOn(g *gpu) *attachment {
	if att := cl.attached[g]; att != nil && cl.page != nil && att.page == cl.page {
		return att
	}
	return nil
}

// pendingAttach is an ATTACH that waits for a search for GPUs.
type pendingAttach struct {
	conn     *conn
	frame    wire.Frame
	reserves []wire.Frame // that came meanwhile
}

// addClient gives a process its id and watches for its death.
func (n *node) addClient(p *peer.Peer) *client {
	n.nextID++
	cl := &client{Peer: p, id: n.nextID, attached: map[*gpu]*attachment{}}
	n.clients[cl.id] = cl
	n.byProc[p.Process] = cl
	if n.byAccount[p.Account] == nil {
		n.byAccount[p.Account] = map[*client]struct{}{}
	}
	n.byAccount[p.Account][cl] = struct{}{}
	n.desk.SetProcesses(len(n.clients))
	n.Go(func() {
		err := p.AwaitDeath()
		if err == nil {
			n.Do(func() { n.bury(cl) })
			return
		}
		select {
		case <-n.Ended(): // and so closed the pidfd
		default:
			n.log.WithError(err).Errorf("watch process %d: its death will not be noticed", p.PID)
		}
	})
	return cl
}

// clientOf returns the client of a recorded process; nil: the process has ended.
func (n *node) clientOf(was peer.Process) (*client, error) {
	if cl := n.byProc[was]; cl != nil {
		return cl, nil
	}
	p, err := n.find(was)
	switch {
	case peer.Ended(err):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return n.addClient(p), nil
}

// clientsOf returns the processes of a tenant in the order in which they came.
func (n *node) clientsOf(account string) []*client {
	return slices.SortedFunc(maps.Keys(n.byAccount[account]), func(a, b *client) int { return cmp.Compare(a.id, b.id) })
}

// attachmentOf returns nil for a client that has no page for this GPU: buried,
// restored and not back, or not back on this GPU.
func (n *node) attachmentOf(g *gpu, id sched.ClientID) *attachment {
	if cl := n.clients[id]; cl != nil {
		return cl.slotOn(g)
	}
	return nil
}

// onGPU says whether processes of a tenant use a GPU.
func (n *node) onGPU(g *gpu, account string) bool {
	for cl := range n.byAccount[account] {
		if cl.attached[g] != nil {
			return true
		}
	}
	return false
}

// hasEnded looks for a process of an earlier scheduler.
func (n *node) hasEnded(was peer.Process) bool {
	p, err := n.peers.Find(was)
	if err == nil {
		p.Close()
	}
	return peer.Ended(err)
}

func shimVersion(v uint32) string {
	return fmt.Sprintf("%d.%d.%d", v>>16, v>>8&0xff, v&0xff)
}
