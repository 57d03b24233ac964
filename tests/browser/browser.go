// SPDX-License-Identifier: Apache-2.0

package web

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// browserPatience is longer than a browser takes on any machine.
const browserPatience = 8 * time.Minute

// browser is a tab of a headless Chromium, which is driven through a pipe by its DevTools protocol.
type browser struct {
	t       *testing.T
	in      io.Writer
	out     *bufio.Reader
	session string
	calls   int
	faults  []string // what the page threw, and what was not loaded
}

func newBrowser(t *testing.T) *browser {
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
	ctx, cancel := context.WithTimeout(context.Background(), browserPatience)
	home := t.TempDir()
	cmd := exec.CommandContext(ctx, path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe", "--user-data-dir="+home)
	cmd.Env = append(os.Environ(), "HOME="+home)
	cmd.ExtraFiles = []*os.File{toChild, fromChild} // 3 and 4, as Chromium has them
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	toChild.Close()
	fromChild.Close()
	b := &browser{t: t, in: in, out: bufio.NewReader(out)}
	t.Cleanup(func() {
		b.call("Browser.close", nil, nil)
		_ = cmd.Wait()
		cancel()
		in.Close()
		out.Close()
	})
	var made struct{ TargetID, SessionID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &made)
	b.call("Target.attachToTarget", map[string]any{"targetId": made.TargetID, "flatten": true}, &made)
	b.session = made.SessionID
	for _, domain := range []string{"Page", "Runtime", "Log"} {
		b.call(domain+".enable", nil, nil)
	}
	return b
}

// call calls a method and reads until its answer.
func (b *browser) call(method string, params map[string]any, answer any) {
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
			b.faults = append(b.faults, string(text))
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

// eval returns the value of an expression in the page, which may be a promise.
func (b *browser) eval(expression string) (value any) {
	b.t.Helper()
	var got struct {
		Result           struct{ Value any }
		ExceptionDetails json.RawMessage
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "awaitPromise": true, "returnByValue": true}, &got)
	if got.ExceptionDetails != nil {
		b.t.Errorf("%s: %s", expression, got.ExceptionDetails)
	}
	return got.Result.Value
}

// open opens a page in a window of a width, and waits until its pictures are there.
func (b *browser) open(url string, width int, scheme string) {
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": false}, nil)
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]any{{"name": "prefers-color-scheme", "value": scheme}}}, nil)
	b.call("Page.navigate", map[string]any{"url": url}, nil)
	b.eval(`new Promise((done) => { const see = () => document.querySelectorAll("canvas").length > 2 && present ? setTimeout(done, 50) : requestAnimationFrame(see); see(); })`)
}

// shoot writes a picture of the whole page into a directory.
func (b *browser) shoot(dir, name string) {
	var shot struct{ Data []byte }
	b.call("Page.captureScreenshot", map[string]any{"captureBeyondViewport": true}, &shot)
	if err := os.WriteFile(filepath.Join(dir, name+".png"), shot.Data, 0o644); err != nil {
		b.t.Error(err)
	}
}

// The page shows it all in a browser of any width, light and dark, and a tenant's name stays a text.
// NVSHARE_TEST_SCREENSHOT is a directory for pictures of it.
func TestPageInBrowser(t *testing.T) {
	b := newBrowser(t)
	src := &source{}
	s := New(src, "")
	for i := range 61 { // an hour ago began what is drawn as history
		src.used = time.Duration(i) * 45 * time.Second
		s.look(t.Context(), time.Now().Add(time.Duration(i-60)*time.Minute))
	}
	server := httptest.NewServer(s.Handler())
	defer server.Close()
	for _, width := range []int{360, 768, 1440} {
		for _, scheme := range []string{"light", "dark"} {
			b.open(server.URL, width, scheme)
			name := fmt.Sprintf("%d-%s", width, scheme)
			text := fmt.Sprint(b.eval(`document.body.innerText`))
			for _, want := range []string{
				"Problems: 1. Scheduler 0.1.0", "<i>a problem</i>", "end the process", "ml/train-a/main", "<b onmouseover=x>&", "74.9 %", "25 % of 25 %", "4 GiB of 8 GiB",
				"512 MiB on the host, 1 GiB in files", "turns: tenants keep the GPU busy", "GPU 0: no; 6 GiB and 70 % of its time are not promised", "ml/train-a/main 8 GiB and 30 %", "outside Kubernetes", "0.750",
			} {
				if !strings.Contains(text, want) {
					t.Errorf("%s: %q is not in the page:\n%s", name, want, text)
				}
			}
			if over := b.eval(`document.documentElement.scrollWidth - innerWidth`); over != 0.0 {
				t.Errorf("%s: the page is %v pixels wider than its window", name, over)
			}
			if blank := b.eval(`[...document.querySelectorAll("canvas")].filter((c) => !c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some(Boolean)).length`); blank != 0.0 {
				t.Errorf("%s: %v pictures are empty", name, blank)
			}
			if dir := os.Getenv("NVSHARE_TEST_SCREENSHOT"); dir != "" {
				b.shoot(dir, name)
			}
		}
	}
	zooms(b)
	if len(b.faults) > 0 {
		t.Errorf("the page has faults: %s", b.faults)
	}
}

// zooms drags over a quarter of the timeline: it is shown alone, also after the next answer, until
// a double-click.
func zooms(b *browser) {
	const shown = `(() => { const x = [...sections.values()][0].minute.chart.scales.x; return Math.round(x.max - x.min); })()`
	at := b.eval(`(() => { const r = document.querySelector(".turns .u-over").getBoundingClientRect(); return [r.left, r.top, r.width]; })()`).([]any)
	left, top, width := at[0].(float64), at[1].(float64)+10, at[2].(float64)
	mouse := func(kind string, x float64, clicks int) {
		b.call("Input.dispatchMouseEvent", map[string]any{"type": kind, "x": x, "y": top, "button": "left", "clickCount": clicks}, nil)
	}
	again := func() { b.eval(`ask("api/now").then((now) => { present = now; show(); })`) }
	mouse("mousePressed", left+width/2, 1)
	mouse("mouseMoved", left+width*3/4, 1)
	mouse("mouseReleased", left+width*3/4, 1)
	if again(); b.eval(shown) != 15.0 {
		b.t.Errorf("a quarter of a minute shows %v s", b.eval(shown))
	}
	for clicks := 1; clicks <= 2; clicks++ {
		mouse("mousePressed", left+width/2, clicks)
		mouse("mouseReleased", left+width/2, clicks)
	}
	if again(); b.eval(shown) != 60.0 {
		b.t.Errorf("after a double-click %v s are shown", b.eval(shown))
	}
}
