// SPDX-License-Identifier: Apache-2.0

package api

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestDialSaysWhatToDo(t *testing.T) {
	dir := t.TempDir()
	check := func(want error, next string) {
		t.Helper()
		_, err := Dial(context.Background(), dir)
		var un *UnreachableError
		if !errors.As(err, &un) || !errors.Is(err, want) {
			t.Fatalf("error %v, want an UnreachableError with %v", err, want)
		}
		if !strings.Contains(err.Error(), filepath.Join(dir, SocketName)) || !strings.Contains(err.Error(), next) {
			t.Errorf("%q names neither the socket nor %q", err, next)
		}
	}
	check(fs.ErrNotExist, "is nvshare-scheduler running")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, SocketName)})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
	check(syscall.ECONNREFUSED, "start it again")
}
