// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"time"
)

// Copies says what a copier is to do.
type Copies struct {
	From, To string // UUIDs of GPUs; From is made ready at once; "": when it is needed
	Bytes    uint64 // that each process may have copied
}

// Copier is a program that copies.
type Copier struct {
	PID   int
	End   func()        // has the program end; may be called again
	Ended chan struct{} // closed when it has
}

// copierLimit is how long a copier may take to make both GPUs ready. It takes 0.9 s (H100).
const copierLimit = 10 * time.Second

// Copy starts a program that copies memory of processes to a GPU, for the processes at the
// other ends of the sockets (struct nvs_copy in hook/wire.h). It returns when the program is
// ready, and takes the sockets. The program ends with Copier.End, with this process, or when all
// processes have closed their sockets. It has contexts on both GPUs meanwhile.
func (r *Runner) Copy(ctx context.Context, c Copies, sockets []*os.File) (*Copier, error) {
	defer func() {
		for _, s := range sockets {
			s.Close()
		}
	}()
	if r.Program == "" {
		return nil, ErrNone
	}
	ctx, cancel := context.WithTimeout(ctx, copierLimit)
	defer cancel()
	args := []string{"copy", "--to", c.To, "--sockets", strconv.Itoa(len(sockets)), "--bytes", strconv.FormatUint(c.Bytes, 10)}
	if c.From != "" {
		args = append(args, "--from", c.From)
	}
	cmd := exec.Command(r.Program, args...)
	var diagnosis beginning
	cmd.Env, cmd.Stderr, cmd.ExtraFiles = r.environment(), &diagnosis, sockets
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	copier := &Copier{PID: cmd.Process.Pid, End: func() { in.Close() }, Ended: make(chan struct{})}
	ready := make(chan error, 1)
	go func() {
		var res Result
		err := json.NewDecoder(out).Decode(&res)
		switch {
		case err != nil:
			err = fmt.Errorf("%s copy did not start: %s", Name, diagnosis.text)
		case res.Error != "":
			err = &Error{Result: res}
		}
		ready <- err
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
		in.Close()
		close(copier.Ended)
	}()
	select {
	case err = <-ready:
	case <-ctx.Done():
		err = fmt.Errorf("%s copy was not ready within %v", Name, copierLimit)
		_ = cmd.Process.Kill()
	}
	if err != nil {
		copier.End()
		return nil, err
	}
	return copier, nil
}
