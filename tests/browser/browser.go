// SPDX-License-Identifier: Apache-2.0

// Package browser drives a headless Chromium for tests of pages.
package browser

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// patience is longer than a browser takes on any machine.
const patience = 8 * time.Minute

// A Tab is one of a headless Chromium, which is driven through a pipe by its DevTools protocol.
type Tab struct {
	Faults []string // what the page threw, and what was not loaded

	t       *testing.T
	in      io.Writer
	out     *bufio.Reader
	session string
	calls   int
}

// Open starts a browser, which ends with the test. Where there is none the test is skipped.
func Open(t *testing.T) *Tab {
	path, err := exec.LookPath("chromium")
	if err != nil {
		t.Skip("LEFT OUT: chromium is not installed (apt-get install chromium), so the page was not seen in a browser")
	}
	toChild, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	out, fromChild, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	home := t.TempDir()
	cmd := exec.CommandContext(ctx, path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "--user-data-dir="+home)
	cmd.Env = append(os.Environ(), "HOME="+home)
	cmd.ExtraFiles = []*os.File{toChild, fromChild} // 3 and 4, as Chromium has them
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	toChild.Close()
	fromChild.Close()
	b := &Tab{t: t, in: in, out: bufio.NewReader(out)}
	t.Cleanup(func() {
		b.Call("Browser.close", nil, nil)
		_ = cmd.Wait()
		cancel()
		in.Close()
		out.Close()
	})
	var made struct{ TargetID, SessionID string }
	b.Call("Target.createTarget", map[string]any{"url": "about:blank"}, &made)
	b.Call("Target.attachToTarget", map[string]any{"targetId": made.TargetID, "flatten": true}, &made)
	b.session = made.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log"} {
		b.Call(domain+".enable", nil, nil)
	}
	return b
}

// Call calls a method and reads until its answer.
func (b *Tab) Call(method string, params map[string]any, answer any) {
	b.t.Helper()
	b.calls++
	call := map[string]any{"id": b.calls, "method": method, "params": params}
	if b.session != "" && !strings.HasPrefix(method, "Browser.") {
		call["sessionId"] = b.session
	}
	text, err := json.Marshal(call)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := b.in.Write(append(text, 0)); err != nil {
		b.t.Fatal(err)
	}
	for {
		text, err := b.out.ReadBytes(0)
		if err != nil {
			b.t.Fatalf("%s: the browser has ended: %v", method, err)
		}
		var said struct {
			ID            int
			Method        string
			Result, Error json.RawMessage
		}
		if err := json.Unmarshal(text[:len(text)-1], &said); err != nil {
			b.t.Fatal(err)
		}
		switch {
		case said.Method == "Runtime.exceptionThrown", said.Method == "Log.entryAdded":
			b.Faults = append(b.Faults, string(text))
		case said.ID != b.calls:
		case said.Error != nil:
			b.t.Fatalf("%s: %s", method, said.Error)
		default:
			if answer != nil {
				if err := json.Unmarshal(said.Result, answer); err != nil {
					b.t.Fatal(err)
				}
			}
			return
		}
	}
}

// Eval returns the value of an expression in the page, which may be a promise.
func (b *Tab) Eval(expression string) (value any) {
	b.t.Helper()
	var got struct {
		Result           struct{ Value any }
		ExceptionDetails json.RawMessage
	}
	b.Call("Runtime.evaluate", map[string]any{"expression": expression, "awaitPromise": true, "returnByValue": true}, &got)
	if got.ExceptionDetails != nil {
		b.t.Errorf("%s: %s", expression, got.ExceptionDetails)
	}
	return got.Result.Value
}

// Show opens a page in a window of a width, and waits until an expression in it holds.
func (b *Tab) Show(url string, width int, scheme, ready string) {
	b.Call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false}, nil)
	b.Call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]any{{"name": "prefers-color-scheme", "value": scheme}}}, nil)
	b.Call("Page.navigate", map[string]any{"url": url}, nil)
	b.Eval(`new Promise((done) => { const see = () => ` + ready + ` ? setTimeout(done, 50) : requestAnimationFrame(see); see(); })`)
}

// Shoot writes a picture of the whole page into a directory; "": none.
func (b *Tab) Shoot(dir, name string) {
	if dir == "" {
		return
	}
	var shot struct{ Data []byte }
	b.Call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true}, &shot)
	if err := os.WriteFile(filepath.Join(dir, name+".png"), shot.Data, 0o644); err != nil {
		b.t.Error(err)
	}
}
