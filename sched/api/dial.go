// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path/filepath"
	"syscall"

	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"
)

// SocketName is the control socket's name in the run directory.
const SocketName = "control.sock"

// SocketPath returns the control socket of a run directory.
func SocketPath(runDir string) string { return filepath.Join(runDir, SocketName) }

// Conn is a connection to a running scheduler. Its calls may be made from
// several goroutines; they fail with ttrpc.ErrClosed once the scheduler ends.
type Conn struct {
	ControlService
	conn *ttrpc.Client
}

// Status asks for the status, however large it is.
func (c *Conn) Status(ctx context.Context, req *StatusRequest) (*StatusResponse, error) {
	for range 3 { // others who ask meanwhile may have the scheduler forget the pieces
		r, err := c.ControlService.Status(ctx, req)
		if err != nil || r.Piece == nil {
			return r, err
		}
		whole := make([]byte, 0, min(r.Piece.Size, maxStatus))
		for r.Piece != nil && len(r.Piece.Data) > 0 {
			whole = append(whole, r.Piece.Data...)
			if n := uint64(len(whole)); n >= r.Piece.Size || n > maxStatus {
				all := &StatusResponse{}
				return all, proto.Unmarshal(whole, all)
			}
			r, err = c.ControlService.Status(ctx, &StatusRequest{PiecesId: r.Piece.Id, Offset: uint64(len(whole))})
			if err != nil {
				return nil, err
			}
		}
	}
	return nil, errors.New("the scheduler's status is asked for by too many at once: try again")
}

// maxStatus is more than any status, bytes.
const maxStatus = 256 << 20

// Close ends the connection; calls under way fail.
func (c *Conn) Close() error { return c.conn.Close() }

// UnreachableError says that no scheduler answers at Path, and what to do.
type UnreachableError struct {
	Path string
	Err  error
}

func (e *UnreachableError) Error() string {
	next := "is nvshare-scheduler running?"
	switch {
	case errors.Is(e.Err, fs.ErrPermission):
		next = "run as the user that runs nvshare-scheduler, usually root"
	case errors.Is(e.Err, fs.ErrNotExist):
		next = "is nvshare-scheduler running, with this run directory?"
	case errors.Is(e.Err, syscall.ECONNREFUSED):
		next = "nvshare-scheduler has ended without cleaning up; start it again"
	}
	return fmt.Sprintf("connect %s: %v (%s)", e.Path, e.Err, next)
}

func (e *UnreachableError) Unwrap() error { return e.Err }

// Dial connects to the scheduler whose run directory is runDir. The error is an
// *UnreachableError.
func Dial(ctx context.Context, runDir string) (*Conn, error) {
	path := SocketPath(runDir)
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		var sys syscall.Errno
		if errors.As(err, &sys) {
			err = sys // the path is in our own text already
		}
		return nil, &UnreachableError{path, err}
	}
	c := ttrpc.NewClient(conn)
	return &Conn{NewControlClient(c), c}, nil
}
