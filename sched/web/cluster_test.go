// SPDX-License-Identifier: Apache-2.0

package web

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// The page asks the nodes' pages through an API server, and has the GPU first of which most is
// promised and not used; a node that does not answer is named.
func TestCluster(t *testing.T) {
	const token = "0123456789abcdef"
	node := func(used time.Duration) http.Handler {
		s := New(&source{used: used}, token)
		s.look(t.Context(), time.Now())
		if used == 0 { // nobody uses what is promised
			for _, u := range s.status.Gpus[0].Tenants {
				u.GotPermille = 0
			}
		}
		return s.Handler()
	}
	const pods = "/api/v1/namespaces/nvshare-system/pods"
	api := http.NewServeMux()
	api.HandleFunc(pods, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("labelSelector") != "app.kubernetes.io/name=nvshare" {
			t.Errorf("asked for %s", r.URL)
		}
		_, _ = w.Write([]byte(`{"items":[{"metadata":{"name":"a"},"spec":{"nodeName":"busy"}},{"metadata":{"name":"b"},"spec":{"nodeName":"wasted"}},{"metadata":{"name":"c"},"spec":{"nodeName":"<gone>"}}]}`))
	})
	for name, h := range map[string]http.Handler{"a": node(time.Second), "b": node(0)} {
		path := pods + "/http:" + name + ":9404/proxy"
		api.Handle(path+"/", http.StripPrefix(path, h))
	}
	server := httptest.NewServer(api)
	defer server.Close()
	c := Cluster{API: server.URL + "/", Namespace: "nvshare-system", Token: token}
	code, page := get(t, c.Handler(), "/", "localhost")
	gone, wasted, busy := strings.Index(page, "&lt;gone&gt;"), strings.Index(page, "<td>wasted<td>0 Test GPU<td>30 %<td>30 %<td>0 %<td>100 %"), strings.Index(page, "<td>busy<td>0 Test GPU<td>0 %<td>30 %<td>100 %<td>0 %")
	if code != 200 || gone < 0 || wasted < gone || busy < wasted || !strings.Contains(page, "pod c: 404") {
		t.Errorf("%d: %s", code, page)
	}
	if code, _ := get(t, c.Handler(), "/", "evil.example"); code != 403 {
		t.Errorf("another name: %d", code)
	}
	if _, err := c.Listen("0.0.0.0:0"); err == nil || !strings.Contains(err.Error(), "loopback") {
		t.Errorf("on all addresses: %v", err)
	}
	server.Close()
	if code, page := get(t, c.Handler(), "/", "localhost"); code != 502 || !strings.Contains(page, "kubectl proxy") {
		t.Errorf("without an API server: %d %s", code, page)
	}
}
