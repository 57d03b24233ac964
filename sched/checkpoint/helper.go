// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
)

// helper is a running program. One goroutine at a time asks it.
type helper struct {
	cmd       *exec.Cmd
	in        io.WriteCloser
	answers   chan Result
	ended     chan struct{} // closed at its end; then err and diagnosis may be read
	err       error
	diagnosis beginning // what it printed on standard error
}

// beginning keeps the first part of what is written.
type beginning struct{ text []byte }

const maxDiagnosis = 4096

func (b *beginning) Write(p []byte) (int, error) {
	b.text = append(b.text, p[:min(len(p), maxDiagnosis-len(b.text))]...)
	return len(p), nil
}

func startHelper(program string, env []string) (*helper, error) {
	h := &helper{cmd: exec.Command(program, "serve"), answers: make(chan Result, 1), ended: make(chan struct{})}
	h.cmd.Env, h.cmd.Stderr = env, &h.diagnosis
	var err error
	if h.in, err = h.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := h.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := h.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		decoder := json.NewDecoder(out)
		for {
			res := Result{State: Unknown}
			if decoder.Decode(&res) != nil {
				break
			}
			h.answers <- res
		}
		h.err = h.cmd.Wait()
		close(h.ended)
	}()
	return h, nil
}

// dead says whether the program has ended.
func (h *helper) dead() bool {
	select {
	case <-h.ended:
		return true
	default:
		return false
	}
}

// end has the program end, once it has done what it does.
func (h *helper) end() { h.in.Close() }

// kill ends the program now. One that hangs in the kernel is not waited for.
func (h *helper) kill() {
	_ = h.cmd.Process.Kill()
	h.end()
}

// send gives the program an operation to do. A request fits into the pipe, so that nobody waits.
func (h *helper) send(q Request) error {
	if h.dead() {
		return os.ErrClosed
	}
	return json.NewEncoder(h.in).Encode(q)
}

// answer waits for the result.
func (h *helper) answer(ctx context.Context) (Result, error) {
	select {
	case res := <-h.answers:
		return res, nil
	case <-ctx.Done():
		return Result{}, ctx.Err()
	case <-h.ended:
	}
	select {
	case res := <-h.answers: // its last words
		return res, nil
	default:
	}
	why := h.err
	if why == nil {
		why = errors.New("it printed no result")
	}
	if text := strings.TrimSpace(string(h.diagnosis.text)); text != "" {
		return Result{}, fmt.Errorf("failed: %w: %s", why, text)
	}
	return Result{}, fmt.Errorf("failed: %w", why)
}
