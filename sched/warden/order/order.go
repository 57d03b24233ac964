// SPDX-License-Identifier: Apache-2.0

// Package order is what the scheduler and nvshare-warden say to each other: one packet of
// JSON (SOCK_SEQPACKET) with orders, and one with a result for each.
package order

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// Lease is how long channels stay off without another order.
const Lease = time.Second

// MaxOrders is how many orders a packet may have, and maxPacket how long it may be.
const (
	MaxOrders = 64
	maxPacket = 64 << 10
)

// Op is what to do.
type Op string

const (
	// State only looks.
	State Op = "state"
	// Slice sets the time slices of all channel groups that the process has.
	Slice Op = "slice"
	// Off takes all channels off the GPU, for Lease, or renews that.
	Off Op = "off"
	// On puts them on.
	On Op = "on"
	// Freeze takes all channels off and stops the processes of the container (Order.Container) as well, for Lease, or renews
	// that. On ends it.
	Freeze Op = "freeze"
	// Limit has the kernel hold the cgroup of the process's container, or of its user's sessions, to Bytes of a GPU's
	// memory (dmem.max); 0: to nothing.
	Limit Op = "limit"
	// Kill kills the process, unless it has the shim.
	Kill Op = "kill"
)

// Order is about one process.
type Order struct {
	Op    Op     `json:"op"`
	PID   int    `json:"pid"`
	Start uint64 `json:"start,omitempty"` // as peer.Process has it; 0: whichever has the pid
	Us    uint64 `json:"us,omitempty"`    // of Slice
	// Again has Off take channels off that are off: they may have been put on by others.
	Again bool `json:"again,omitempty"`
	// Container is the id of the process's container, of Freeze and Limit; "" of Limit: the cgroup is that of the sessions
	// of the user UID.
	Container string `json:"container,omitempty"`
	UID       uint32 `json:"uid,omitempty"`
	// GPU has its names, of Limit: PCI address and UUID.
	GPU   []string `json:"gpu,omitempty"`
	Bytes uint64   `json:"bytes,omitempty"`
}

// NoRegion is the error of a Limit where the kernel does not hold the GPU's memory.
const NoRegion = "the kernel has no dmem.capacity that names the GPU"

// HasShim is the error of a Kill of a process that has the shim: it may be about to register.
const HasShim = "it has the shim"

// Result says what became of an order, and what is known of the process then.
type Result struct {
	Error    string   `json:"error,omitempty"`
	Gone     bool     `json:"gone,omitempty"` // the process has ended
	GPUs     []string `json:"gpus,omitempty"` // UUIDs
	Clients  int      `json:"clients"`
	Groups   int      `json:"groups"`
	Channels int      `json:"channels"`
	SliceUs  uint64   `json:"slice_us,omitempty"`
	Off      bool     `json:"off"`     // by the warden
	TookNs   int64    `json:"took_ns"` // the order
}

// Request is a packet of the scheduler, and Reply the warden's answer.
type Request struct {
	ID     uint64  `json:"id"`
	Orders []Order `json:"orders"`
}

type Reply struct {
	ID      uint64   `json:"id"`
	Error   string   `json:"error,omitempty"`   // of the packet
	Problem string   `json:"problem,omitempty"` // why the warden can hold nobody
	Results []Result `json:"results"`
}

// Conn sends and receives packets. Each direction is for one goroutine at a time.
type Conn struct {
	sock *net.UnixConn
	buf  []byte
}

func NewConn(sock *net.UnixConn) *Conn { return &Conn{sock, make([]byte, maxPacket+1)} }

func (c *Conn) Close() error { return c.sock.Close() }

func (c *Conn) Send(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = c.sock.Write(text)
	return err
}

func (c *Conn) Receive(v any) error {
	n, err := c.sock.Read(c.buf)
	if err != nil {
		return err
	}
	if n == 0 { // the end of a packet socket
		return net.ErrClosed
	}
	if n > maxPacket {
		return errors.New("a packet is too long")
	}
	return json.Unmarshal(c.buf[:n], v)
}

// Client is the scheduler's side.
type Client struct {
	mu   sync.Mutex
	conn *Conn
	next uint64
}

// Dial connects to a warden.
func Dial(path string) (*Client, error) {
	sock, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	return &Client{conn: NewConn(sock)}, nil
}

func (c *Client) Close() error { return c.conn.Close() }

// Problem asks why the warden can hold nobody; "": it can.
func (c *Client) Problem(limit time.Duration) (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r, err := c.ask(limit, nil)
	return r.Problem, err
}

// ask wants mu held.
func (c *Client) ask(limit time.Duration, orders []Order) (r Reply, err error) {
	c.next++
	if err := c.conn.sock.SetDeadline(time.Now().Add(limit)); err != nil {
		return r, err
	}
	if err := c.conn.Send(Request{c.next, orders}); err != nil {
		return r, err
	}
	if err := c.conn.Receive(&r); err != nil {
		return r, err
	}
	if r.Error != "" {
		return r, errors.New(r.Error)
	}
	if r.ID != c.next || len(r.Results) != len(orders) {
		return r, fmt.Errorf("the warden answered %d results to packet %d: want %d to %d", len(r.Results), r.ID, len(orders), c.next)
	}
	return r, nil
}

// Do has orders carried out, all at once, within a time.
func (c *Client) Do(limit time.Duration, orders ...Order) ([]Result, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []Result
	for len(orders) > 0 {
		n := min(len(orders), MaxOrders)
		r, err := c.ask(limit, orders[:n])
		if err != nil {
			return nil, err
		}
		all = append(all, r.Results...)
		orders = orders[n:]
	}
	return all, nil
}
