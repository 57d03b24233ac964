// SPDX-License-Identifier: Apache-2.0

package node

import (
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/wire"
)

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
