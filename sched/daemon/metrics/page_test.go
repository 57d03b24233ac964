// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write ../../metrics.md anew")

// page lists all metrics, as sched/metrics.md has them.
func page() string {
	var b strings.Builder
	b.WriteString(`# Metrics

What the scheduler serves at ` + "`/metrics`" + ` on port 9402 with ` + "`NVSHARE_METRICS_ENABLE=1`" + ` or
` + "`--metrics`" + `. ` + "`/healthz`" + ` has status 503 while the scheduler itself has a problem. A *client* is
a process on one GPU, a *tenant* a container or one user's processes outside of
containers. ` + "`nvshare_client_*`" + ` is there with ` + "`--metrics-processes`" + ` only. This page is written by
` + "`go test ./sched/daemon/metrics -run Page -update`" + `, from the names in ` + "`names.go`" + ` there.

| metric | labels | meaning |
|---|---|---|
`)
	for _, m := range metricNames {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", m.name, strings.Join(m.labels, ", "), strings.ReplaceAll(m.help, "|", "\\|"))
	}
	return b.String()
}

func TestPage(t *testing.T) {
	const path = "../../metrics.md"
	if *update {
		if err := os.WriteFile(path, []byte(page()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(text) != page() {
		t.Errorf("%s is not what names.go says: go test ./sched/daemon/metrics -run Page -update", path)
	}
}
