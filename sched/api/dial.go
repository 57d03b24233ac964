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
