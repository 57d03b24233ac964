// SPDX-License-Identifier: Apache-2.0

package web

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/net/netutil"
)

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
	server   *Server
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
	return &Page{New(source, token), netutil.LimitListener(l, MaxConns)}, nil
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
		p.server.Watch(ctx)
	}()
	server := &http.Server{Handler: p.server.Handler(), ReadTimeout: patience, WriteTimeout: writePatience, IdleTimeout: writePatience,
		MaxHeaderBytes: 16 << 10, ErrorLog: log.New(io.Discard, "", 0)} // whoever asks can cause its errors
	defer context.AfterFunc(ctx, func() { server.Close() })()
	err := server.Serve(p.listener)
	if !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	<-watched
	return nil
}
