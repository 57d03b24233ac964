// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/page"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// Client is one process, from its first REGISTER to its death. It may have
// several connections, of which it uses GPUs over at most one: the latest with
// an ATTACH that is more than a question.
type Client struct {
	*peer.Peer
	ID       base.ClientID
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
func (n *Node) NewID() base.ClientID {
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
func (n *Node) AttachmentOf(g *GPU, id base.ClientID) *Attachment {
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

// Conn is one tenant connection.
type Conn struct {
	Sock    *net.UnixConn
	Peer    *peer.Peer
	Account *admission.Account
	spin    atomic.Int64 // base.Time until which read spins for the next frame

	// The loop's own:
	Client   *Client                          // nil before REGISTER
	Reg      wire.Register                    // what it registered with
	Code     uint32                           // of REGISTER: what it says of itself
	Page     *page.Page                       // the client's own once it has attached
	Channels [wire.MaxChannels]*Attachment    // attached over this connection
	Waiting  [wire.MaxChannels]*PendingAttach // ATTACH not answered yet
	Failed   [wire.MaxChannels]bool           // ATTACH was answered with an error
	Unknown  map[uint16]wire.UUID             // by channel: because that GPU is not known; see unknownProblems
	Dead     bool                             // closed by us; frames still queued are ignored
}

// Says tells whether the process has said something of itself: wire.RegisterSwap and so on.
func (c *Conn) Says(what uint32) bool { return c.Code&what != 0 }

// Receive waits for a packet. After LookOut it spins for a while before it sleeps.
func (c *Conn) Receive(b []byte) (n, flags int, err error) {
	if until := base.Time(c.spin.Swap(0)); until != 0 {
		raw, err := c.Sock.SyscallConn()
		if err != nil {
			return 0, 0, err
		}
		for loop.Now() < until {
			var recvErr error
			if err := raw.Control(func(fd uintptr) {
				n, _, flags, _, recvErr = unix.Recvmsg(int(fd), b, nil, unix.MSG_DONTWAIT)
			}); err != nil {
				return 0, 0, err
			}
			if recvErr != unix.EAGAIN && recvErr != unix.EINTR {
				return n, flags, recvErr
			}
			runtime.Gosched()
		}
	}
	n, _, flags, _, err = c.Sock.ReadMsgUnix(b, nil)
	return n, flags, err
}

// LookOut has the connection's reader spin until then or the next frame.
func (c *Conn) LookOut(until base.Time) {
	c.spin.Store(int64(until))
	c.Sock.SetReadDeadline(time.Unix(1, 0)) // wakes it if it sleeps
}

// send never blocks. It fails if the peer does not read what it gets, or is
// gone. oob is nil or a control message.
func (c *Conn) send(f *wire.Frame, oob []byte) error {
	f.Version = wire.Version
	b := f.Encode()
	raw, err := c.Sock.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	if err := raw.Write(func(fd uintptr) bool {
		for {
			sendErr = unix.Sendmsg(int(fd), b[:], oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if sendErr != unix.EINTR {
				return true
			}
		}
	}); err != nil {
		return err
	}
	if sendErr != nil {
		return fmt.Errorf("send %v: %w", f.Type, sendErr)
	}
	return nil
}

// Refuse tells the peer why its connection is closed next, if that can be sent.
func (c *Conn) Refuse(code uint32, text string) {
	f := wire.Frame{Type: wire.TypeRefused, Code: code}
	f.Refused.SetText(text)
	_ = c.send(&f, nil)
}

// Send sends to a client, if it is connected. If that fails, the connection is
// closed now, and lost after the current event.
func (n *Node) Send(c *Conn, f *wire.Frame, oob []byte) {
	if c == nil || c.Dead {
		return
	}
	if err := c.send(f, oob); err != nil {
		if errors.Is(err, unix.EAGAIN) {
			n.Tell(c.Subject(), logrus.WarnLevel, fmt.Sprintf("disconnect a client that does not read: %v", err))
		} else { // it is gone, or going
			n.LogOf(c.Subject()).WithError(err).Debug("connection ended")
		}
		n.ShutDown(c)
	}
}

// ShutDown closes the connection from our side.
func (n *Node) ShutDown(c *Conn) {
	if !c.Dead {
		c.Dead = true
		c.Sock.Close()
		n.Broken = append(n.Broken, c)
	}
}

// ProtocolError refuses and closes a connection.
func (n *Node) ProtocolError(c *Conn, err error) {
	n.Malformed++
	n.Tell(c.Subject(), logrus.WarnLevel, fmt.Sprintf("disconnect a client that broke the protocol: %v", err))
	c.Refuse(wire.ErrProtocol, strings.TrimPrefix(err.Error(), wire.ErrFrame.Error()+": "))
	n.ShutDown(c)
}
