// SPDX-License-Identifier: Apache-2.0

package daemon

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

// fixedText says why nothing of a client's memory can be moved; "": some can be, or its shim
// has not said why.
func fixedText(by wire.Fixed) string {
	text, known := fixedTexts[by]
	if by != wire.FixedNot && !known {
		return fmt.Sprintf("its shim says so, for a reason that this scheduler does not know (%d)", by)
	}
	return text
}

// noteFixed takes over why nothing of a client's memory can be moved. A tenant may change that, and
// attach, as often as it likes: each reason causes one event, and few of them outlive turns.
func (n *node) noteFixed(att *attachment, by wire.Fixed) {
	att.fixed = by
	if by == wire.FixedNot || att.fixedTold&(1<<by) != 0 {
		return
	}
	att.fixedTold |= 1 << by
	text := "its memory cannot be moved: " + fixedText(by)
	n.tell(att.client.subject(), logrus.InfoLevel, fmt.Sprintf("GPU %d: %s", att.gpu.Index, text))
	t, add := time.Now(), n.history.AddTurn
	if n.mayTell("fixed on "+att.gpu.UUID+" "+att.client.Account, t) {
		add = n.history.AddCaused
	}
	add(n.eventOf(t, att.gpu, att.client.id, &history.Event{Kind: api.EventType_EVENT_TYPE_FIXED, Text: text}))
}

// foreign says what else than the driver's functions uses a client's memory on a GPU, so that
// the process cannot leave the GPU; "": nothing, as far as its shim has said. The driver can
// move a process whose memory nvshare does not move because the process uses several GPUs.
func (att *attachment) foreign() string {
	if att.fixed <= wire.FixedSeveralGPUs {
		return ""
	}
	return fixedText(att.fixed)
}

// foreignOn returns an error that names a process of these that cannot leave a GPU for that
// reason; nil: there is none.
func foreignOn(g *gpu, clients []*client) error {
	for _, cl := range clients {
		if att := cl.attached[g]; att != nil && att.foreign() != "" {
			return fmt.Errorf("the memory of process %d cannot be moved: %s", cl.PID, att.foreign())
		}
	}
	return nil
}
