// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// The scheduler's own page shows who holds the GPU and, from the events, since when.
func TestPageOfTheScheduler(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { o.WebAddr = "127.0.0.1:0" })
	_, a := newClient(t, s)
	a.request()
	a.granted()
	s.await("a holds", func(r *api.StatusResponse) bool {
		return stateOf(r, a.id) == api.ClientState_CLIENT_STATE_HOLDING
	})
	var code int
	var text string
	for until := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if code, text = fetch(t, s.ports[0].server.(webPage).Addr().String(), "/api/now"); strings.Contains(text, `"state":"holding"`) && strings.Contains(text, `"to":0`) {
			break
		}
		if time.Now().After(until) {
			t.Fatalf("%d %s", code, text)
		}
	}
	for path, want := range map[string]int{"/": http.StatusOK, "/api/history": http.StatusOK, "/metrics": http.StatusNotFound} {
		if code, _ := fetch(t, s.ports[0].server.(webPage).Addr().String(), path); code != want {
			t.Errorf("%s: %d", path, code)
		}
	}
}

// Ports that others have do not keep the scheduler from starting. They are a problem until
// they can be opened.
func TestPortsThatOthersHave(t *testing.T) {
	var others [2]net.Listener
	for i := range others {
		var err error
		if others[i], err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		defer others[i].Close()
	}
	metrics, page := others[0].Addr().String(), others[1].Addr().String()
	s := start(t, t.TempDir(), func(o *Options) { o.MetricsAddr, o.WebAddr = metrics, page })
	said := func(r *api.StatusResponse) string { return strings.Join(r.Problems, "\n") }
	if text := said(s.status()); !strings.Contains(text, "serve metrics: listen tcp "+metrics) || !strings.Contains(text, "serve the page: listen tcp "+page) {
		t.Errorf("problems: %s", text)
	}
	_, a := newClient(t, s)
	a.request()
	a.granted()
	for i := range others {
		others[i].Close()
	}
	s.await("both are served", func(r *api.StatusResponse) bool { return said(r) == "" })
	for addr, path := range map[string]string{metrics: "/healthz", page: "/"} {
		if code, text := fetch(t, addr, path); code != http.StatusOK {
			t.Errorf("%s: %d %s", path, code, text)
		}
	}
}

// An address that others reach needs a token, and a page that cannot be opened leaves
// nothing behind.
func TestPageNeedsAToken(t *testing.T) {
	dir := t.TempDir()
	short := filepath.Join(dir, "short")
	long := filepath.Join(dir, "long")
	if err := os.WriteFile(short, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(long, []byte("0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	run := filepath.Join(dir, "run")
	for _, tc := range []struct{ addr, token, want string }{
		{"0.0.0.0:0", "", "needs a token"}, {"0.0.0.0:0", short, "16 are needed"}, {"0.0.0.0:0", dir + "/none", "read the page's token"},
		{"nonsense", "", "give host:port"},
	} {
		o := testOptions(run)
		o.MetricsAddr, o.WebAddr, o.WebTokenFile = "127.0.0.1:0", tc.addr, tc.token
		if d, err := New(o); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: %v, %v", tc, d, err)
		}
	}
	s := start(t, run, func(o *Options) { o.WebAddr, o.WebTokenFile = "0.0.0.0:0", long })
	_, port, err := net.SplitHostPort(s.ports[0].server.(webPage).Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	addr := "127.0.0.1:" + port
	if code, _ := fetch(t, addr, "/api/now"); code != http.StatusUnauthorized {
		t.Errorf("without the token: %d", code)
	}
	if code, text := fetch(t, addr, "/?token=0123456789abcdef"); code != http.StatusUnauthorized { // the client keeps no cookie
		t.Errorf("with the token in the address: %d %s", code, text)
	}
	r, err := http.NewRequest(http.MethodGet, "http://"+addr+"/api/now", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer 0123456789abcdef")
	client := &http.Client{Timeout: patience}
	defer client.CloseIdleConnections()
	answer, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		t.Errorf("with the token: %d", answer.StatusCode)
	}
}
