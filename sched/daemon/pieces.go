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
// piece was asked for, or until maxKept newer ones are kept.
type pieces struct {
	mu   sync.Mutex
	last uint64
	kept []wholeAnswer // the oldest first
}

type wholeAnswer struct {
	id   uint64
	data []byte
}

// keep keeps an answer and returns its first piece.
func (p *pieces) keep(data []byte) *api.Piece {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last++
	if len(p.kept) == maxKept {
		p.kept = append(p.kept[:0], p.kept[1:]...)
	}
	p.kept = append(p.kept, wholeAnswer{p.last, data})
	return pieceOf(p.kept[len(p.kept)-1], 0)
}

// at returns a piece, without data if there is none.
func (p *pieces) at(id, offset uint64) *api.Piece {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, w := range p.kept {
		if w.id != id || offset >= uint64(len(w.data)) {
			continue
		}
		piece := pieceOf(w, offset)
		if offset+uint64(len(piece.Data)) == piece.Size {
			last := len(p.kept) - 1
			copy(p.kept[i:], p.kept[i+1:])
			p.kept[last] = wholeAnswer{}
			p.kept = p.kept[:last]
		}
		return piece
	}
	return &api.Piece{Id: id, Offset: offset}
}

func pieceOf(w wholeAnswer, offset uint64) *api.Piece {
	end := min(offset+maxAnswer, uint64(len(w.data)))
	return &api.Piece{Id: w.id, Offset: offset, Data: w.data[offset:end], Size: uint64(len(w.data))}
}
