// SPDX-License-Identifier: Apache-2.0

package node

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

// Client is one process, from its first REGISTER to its death. It may have
// several connections, of which it uses GPUs over at most one: the latest with
// an ATTACH that is more than a question.
type Client struct {
	*peer.Peer
	ID       sched.ClientID
	Conn     *Conn         // nil: none, or lost
	Page     *page.Page    // of the latest conn; nil: it has used no GPU yet
	Reg      wire.Register // of the latest conn
	Attached map[*GPU]*Attachment
	CanMove  bool           // its shim can move memory; of the latest conn
	named    *api.Container // its container's names when they were last known: the end of a process may come after they are forgotten
}

// Attachment is a client's use of one GPU.
type Attachment struct {
	Client  *Client
	GPU     *GPU
	Page    *page.Page // of the connection over which it attached, with the channel
	Channel uint16
	Ordinal uint32
	Stats   wire.Stats
	Told    wire.Notice

	Fixed     wire.Fixed // why nothing of its memory can be moved
	fixedTold uint16     // the reasons that were told, by bit
	Answered  bool       // ATTACHED was sent
	Reserves  bool       // it reserves memory: its shim holds memory limits
	Held      bool       // by a drained GPU: the core does not know what the client wants
	Moves     bool       // its tenant leaves the GPU for another one: the same
	Wants     bool       // while either is so
}

// SlotOn returns the client's attachment to a GPU if its page has a slot for it; nil: it uses
// no such GPU, or has registered again and is yet to attach there.
func (cl *Client) SlotOn(g *GPU) *Attachment {
	if att := cl.Attached[g]; att != nil && cl.Page != nil && att.Page == cl.Page {
		return att
	}
	return nil
}

// PendingAttach is an ATTACH that waits for a search for GPUs.
type PendingAttach struct {
	Conn     *Conn
	Frame    wire.Frame
	Reserves []wire.Frame // that came meanwhile
}

// NewID returns the number of a further client of the cores.
func (n *Node) NewID() sched.ClientID {
	n.nextID++
	return n.nextID
}

// AddClient gives a process its id and watches for its death.
func (n *Node) AddClient(p *peer.Peer) *Client {
	cl := &Client{Peer: p, ID: n.NewID(), Attached: map[*GPU]*Attachment{}}
	n.Clients[cl.ID] = cl
	n.ByProc[p.Process] = cl
	if n.ByAccount[p.Account] == nil {
		n.ByAccount[p.Account] = map[*Client]struct{}{}
	}
	n.ByAccount[p.Account][cl] = struct{}{}
	n.Desk.SetProcesses(len(n.Clients))
	n.Go(func() {
		err := p.AwaitDeath()
		if err == nil {
			n.Do(func() { n.Bury(cl) })
			return
		}
		select {
		case <-n.Ended(): // and so closed the pidfd
		default:
			n.Log.WithError(err).Errorf("watch process %d: its death will not be noticed", p.PID)
		}
	})
	return cl
}

// ClientOf returns the client of a recorded process; nil: the process has ended.
func (n *Node) ClientOf(was peer.Process) (*Client, error) {
	if cl := n.ByProc[was]; cl != nil {
		return cl, nil
	}
	p, err := n.Find(was)
	switch {
	case peer.Ended(err):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return n.AddClient(p), nil
}

// ClientsOf returns the processes of a tenant in the order in which they came.
func (n *Node) ClientsOf(account string) []*Client {
	return slices.SortedFunc(maps.Keys(n.ByAccount[account]), func(a, b *Client) int { return cmp.Compare(a.ID, b.ID) })
}

// AttachmentOf returns nil for a client that has no page for this GPU: buried,
// restored and not back, or not back on this GPU.
func (n *Node) AttachmentOf(g *GPU, id sched.ClientID) *Attachment {
	if cl := n.Clients[id]; cl != nil {
		return cl.SlotOn(g)
	}
	return nil
}

// OnGPU says whether processes of a tenant use a GPU.
func (n *Node) OnGPU(g *GPU, account string) bool {
	for cl := range n.ByAccount[account] {
		if cl.Attached[g] != nil {
			return true
		}
	}
	return false
}

// HasEnded looks for a process of an earlier scheduler.
func (n *Node) HasEnded(was peer.Process) bool {
	p, err := n.Peers.Find(was)
	if err == nil {
		p.Close()
	}
	return peer.Ended(err)
}

// ShimVersion writes a version as REGISTER has it.
func ShimVersion(v uint32) string {
	return fmt.Sprintf("%d.%d.%d", v>>16, v>>8&0xff, v&0xff)
}
