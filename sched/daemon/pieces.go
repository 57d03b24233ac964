// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"sync"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	// maxAnswer keeps an answer of the control socket under the 4 MiB of a ttrpc
	// message, with what is around it.
	maxAnswer = 3 << 20
	// maxKept is how many answers are kept of which pieces may be asked for.
	maxKept = 2
)

// pieces are answers that are too large for a message. Each is kept until its last
// piece was asked for, or until maxKept newer ones came.
type pieces struct {
	mu   sync.Mutex
	last uint64
	kept map[uint64][]byte
}

// keep keeps an answer and returns its first piece.
func (p *pieces) keep(data []byte) *api.Piece {
	p.mu.Lock()
	p.last++
	id := p.last
	if p.kept == nil {
		p.kept = map[uint64][]byte{}
	}
	delete(p.kept, id-maxKept)
	p.kept[id] = data
	p.mu.Unlock()
	return p.at(id, 0)
}

// at returns a piece, without data if there is none.
func (p *pieces) at(id, offset uint64) *api.Piece {
	p.mu.Lock()
	defer p.mu.Unlock()
	data := p.kept[id]
	size := uint64(len(data))
	if offset >= size {
		return &api.Piece{Id: id, Offset: offset}
	}
	end := min(offset+maxAnswer, size)
	if end == size {
		delete(p.kept, id)
	}
	return &api.Piece{Id: id, Offset: offset, Data: data[offset:end], Size: size}
}
