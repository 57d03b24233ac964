// SPDX-License-Identifier: Apache-2.0

package web

import (
	"fmt"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/tests/browser"
)

// The page shows it all in a browser of any width, light and dark, and a tenant's name stays a text.
// NVSHARE_TEST_SCREENSHOT is a directory for pictures of it.
func TestPageInBrowser(t *testing.T) {
	b := browser.Open(t)
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
			b.Show(server.URL, width, scheme, `document.querySelectorAll("canvas").length > 2 && present`)
			name := fmt.Sprintf("%d-%s", width, scheme)
			text := fmt.Sprint(b.Eval(`document.body.innerText`))
			for _, want := range []string{
				"Problems: 1. Scheduler 0.1.0", "<i>a problem</i>", "end the process", "ml/train-a/main", "<b onmouseover=x>&", "74.9 %", "25 % of 25 %", "4 GiB of 8 GiB",
				"512 MiB on the host, 1 GiB in files", "turns of 100ms (auto: tenants keep the GPU busy)", "GPU 0: no; 6 GiB and 70 % of its time are not promised", "ml/train-a/main 8 GiB and 30 %", "outside Kubernetes", "0.750",
			} {
				if !strings.Contains(text, want) {
					t.Errorf("%s: %q is not in the page:\n%s", name, want, text)
				}
			}
			if over := b.Eval(`document.documentElement.scrollWidth - innerWidth`); over != 0.0 {
				t.Errorf("%s: the page is %v pixels wider than its window", name, over)
			}
			if blank := b.Eval(`[...document.querySelectorAll("canvas")].filter((c) => !c.getContext("2d").getImageData(0, 0, c.width, c.height).data.some(Boolean)).length`); blank != 0.0 {
				t.Errorf("%s: %v pictures are empty", name, blank)
			}
			b.Shoot(os.Getenv("NVSHARE_TEST_SCREENSHOT"), name)
		}
	}
	zooms(t, b)
	if len(b.Faults) > 0 {
		t.Errorf("the page has faults: %s", b.Faults)
	}
}

// zooms drags over a quarter of the timeline: it is shown alone, also after the next answer, until
// a double-click.
func zooms(t *testing.T, b *browser.Tab) {
	const shown = `(() => { const x = [...sections.values()][0].minute.chart.scales.x; return Math.round(x.max - x.min); })()`
	at := b.Eval(`(() => { const r = document.querySelector(".turns .u-over").getBoundingClientRect(); return [r.left, r.top, r.width]; })()`).([]any)
	left, top, width := at[0].(float64), at[1].(float64)+10, at[2].(float64)
	mouse := func(kind string, x float64, clicks int) {
		b.Call("Input.dispatchMouseEvent", map[string]any{"type": kind, "x": x, "y": top, "button": "left", "clickCount": clicks}, nil)
	}
	again := func() { b.Eval(`ask("api/now").then((now) => { present = now; show(); })`) }
	mouse("mousePressed", left+width/2, 1)
	mouse("mouseMoved", left+width*3/4, 1)
	mouse("mouseReleased", left+width*3/4, 1)
	if again(); b.Eval(shown) != 15.0 {
		t.Errorf("a quarter of a minute shows %v s", b.Eval(shown))
	}
	for clicks := 1; clicks <= 2; clicks++ {
		mouse("mousePressed", left+width/2, clicks)
		mouse("mouseReleased", left+width/2, clicks)
	}
	if again(); b.Eval(shown) != 60.0 {
		t.Errorf("after a double-click %v s are shown", b.Eval(shown))
	}
}
