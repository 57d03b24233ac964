// SPDX-License-Identifier: Apache-2.0

package web

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/netutil"
	"golang.org/x/sync/errgroup"
)

const (
	clusterPatience = 10 * time.Second // of one question to a node
	clusterAtATime  = 16
	maxNodeAnswer   = 8 << 20
)

// Cluster shows the GPUs of a cluster's nodes, the most wasted first. It reads the nodes' pages
// through the API server, at an address where no login is needed: kubectl proxy.
type Cluster struct {
	API       string // http://127.0.0.1:8001
	Namespace string // of the scheduler's pods
	Token     string // of the nodes' pages
}

// clusterGPU is a row of the page; parts are of a GPU's time, 0 to 1.
type clusterGPU struct {
	Node, Name, Error    string
	Index                uint32
	Promised, Used       float64
	Memory, Taken, Inuse uint64 // of the GPU, promised or in use, in use
	Tenants, Problems    int
}

// Idle is the part of the time that nobody uses.
func (g clusterGPU) Idle() float64 { return max(1-g.Used, 0) }

// Waste is what was promised and is not used, so that others cannot be promised it.
func (g clusterGPU) Waste() float64 { return max(g.Promised-g.Used, 0) }

var clusterPage = template.Must(template.New("").Funcs(template.FuncMap{
	"percent": func(x float64) string { return fmt.Sprintf("%.0f %%", 100*x) },
	"gib":     func(n uint64) string { return fmt.Sprintf("%.1f", float64(n)/(1<<30)) },
}).Parse(`<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><meta http-equiv="refresh" content="10">
<title>nvshare: cluster</title><link rel="icon" href="data:,"><link rel="stylesheet" href="style.css">
<header><h1>nvshare</h1><p>{{len .}} GPUs, those first of which most is promised and not used</p></header>
<section class="gpu"><table><tr><th>Node<th>GPU<th>Wasted<th>Promised<th>Used<th>Idle<th>GiB promised<th>GiB in use<th>GiB in all<th>Tenants<th>Problems</tr>
{{range .}}<tr>{{if .Error}}<td>{{.Node}}<td colspan="10" class="lost">{{.Error}}{{else -}}
<td>{{.Node}}<td>{{.Index}} {{.Name}}<td>{{percent .Waste}}<td>{{percent .Promised}}<td>{{percent .Used}}<td>{{percent .Idle}}<td>{{gib .Taken}}<td>{{gib .Inuse}}<td>{{gib .Memory}}<td>{{.Tenants}}<td>{{.Problems}}{{end}}</tr>
{{end}}</table></section></html>
`))

// Listen opens a port of loopback for the page.
func (c Cluster) Listen(address string) (*Page, error) {
	if !isLoopback(address) {
		return nil, fmt.Errorf("the page of a cluster needs no token, so it cannot listen on %s: give an address of loopback, like 127.0.0.1:9403", address)
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("serve the page: %w (choose another address)", err)
	}
	return &Page{c.Handler(), func(context.Context) {}, netutil.LimitListener(l, MaxConns)}, nil
}

// Handler serves the page.
func (c Cluster) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /style.css", http.FileServerFS(pageFiles()))
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		gpus, err := c.collect(r.Context())
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		_ = clusterPage.Execute(w, gpus)
	})
	return (&Server{}).guard(mux)
}

// collect asks each node. One that does not answer is a row that says so, before all others.
func (c Cluster) collect(ctx context.Context) ([]clusterGPU, error) {
	var pods struct {
		Items []struct {
			Metadata struct{ Name string }
			Spec     struct{ NodeName string }
		}
	}
	path := "/api/v1/namespaces/" + url.PathEscape(c.Namespace) + "/pods"
	if err := c.ask(ctx, path+"?labelSelector=app.kubernetes.io/name%3Dnvshare", &pods); err != nil {
		return nil, fmt.Errorf("list the pods of namespace %s: %w (run kubectl proxy, and give its address)", c.Namespace, err)
	}
	found := make([][]clusterGPU, len(pods.Items))
	var all errgroup.Group
	all.SetLimit(clusterAtATime)
	for i, pod := range pods.Items {
		all.Go(func() error {
			var now nowJSON
			if err := c.ask(ctx, path+"/http:"+url.PathEscape(pod.Metadata.Name)+":9404/proxy/api/now", &now); err != nil {
				found[i] = []clusterGPU{{Node: pod.Spec.NodeName, Error: fmt.Sprintf("pod %s: %v", pod.Metadata.Name, err)}}
			}
			for _, g := range now.GPUs {
				row := clusterGPU{Node: pod.Spec.NodeName, Name: g.Name, Index: g.Index, Promised: float64(g.Promised) / 100,
					Memory: g.Memory, Taken: g.Taken, Inuse: g.Reserved, Tenants: len(g.Tenants), Problems: len(now.Problems)}
				for _, t := range g.Tenants {
					row.Used += t.Got
				}
				found[i] = append(found[i], row)
			}
			return nil
		})
	}
	_ = all.Wait()
	gpus := slices.Concat(found...)
	slices.SortFunc(gpus, func(a, b clusterGPU) int {
		return cmp.Or(cmp.Compare(b.Error, a.Error), cmp.Compare(b.Waste(), a.Waste()), cmp.Compare(b.Idle(), a.Idle()), cmp.Compare(a.Node, b.Node), cmp.Compare(a.Index, b.Index))
	})
	return gpus, nil
}

// ask reads an answer in JSON. The token is in a cookie: the API server keeps Authorization to itself.
func (c Cluster) ask(ctx context.Context, path string, answer any) error {
	ctx, cancel := context.WithTimeout(ctx, clusterPatience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(c.API, "/")+path, http.NoBody)
	if err != nil {
		return err
	}
	if c.Token != "" && strings.Contains(path, "/proxy/") {
		r.AddCookie(&http.Cookie{Name: cookie, Value: c.Token})
	}
	w, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer w.Body.Close()
	text, err := io.ReadAll(io.LimitReader(w.Body, maxNodeAnswer))
	if err != nil {
		return err
	}
	if w.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %.200s", w.Status, text)
	}
	return json.Unmarshal(text, answer)
}
