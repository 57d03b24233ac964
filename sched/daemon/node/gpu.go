// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/wire"
)

// Found is what a search says of a GPU.
type Found struct {
	Index       int    // for display
	UUID        string // GPU-…
	Name        string
	MIG         string // see api.GPU
	MemoryBytes uint64
	PCIBusID    string        // 0000:17:00.0, or "": not known
	Model       *api.GPUModel // nil: not known
	Unopened    bool          // the driver knows it, and did not open it: only what is recorded of it counts
}

// GPU is one GPU with its core.
type GPU struct {
	Found
	Core     *sched.GPU
	Restored map[base.ClientID]bool // had a grant before the restart, not back yet
	Quantum  time.Duration          // as the core has them
	Mode     sched.Mode
	Turns    metrics.Turns
	NoRoom   base.Time // the latest reservation was refused for which there was no room; 0: none was
	WhyNo    error     // why that was

	Drained  bool      // admits no new tenants; see setDrained
	Fault    string    // what ended all work on it; "": nothing
	Faults   uint64    // how many faults the driver has told of
	OOMKills uint64    // processes without a shim that were killed for their tenant's memory limit
	Arrived  uint64    // tenants that have moved here from other GPUs
	Load     *api.Load // as the driver said at LoadAt; nil: it has not
	LoadAt   base.Time

	// Outbox holds what the core decided and is not carried out yet: normally
	// nothing between events, more while the state file cannot be written.
	Outbox []Work
	Retry  *timer.Timer // to carry out the outbox

	Turn *timer.Timer // the core's Deadline
}

// Work is one thing to carry out for a GPU: an action of its core, or the
// answer to an ATTACH.
type Work struct {
	Action base.Action
	Att    *Attachment // with answer
	Answer *wire.Frame
}

// Post adds actions to the outbox.
func (g *GPU) Post(acts []base.Action) {
	for _, a := range acts {
		g.Outbox = append(g.Outbox, Work{Action: a})
	}
}

// IsStuck says that so much waits for a record that who adds to it is disconnected.
func (g *GPU) IsStuck() bool { return len(g.Outbox) > MaxOutbox }

// NoSuchGPU is the error for a name that no GPU has.
func NoSuchGPU(name string) error {
	return status.Errorf(codes.NotFound, "GPU %.64q: no such UUID or index (nvsharectl status lists them)", name)
}

// FindGPU returns the GPU with this UUID or index; nil: there is none.
func (n *Node) FindGPU(name string) *GPU {
	for _, g := range n.Order {
		if strings.EqualFold(g.UUID, name) || strconv.Itoa(g.Index) == name {
			return g
		}
	}
	return nil
}

// NamedGPUs returns the GPU that FindGPU does, and its UUID, or for "" all.
func (n *Node) NamedGPUs(name string) (uuid string, gpus []*GPU, err error) {
	if name == "" {
		return "", n.Order, nil
	}
	g := n.FindGPU(name)
	if g == nil {
		return "", nil, NoSuchGPU(name)
	}
	return g.UUID, []*GPU{g}, nil
}

// Drained returns why a new container cannot have one of the GPUs that it was made for;
// nil: it can.
func (n *Node) Drained(c *api.Container) error {
	for _, g := range n.Order {
		if g.Drained && slices.Contains(c.Gpus, g.UUID) {
			return status.Errorf(codes.Aborted, "GPU %d is drained: it admits no new containers until nvsharectl undrain --gpu %d", g.Index, g.Index)
		}
	}
	return nil
}

// WithoutEnded drops the grants that have ended before they could be recorded, so that they open no
// gate.
func WithoutEnded(outbox []Work) []Work {
	given, ended := map[base.Epoch]bool{}, map[base.Epoch]bool{}
	for _, w := range outbox {
		switch a := w.Action.(type) {
		case sched.Grant:
			given[a.Epoch] = true
		case sched.Released:
			ended[a.Epoch] = given[a.Epoch]
		}
	}
	return slices.DeleteFunc(outbox, func(w Work) bool {
		_, epoch := w.Grant()
		return ended[epoch]
	})
}

// Grant returns the client and the grant that an action is about; 0: it is about none.
func (w *Work) Grant() (base.ClientID, base.Epoch) {
	switch a := w.Action.(type) {
	case sched.Grant:
		return a.Client, a.Epoch
	case sched.Revoke:
		return a.Client, a.Epoch
	case sched.StepOne:
		return a.Client, a.Epoch
	case sched.Fence:
		return a.Client, a.Epoch
	case sched.Released:
		return a.Client, a.Epoch
	case sched.Adopt:
		return a.Client, 0
	case sched.Resume:
		return a.Client, 0
	case sched.Pause:
		return a.Client, 0
	case sched.Slice:
		return a.Client, 0
	case sched.Stand:
		return a.Client, 0
	case sched.Close:
		return a.Client, 0
	case sched.Notice:
		return a.Client, 0
	}
	return 0, 0
}

var fixedTexts = map[wire.Fixed]string{
	wire.FixedSeveralGPUs: "the process uses several GPUs",
	wire.FixedOptiX:       "OptiX uses it (libnvoptix is mapped)",
	wire.FixedEncoder:     "the video encoder NVENC uses it (libnvidia-encode is mapped)",
	wire.FixedDecoder:     "the video decoder NVDEC uses it (libnvcuvid is mapped)",
	wire.FixedOpticalFlow: "the optical flow engine uses it (libnvidia-opticalflow is mapped)",
	wire.FixedStorage:     "GPUDirect Storage uses it (/dev/nvidia-fs is mapped)",
	wire.FixedRDMA:        "RDMA uses it (/dev/infiniband/uverbs is mapped)",
}

// FixedText says why nothing of a client's memory can be moved; "": some can be, or its shim
// has not said why.
func FixedText(by wire.Fixed) string {
	text, known := fixedTexts[by]
	if by != wire.FixedNot && !known {
		return fmt.Sprintf("its shim says so, for a reason that this scheduler does not know (%d)", by)
	}
	return text
}

// NoteFixed takes over why nothing of a client's memory can be moved. A tenant may change that, and
// attach, as often as it likes: each reason causes one event, and few of them outlive turns.
func (n *Node) NoteFixed(att *Attachment, by wire.Fixed) {
	att.Fixed = by
	if by == wire.FixedNot || att.fixedTold&(1<<by) != 0 {
		return
	}
	att.fixedTold |= 1 << by
	text := "its memory cannot be moved: " + FixedText(by)
	n.Tell(att.Client.Subject(), logrus.InfoLevel, fmt.Sprintf("GPU %d: %s", att.GPU.Index, text))
	t, add := time.Now(), n.History.AddTurn
	if n.MayTell("fixed on "+att.GPU.UUID+" "+att.Client.Account, t) {
		add = n.History.AddCaused
	}
	add(n.EventOf(t, att.GPU, att.Client.ID, &history.Event{Kind: api.EventType_EVENT_TYPE_FIXED, Text: text}))
}

// Foreign says what else than the driver's functions uses a client's memory on a GPU, so that
// the process cannot leave the GPU; "": nothing, as far as its shim has said. The driver can
// move a process whose memory nvshare does not move because the process uses several GPUs.
func (att *Attachment) Foreign() string {
	if att.Fixed <= wire.FixedSeveralGPUs {
		return ""
	}
	return FixedText(att.Fixed)
}

// ForeignOn returns an error that names a process of these that cannot leave a GPU for that
// reason; nil: there is none.
func ForeignOn(g *GPU, clients []*Client) error {
	for _, cl := range clients {
		if att := cl.Attached[g]; att != nil && att.Foreign() != "" {
			return fmt.Errorf("the memory of process %d cannot be moved: %s", cl.PID, att.Foreign())
		}
	}
	return nil
}

// Failpoint names a place in the loop at which tests end the daemon, as SIGKILL
// would. Outside tests it costs one comparison with nil.
type Failpoint string

// Before and After are around what is done about an action of a core, by the action's name.
func Before(action string) Failpoint { return Failpoint("before " + action) }
func After(action string) Failpoint  { return Failpoint("after " + action) }

// The others are around all else that leaves the daemon or that a restart depends
// on. "in" is between the two halves of something: the page and the frame, or
// writing the state file and putting it in its place.
const (
	AtFrame        Failpoint = "a frame was received, and nothing done about it"
	AtDecided      Failpoint = "the core has decided, nothing is carried out"
	InPersist      Failpoint = "the state file is written, but not in its place"
	InGrant        Failpoint = "the gate is open, GRANT is not sent"
	InRevoke       Failpoint = "the gate is shut, REVOKE is not sent"
	BeforeAttached Failpoint = "before ATTACHED is sent"
	AfterAttached  Failpoint = "ATTACHED is sent"
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
