// SPDX-License-Identifier: Apache-2.0

// Package kubeapi is a small Kubernetes API server for tests. It answers the requests
// that nvshare makes, and fails the test on a bad request.
package kubeapi

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"
)

// Node is the name of the only node.
const Node = "node-1"

// Server serves one node's pods (list, watch, streaming list), their metadata only unless Specs was
// called, and the node, and takes events.
type Server struct {
	*httptest.Server
	Events  chan *eventsv1.Event
	Asked   chan string // the answers about pods: list, watch, stream, or a status code
	Patched chan *corev1.Node

	t *testing.T

	mu       sync.Mutex
	version  int
	pods     map[types.UID]*metav1.PartialObjectMetadata
	specs    map[string]corev1.PodSpec // by <namespace>/<name>
	over     map[types.UID]bool
	whole    bool // pods are asked for as a whole
	watchers map[chan watchEvent]bool
	fail     int // status code of all answers about pods; 0: none
	old      bool
	node     corev1.Node
	nodes    map[chan corev1.Node]bool // who watches it
}

type watchEvent struct {
	Type   string                        `json:"type"`
	Object *metav1.PartialObjectMetadata `json:"object"`
}

// sent is an object in the form in which it was asked for.
type sent struct {
	Type   string `json:"type"`
	Object any    `json:"object"`
}

// New starts a server that ends with the test.
func New(t *testing.T) *Server {
	s := &Server{
		t: t, Events: make(chan *eventsv1.Event, 1000), Asked: make(chan string, 1000), Patched: make(chan *corev1.Node, 1000),
		pods: map[types.UID]*metav1.PartialObjectMetadata{}, specs: map[string]corev1.PodSpec{}, watchers: map[chan watchEvent]bool{},
		over: map[types.UID]bool{}, nodes: map[chan corev1.Node]bool{},
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/v1/pods", s.servePods)
	mux.HandleFunc("GET /api/v1/namespaces/{namespace}/pods", s.servePod)
	mux.HandleFunc("GET /api/v1/nodes/{name}", s.serveNode)
	mux.HandleFunc("PATCH /api/v1/nodes/{name}", s.serveNode)
	mux.HandleFunc("PATCH /api/v1/nodes/{name}/status", s.patchStatus)
	mux.HandleFunc("GET /api/v1/nodes", s.serveNodes)
	mux.HandleFunc("POST /apis/events.k8s.io/v1/namespaces/{namespace}/events", s.serveEvent)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("unexpected request %s %s", r.Method, r.URL)
		w.WriteHeader(http.StatusNotFound)
	})
	s.Server = httptest.NewServer(mux)
	t.Cleanup(func() { s.Cut(); s.Close() })
	return s
}

// Kubeconfig writes a kubeconfig file for the server.
func (s *Server) Kubeconfig(file string) {
	s.t.Helper()
	text := `{"apiVersion":"v1","kind":"Config","current-context":"test",
"clusters":[{"name":"test","cluster":{"server":"` + s.URL + `"}}],
"contexts":[{"name":"test","context":{"cluster":"test","user":"test"}}],
"users":[{"name":"test","user":{}}]}`
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// Taint gives the node a taint.
func (s *Server) Taint(key string, effect corev1.TaintEffect) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.node.Spec.Taints = append(s.node.Spec.Taints, corev1.Taint{Key: key, Effect: effect})
}

// Specs has pods served as a whole.
func (s *Server) Specs() { s.whole = true }

// SetNode changes the node, as the kubelet does.
func (s *Server) SetNode(change func(*corev1.Node)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.node)
	s.tellNode()
}

func (s *Server) tellNode() {
	s.version++
	s.node.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}
	s.node.Name, s.node.ResourceVersion = Node, fmt.Sprint(s.version)
	for w := range s.nodes {
		w <- *s.node.DeepCopy()
	}
}

// patchStatus takes a merge patch of the node's status.
func (s *Server) patchStatus(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fail != 0 {
		reject(w, s.fail)
		return
	}
	before, _ := json.Marshal(s.node)
	body, err := io.ReadAll(r.Body)
	var after []byte
	if err == nil {
		after, err = jsonpatch.MergePatch(before, body)
	}
	var node corev1.Node
	if err == nil {
		err = json.Unmarshal(after, &node)
	}
	if err != nil || r.PathValue("name") != Node || r.Header.Get("Content-Type") != string(types.MergePatchType) {
		s.t.Errorf("patch %s of the status of node %s: %v", body, r.PathValue("name"), err)
	}
	s.node = node
	s.tellNode()
	s.Patched <- &node
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.node)
}

// serveNodes lists or watches the node.
func (s *Server) serveNodes(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if got := q.Get("fieldSelector"); got != "metadata.name="+Node {
		s.t.Errorf("asked for the nodes with %q", got)
	}
	if q.Get("sendInitialEvents") == "true" { // as before Kubernetes 1.32
		reject(w, http.StatusUnprocessableEntity)
		return
	}
	s.mu.Lock()
	w.Header().Set("Content-Type", "application/json")
	if q.Get("watch") == "" {
		list := corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, ListMeta: metav1.ListMeta{ResourceVersion: fmt.Sprint(s.version)}}
		list.Items = append(list.Items, s.node)
		s.mu.Unlock()
		_ = json.NewEncoder(w).Encode(list)
		return
	}
	ch := make(chan corev1.Node, 1000)
	ch <- *s.node.DeepCopy() // the history is not kept
	s.nodes[ch] = true
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.nodes, ch)
	}()
	for {
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			return
		case node := <-ch:
			_ = json.NewEncoder(w).Encode(sent{"MODIFIED", node})
		}
	}
}

// serveNode returns the node, after a JSON patch if the request has one.
func (s *Server) serveNode(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.PathValue("name") != Node {
		s.t.Errorf("%s of node %s", r.Method, r.PathValue("name"))
	}
	s.node.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}
	s.node.Name = Node
	if r.Method == http.MethodPatch {
		before, _ := json.Marshal(s.node)
		body, err := io.ReadAll(r.Body)
		var patch jsonpatch.Patch
		if err == nil {
			patch, err = jsonpatch.DecodePatch(body)
		}
		var after []byte
		if err == nil {
			after, err = patch.Apply(before)
		}
		var node corev1.Node
		if err == nil {
			err = json.Unmarshal(after, &node)
		}
		if err != nil || r.Header.Get("Content-Type") != string(types.JSONPatchType) {
			s.t.Errorf("patch %s: %v", body, err)
		}
		s.node = node
		s.Patched <- &node
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.node)
}

// NoStreams makes the server refuse streaming lists, as before Kubernetes 1.32.
func (s *Server) NoStreams() { s.old = true }

// Set creates or changes a pod.
func (s *Server) Set(uid, namespace, name string, annotations map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	p := &metav1.PartialObjectMetadata{
		TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
		ObjectMeta: metav1.ObjectMeta{
			UID: types.UID(uid), Namespace: namespace, Name: name, Annotations: maps.Clone(annotations), ResourceVersion: fmt.Sprint(s.version),
		},
	}
	kind := "MODIFIED"
	if s.pods[p.UID] == nil {
		kind = "ADDED"
	}
	s.pods[p.UID] = p
	s.tell(watchEvent{kind, p})
}

// End has a pod end, as the kubelet says it.
func (s *Server) End(uid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	p := *s.pods[types.UID(uid)]
	p.ResourceVersion = fmt.Sprint(s.version)
	s.pods[p.UID], s.over[p.UID] = &p, true
	s.tell(watchEvent{"MODIFIED", &p})
}

// as returns a pod in the form in which it is asked for. The lock is held.
func (s *Server) as(p *metav1.PartialObjectMetadata) any {
	if !s.whole {
		return p
	}
	pod := corev1.Pod{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: p.ObjectMeta, Spec: s.specs[p.Namespace+"/"+p.Name]}
	pod.Status.Phase = corev1.PodRunning
	if s.over[p.UID] {
		pod.Status.Phase = corev1.PodSucceeded
	}
	return pod
}

// SetSpec says what else the pod with this name has.
func (s *Server) SetSpec(namespace, name string, spec corev1.PodSpec) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.specs[namespace+"/"+name] = spec
}

// Remove deletes a pod.
func (s *Server) Remove(uid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	p := *s.pods[types.UID(uid)]
	p.ResourceVersion = fmt.Sprint(s.version)
	delete(s.pods, p.UID)
	s.tell(watchEvent{"DELETED", &p})
}

func (s *Server) tell(e watchEvent) {
	for w := range s.watchers {
		w <- e
	}
}

// Cut ends all watches.
func (s *Server) Cut() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watchers {
		close(w)
	}
	clear(s.watchers)
}

// FailWith makes the server answer all requests about pods with a status code; 0 ends
// that.
func (s *Server) FailWith(code int) {
	s.mu.Lock()
	s.fail = code
	s.mu.Unlock()
	if code != 0 {
		s.Cut()
	}
}

func reject(w http.ResponseWriter, code int) {
	reason := map[int]metav1.StatusReason{403: metav1.StatusReasonForbidden, 410: metav1.StatusReasonExpired, 422: metav1.StatusReasonInvalid, 503: metav1.StatusReasonServiceUnavailable}[code]
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Code: int32(code), Reason: reason, Message: "no: " + http.StatusText(code),
	})
}

func (s *Server) servePods(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if got := q.Get("fieldSelector"); got != "spec.nodeName="+Node {
		s.t.Errorf("asked for the pods of %q", got)
	}
	if accept := r.Header.Get("Accept"); strings.Contains(accept, "as=PartialObjectMetadata") == s.whole {
		s.t.Errorf("asked for more or less than is needed: %s", accept)
	}
	s.mu.Lock()
	if s.fail != 0 || s.old && q.Get("sendInitialEvents") == "true" {
		code := s.fail
		if code == 0 {
			code = http.StatusUnprocessableEntity
		}
		s.mu.Unlock()
		reject(w, code)
		s.Asked <- fmt.Sprint(code)
		return
	}
	all := slices.SortedFunc(maps.Values(s.pods), func(a, b *metav1.PartialObjectMetadata) int {
		return strings.Compare(string(a.UID), string(b.UID))
	})
	version := fmt.Sprint(s.version)
	if q.Get("watch") == "" {
		list := map[string]any{"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadataList", "metadata": metav1.ListMeta{ResourceVersion: version}}
		if s.whole {
			list["apiVersion"], list["kind"] = "v1", "PodList"
		}
		items := []any{}
		for _, p := range all {
			items = append(items, s.as(p))
		}
		list["items"] = items
		s.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(list)
		s.Asked <- "list"
		return
	}
	stream := q.Get("sendInitialEvents") == "true"
	since := q.Get("resourceVersion")
	ch := make(chan watchEvent, 1000)
	switch {
	case stream:
		for _, p := range all {
			ch <- watchEvent{"ADDED", p}
		}
		ch <- watchEvent{"BOOKMARK", &metav1.PartialObjectMetadata{
			TypeMeta:   metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
			ObjectMeta: metav1.ObjectMeta{ResourceVersion: version, Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}},
		}}
	case since != version: // the history is not kept
		s.mu.Unlock()
		reject(w, http.StatusGone)
		s.Asked <- "410"
		return
	}
	s.watchers[ch] = true
	s.mu.Unlock()
	if stream {
		s.Asked <- "stream"
	} else {
		s.Asked <- "watch"
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	for {
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			s.mu.Lock()
			delete(s.watchers, ch)
			s.mu.Unlock()
			return
		case e, ok := <-ch:
			if !ok {
				return
			}
			s.mu.Lock()
			out := sent{e.Type, s.as(e.Object)}
			s.mu.Unlock()
			_ = json.NewEncoder(w).Encode(out)
		}
	}
}

// servePod serves one pod as a whole.
func (s *Server) servePod(w http.ResponseWriter, r *http.Request) {
	name, ok := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
	if !ok {
		s.t.Errorf("asked for all pods of a namespace: %s", r.URL)
	}
	list := corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}}
	s.mu.Lock()
	if spec, ok := s.specs[r.PathValue("namespace")+"/"+name]; ok {
		pod := corev1.Pod{Spec: spec}
		for _, p := range s.pods {
			if p.Namespace == r.PathValue("namespace") && p.Name == name {
				pod.ObjectMeta = p.ObjectMeta
			}
		}
		list.Items = append(list.Items, pod)
	}
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(list)
}

// serveEvent refuses the events that a real API server refuses.
func (s *Server) serveEvent(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	e := &eventsv1.Event{}
	if err == nil {
		_, _, err = scheme.Codecs.UniversalDeserializer().Decode(body, nil, e)
	}
	switch {
	case err != nil:
	case e.Namespace != r.PathValue("namespace") || e.Regarding.Namespace != e.Namespace || e.Name == "" || len(e.Name) > 253:
		err = fmt.Errorf("names %+v", e)
	case e.EventTime.IsZero() || e.Action == "" || e.Reason == "" || e.ReportingController == "" || e.ReportingInstance != Node:
		err = fmt.Errorf("incomplete: %+v", e)
	case len(e.Note) > 1024 || e.Type != "Normal" && e.Type != "Warning":
		err = fmt.Errorf("note of %d bytes, type %s", len(e.Note), e.Type)
	}
	if err != nil {
		s.t.Errorf("event: %v", err)
		reject(w, http.StatusUnprocessableEntity)
		return
	}
	w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
	w.WriteHeader(http.StatusCreated)
	_, _ = w.Write(body)
	s.Events <- e
}
