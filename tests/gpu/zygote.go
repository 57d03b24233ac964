// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// A zygote is a zygote.py: it has imported what its servers need, and forks them.
type zygote struct {
	*worker
	b        *bench
	s        *scheduler // of its servers; nil: they are native
	listener net.Listener
	one      sync.Mutex // who forks
}

// zygote starts one.
func (x *suspendBench) zygote(ctx context.Context, name string, s *scheduler) (*zygote, error) {
	env, _, _, err := x.asUser(suspendUser, s)
	if err != nil {
		return nil, err
	}
	kind := "torch"
	if x.simulated {
		kind = "driver"
	}
	address := filepath.Join(swapDir, name+".sock")
	_ = os.Remove(address) // of a run before
	listener, err := net.Listen("unix", address)
	if err != nil {
		return nil, err
	}
	w, err := startWorker(x.python, x.script("zygote.py"), name, filepath.Join(x.results, "suspend-stderr.txt"), append(env, "OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore"), kind)
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	z := &zygote{worker: w, b: x.bench, s: s, listener: listener}
	if err := w.call(ctx, loadWithin, map[string]any{"op": "load"}, nil); err != nil {
		z.end()
		return nil, err
	}
	return z, nil
}

// end ends it and its servers.
func (z *zygote) end() {
	_ = z.kill(errors.New("the step is over"))
	_ = z.listener.Close()
}

// A modelServer is a server of loads/server.py.
type modelServer struct {
	pid, user uint32
	url       string
	conn      net.Conn
	mu        sync.Mutex // one request at a time, so that answers can be compared
}

// startAll starts n servers, some at the same time, those of users from the first one on, until
// one fails. After each of them comes after, if it is not nil, before the next one.
func (z *zygote) startAll(ctx context.Context, first, n, parallel int, words []string, after func(*modelServer) error) (all []*modelServer, errs []error) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	all = make([]*modelServer, n)
	free := make(chan struct{}, parallel)
	for i := range n {
		free <- struct{}{}
		mu.Lock()
		failed := len(errs) > 0
		mu.Unlock()
		if failed {
			break
		}
		wg.Go(func() {
			defer func() { <-free }()
			v, err := z.fork(ctx, first+i, words)
			if err == nil && after != nil {
				err = after(v)
			}
			mu.Lock()
			defer mu.Unlock()
			if all[i] = v; err != nil {
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	return slices.DeleteFunc(all, func(v *modelServer) bool { return v == nil }), errs
}

// fork starts server i and waits until it is ready.
func (z *zygote) fork(ctx context.Context, i int, words []string) (*modelServer, error) {
	env, _, who, err := z.b.asUser(suspendUser+1+i, z.s)
	if err != nil {
		return nil, err
	}
	variables := map[string]string{}
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		variables[name] = value
	}
	v := &modelServer{user: who.Uid}
	var said struct{ PID uint32 }
	z.one.Lock()
	err = z.call(ctx, suspendCall, map[string]any{"op": "fork", "user": who.Uid, "env": variables, "address": z.listener.Addr().String(), "words": words}, &said)
	if err == nil {
		v.conn, err = z.listener.Accept() // it has connected
	}
	z.one.Unlock()
	if err != nil {
		return nil, err
	}
	v.pid = said.PID
	defer context.AfterFunc(ctx, func() { _ = v.conn.SetDeadline(time.Now()) })()
	_ = v.conn.SetReadDeadline(time.Now().Add(buildWithin))
	line, err := bufio.NewReader(v.conn).ReadBytes('\n')
	var ready struct{ Port int }
	if err == nil {
		err = json.Unmarshal(line, &ready)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("server %d is not ready: %w: %s", i, err, z.tail()), v.conn.Close())
	}
	v.url = fmt.Sprintf("http://127.0.0.1:%d/", ready.Port)
	return v, nil
}

var asking = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

// ask has it answer a request that is due at a time.
func (v *modelServer) ask(ctx context.Context, due time.Time, where string) (a answer) {
	a.where = where
	ctx, cancel := context.WithTimeout(ctx, suspendCall)
	defer cancel()
	v.mu.Lock()
	defer v.mu.Unlock()
	prompt := make([]int, serverPrompt)
	for i := range prompt {
		prompt[i] = 1 + i*31%89
	}
	body, _ := json.Marshal(map[string]any{"prompt": prompt, "max_tokens": serverOutput})
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, v.url, bytes.NewReader(body))
	if err != nil {
		a.err = err
		return a
	}
	r, err := asking.Do(request)
	if err != nil {
		a.err = fmt.Errorf("the server of user %d: %w", v.user, err)
		return a
	}
	defer r.Body.Close()
	tokens := bufio.NewReader(r.Body)
	if _, err = tokens.Peek(1); err == nil {
		a.first = time.Since(due).Seconds()
		var text []byte
		text, err = io.ReadAll(tokens)
		a.tokens = string(text)
	}
	a.total = time.Since(due).Seconds()
	if n := strings.Count(a.tokens, "\n"); err != nil || n != serverOutput {
		a.err = fmt.Errorf("the server of user %d sent %d tokens: %v", v.user, n, err)
	}
	return a
}
