// SPDX-License-Identifier: Apache-2.0

package web

import (
	"context"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"io/fs"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

//go:embed page
var page embed.FS

// maxAnswers is how many answers with events are asked for at a time.
const maxAnswers = 16

// Pause is the time between two questions to the scheduler.
const Pause = 2 * time.Second

// Source answers for the scheduler.
type Source interface {
	Status(context.Context) (*api.StatusResponse, error)
	// Events returns what has happened since an earlier answer.
	Events(context.Context, *api.EventsRequest) (*api.EventsResponse, error)
}

// Server has what the page shows. Make one with New, and call Watch.
type Server struct {
	source Source
	token  string

	mu      sync.Mutex
	status  *api.StatusResponse
	err     error
	history *history
	next    api.EventsRequest
}

// New returns a server. Requests need the token, if it is not "".
func New(source Source, token string) *Server {
	return &Server{source: source, token: token, history: newHistory()}
}

// Watch asks the source again and again, until ctx is done.
func (s *Server) Watch(ctx context.Context) {
	for {
		s.look(ctx, time.Now())
		select {
		case <-time.After(Pause):
		case <-ctx.Done():
			return
		}
	}
}

func (s *Server) look(ctx context.Context, now time.Time) {
	r, err := s.source.Status(ctx)
	var answers []*api.EventsResponse
	req := api.EventsRequest{Since: s.next.Since, Run: s.next.Run}
	for range maxAnswers {
		if err != nil {
			break
		}
		e, none := s.source.Events(ctx, &req)
		if none != nil { // who sees only its own tenant gets no events
			break
		}
		answers = append(answers, e)
		req.Since, req.Run = e.Next, e.Run
		if len(e.Events) == 0 {
			break
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err = err; err != nil {
		return
	}
	s.status = r
	s.next.Since, s.next.Run = req.Since, req.Run
	s.history.add(now, r)
	for _, e := range answers {
		s.history.take(now, e)
	}
}

// Handler serves the page.
func (s *Server) Handler() http.Handler {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	mux.HandleFunc("GET /api/now", s.serveNow)
	mux.HandleFunc("GET /api/history", s.serveHistory)
	return s.guard(mux)
}

// guard refuses who may not see the page.
func (s *Server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		if s.token == "" {
			if !isLoopback(r.Host) {
				http.Error(w, "a page without a token answers on loopback names only", http.StatusForbidden)
				return
			}
			next.ServeHTTP(w, r)
			return
		}
		if given := r.URL.Query().Get("token"); s.isToken(given) && r.URL.Path == "/" {
			http.SetCookie(w, &http.Cookie{Name: cookie, Value: given, Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode})
			http.Redirect(w, r, "/", http.StatusSeeOther) // the token does not stay in the address
			return
		}
		bearer, _ := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		kept, err := r.Cookie(cookie)
		if !s.isToken(bearer) && (err != nil || !s.isToken(kept.Value)) {
			h.Set("WWW-Authenticate", "Bearer")
			http.Error(w, "a token is needed: open /?token=TOKEN, or send Authorization: Bearer TOKEN", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

const cookie = "nvshare_token"

func (s *Server) isToken(given string) bool {
	return subtle.ConstantTimeCompare([]byte(given), []byte(s.token)) == 1
}

// isLoopback tells whether the host of a request, or of an address to listen on, is this
// machine for itself.
func isLoopback(hostPort string) bool {
	host, _, err := net.SplitHostPort(hostPort)
	if err != nil {
		host = strings.Trim(hostPort, "[]")
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(v)
}

// The answers are made under the lock and written without it: a slow reader holds up nobody.
func (s *Server) serveNow(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	now := s.now(time.Now())
	s.mu.Unlock()
	answer(w, now)
}

func (s *Server) serveHistory(w http.ResponseWriter, _ *http.Request) {
	out := struct {
		GPUs  map[string][]Point `json:"gpus"`
		Hours []Hours            `json:"hours"`
	}{GPUs: map[string][]Point{}}
	s.mu.Lock()
	out.Hours = s.history.hours()
	for uuid := range s.history.buckets {
		out.GPUs[uuid] = s.history.points(uuid)
	}
	s.mu.Unlock()
	answer(w, out)
}
