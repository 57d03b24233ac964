// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
)

// serveView returns the run directory of a scheduler whose status socket answers so.
func serveView(t *testing.T, answer []byte) string {
	t.Helper()
	dir := t.TempDir()
	listenView(t, dir, answer)
	return dir
}

func listenView(t *testing.T, dir string, answer []byte) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(dir, api.ViewName))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write(answer)
			c.Close()
		}
	}()
}

// Where there is no control socket, as in containers, the status socket answers: status
// and top say what is their own, and of others numbers.
func TestStatusWithoutControlSocket(t *testing.T) {
	r := sample()
	mine := r.Gpus[0].Clients[0]
	r.Gpus = r.Gpus[:1]
	g := r.Gpus[0]
	g.Clients, g.Tenants, g.Memory, g.Promises = g.Clients[:1], g.Tenants[:1], g.Memory[:1], nil
	g.Others = &api.Others{Tenants: 2, Clients: 3, Holding: 1, Waiting: 2, GotPermille: 749, MemoryBytes: 6 << 30}
	r.View = &api.View{Container: mine.Container, Problems: 2}
	answer, err := proto.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	dir := serveView(t, answer)
	code, out, errs := ctl("--run-dir", dir)
	if code != exitFailed || errs != "" { // problems of others, too, make a node unhealthy
		t.Errorf("exit %d, %s", code, errs)
	}
	golden(t, "status-view.txt", out)
	if code, out, errs = ctl("top", "--once", "-d", "10ms", "--run-dir", dir); code != exitFailed || !strings.Contains(out, "others: 2 tenants") {
		t.Errorf("top: exit %d, %s, %s", code, out, errs)
	}
	if code, out, errs = ctl("-o", "json", "--run-dir", dir); code != exitFailed || !strings.Contains(out, `"others": {`) || !strings.Contains(out, `"view": {`) || !strings.Contains(out, `"healthy": false`) {
		t.Errorf("json: exit %d, %s, %s", code, out, errs)
	}
	r.View.Problems = 0
	if answer, err = proto.Marshal(r); err != nil {
		t.Fatal(err)
	}
	if code, out, _ = ctl("-o", "json", "--run-dir", serveView(t, answer)); code != exitOK || !strings.Contains(out, `"healthy": true`) {
		t.Errorf("no problem: exit %d, %s", code, out)
	}
	// The scheduler refuses who asks too often.
	if code, _, errs = ctl("--run-dir", serveView(t, nil)); code != exitUnreachable || !strings.Contains(errs, "try again") {
		t.Errorf("refused: exit %d, %s", code, errs)
	}
}
