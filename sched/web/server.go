// SPDX-License-Identifier: Apache-2.0

package web

import (
	"context"
	"crypto/subtle"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/netutil"

	"github.com/nvshare/nvshare/sched/api"
)

//go:embed page/*.* page/uplot/uPlot.* page/uplot/LICENSE
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

// Explainer is a source that also says what nvsharectl why does.
type Explainer interface {
	Why(ctx context.Context, tenant string) (string, error)
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

func pageFiles() fs.FS {
	files, err := fs.Sub(page, "page")
	if err != nil {
		panic(err)
	}
	return files
}

// Handler serves the page.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(pageFiles()))
	mux.HandleFunc("GET /api/now", s.serveNow)
	mux.HandleFunc("GET /api/history", s.serveHistory)
	mux.HandleFunc("GET /api/why", s.serveWhy)
	return s.guard(mux)
}

// guard refuses who may not see the page.
func (s *Server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'self'; img-src data:; frame-ancestors 'none'")
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
	now := s.now()
	s.mu.Unlock()
	answer(w, now)
}

func (s *Server) serveHistory(w http.ResponseWriter, _ *http.Request) {
	out := struct {
		GPUs  map[string]Day `json:"gpus"`
		Hours []Hours        `json:"hours"`
	}{GPUs: map[string]Day{}}
	s.mu.Lock()
	out.Hours = s.history.hours()
	for uuid := range s.history.buckets {
		out.GPUs[uuid] = s.history.day(uuid)
	}
	s.mu.Unlock()
	answer(w, out)
}

// serveWhy says where a tenant's time went, or how to ask it.
func (s *Server) serveWhy(w http.ResponseWriter, r *http.Request) {
	tenant := r.URL.Query().Get("tenant")
	text := fmt.Sprintf("on this node: sudo nvsharectl why %q\n", tenant)
	if e, ok := s.source.(Explainer); ok {
		said, err := e.Why(r.Context(), tenant)
		if text = said; err != nil {
			text = fmt.Sprintf("%v\n", err)
		}
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = io.WriteString(w, text)
}

const (
	// minToken is how many characters a token has at least.
	minToken = 16
	// tokenLetters are the characters of tokens: those that mean themselves in the query of
	// an address and in a cookie. A "+" there is a space, and a cookie has no ";".
	tokenLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._~-"
	// howToToken is said to who gives another one.
	howToToken = "make one with: openssl rand -hex 24"
	// MaxConns is how many connections a page has at a time.
	MaxConns = 16
	// patience bounds the reading of a request, and writePatience that of an answer.
	patience      = 10 * time.Second
	writePatience = time.Minute
)

// Page is a server with an open port.
type Page struct {
	handler  http.Handler
	watch    func(context.Context)
	listener net.Listener
}

// Listen opens the port. tokenFile has the token that requests need; "": there is none,
// and the address has to be one of loopback. The caller calls Serve or Close.
func Listen(address, tokenFile string, source Source) (*Page, error) {
	token, err := Check(address, tokenFile)
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("serve the page: %w (choose another address)", err)
	}
	s := New(source, token)
	return &Page{s.Handler(), s.Watch, netutil.LimitListener(l, MaxConns)}, nil
}

// Check returns the token, or why a page cannot be served so.
func Check(address, tokenFile string) (token string, err error) {
	if _, _, err := net.SplitHostPort(address); err != nil {
		return "", fmt.Errorf("address of the page: %w (give host:port, like 127.0.0.1:9403)", err)
	}
	if tokenFile == "" {
		if !isLoopback(address) {
			return "", fmt.Errorf("others reach the address %s, so the page needs a token: name a file that has one", address)
		}
		return "", nil
	}
	text, err := os.ReadFile(tokenFile)
	if err != nil {
		return "", fmt.Errorf("read the page's token: %w", err)
	}
	if token = strings.TrimSpace(string(text)); len(token) < minToken {
		return "", fmt.Errorf("%s has a token of %d characters: %d are needed (%s)", tokenFile, len(token), minToken, howToToken)
	}
	if strings.ContainsFunc(token, func(r rune) bool { return !strings.ContainsRune(tokenLetters, r) }) {
		return "", fmt.Errorf("%s has a token with other characters than letters, digits and . _ ~ -, which would not open the page in a browser (%s)", tokenFile, howToToken)
	}
	return token, nil
}

// Addr is where the page is.
func (p *Page) Addr() net.Addr { return p.listener.Addr() }

// Close closes the port, if Serve is not called.
func (p *Page) Close() { p.listener.Close() }

// Serve answers, and asks the source, until ctx is done.
func (p *Page) Serve(ctx context.Context) error {
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		p.watch(ctx)
	}()
	server := &http.Server{Handler: p.handler, ReadTimeout: patience, WriteTimeout: writePatience, IdleTimeout: writePatience,
		MaxHeaderBytes: 16 << 10, ErrorLog: log.New(io.Discard, "", 0)} // whoever asks can cause its errors
	defer context.AfterFunc(ctx, func() { server.Close() })()
	err := server.Serve(p.listener)
	if !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	<-watched
	return nil
}
