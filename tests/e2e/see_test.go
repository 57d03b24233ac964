//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// Metrics, events and the status show pods by their names.
func TestPodsAreSeen(t *testing.T) {
	ctx := within(t)
	const addr = "127.0.0.1:9402"
	restartScheduler(t, "--metrics", "--metrics-addr", addr, "--metrics-processes", "16")
	t.Cleanup(func() { restartScheduler(t) })
	scrape := func(path string) (code int, text string, err error) {
		r, err := http.Get("http://" + addr + path)
		if err != nil {
			return 0, "", err
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		return r.StatusCode, string(body), err
	}

	from := judge.Now()
	pods := []*node.Pod{busyPod(t, "see-a"), busyPod(t, "see-b")}
	for _, pod := range pods {
		awaitTurns(t, ctx, pod.Name, from, turnsEach)
	}
	text := ""
	// The scheduler answers some requests a second only.
	check(t, node.UntilEvery(ctx, time.Second, "the pods' metrics", func() error {
		code, body, err := scrape("/metrics")
		text = body
		if err != nil || code != http.StatusOK {
			return errors.Join(err, fmt.Errorf("status %d: %s", code, body))
		}
		for _, pod := range pods {
			info := fmt.Sprintf(`host_pid="%d",namespace="default",pod="%s"} 1`, pod.PID(), pod.Name)
			if !strings.Contains(body, info) {
				return fmt.Errorf("no client_info with %s in:\n%s", info, body)
			}
		}
		return nil
	}))
	gpu := fmt.Sprintf(`{gpu_index="0",gpu_uuid="%s"}`, judge.UUID(0))
	for _, want := range []string{
		"nvshare_gpu_utilization_ratio" + gpu,
		"nvshare_gpu_memory_used_bytes" + gpu,
		"nvshare_scheduler_running_clients" + gpu,
		"nvshare_gpu_handover_seconds_count" + gpu,
		"nvshare_gpu_processes" + gpu + " 2",
		"nvshare_gpu_unmanaged_processes" + gpu + " 0",
		"nvshare_nvml_up 1",
		"nvshare_scheduler_healthy 1",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s", want)
		}
	}
	// A drain of a second, on a machine that is busy, is a tenant's problem until the next one.
	check(t, node.UntilEvery(ctx, time.Second, "/healthz without problems", func() error {
		code, body, err := scrape("/healthz")
		if err == nil && (code != http.StatusOK || body != "ok\n") {
			err = fmt.Errorf("%d %q", code, body)
		}
		return err
	}))

	check(t, node.Until(ctx, "the pods' turns among the events", func() error {
		happened, err := shared.Ctl(ctx, "events")
		if err != nil {
			return err
		}
		for _, pod := range pods {
			who := fmt.Sprintf("default/%s/main (pid %d): ", pod.Name, pod.PID())
			for _, what := range []string{
				"register       " + who + "uses GPUs through the shim",
				"grant          " + who + "waited",
				"release        " + who, // after a revoke or, when the machine starves the pod, without work
			} {
				if !strings.Contains(happened, what) {
					return fmt.Errorf("no event %q in:\n%s", what, happened)
				}
			}
		}
		return nil
	}))
	for _, args := range [][]string{nil, {"top", "--once"}} {
		screen := must(shared.Ctl(ctx, args...))(t)
		for _, pod := range pods {
			if !strings.Contains(screen, "default/"+pod.Name+"/main") {
				t.Errorf("nvsharectl %v does not show %s:\n%s", args, pod.Name, screen)
			}
		}
	}
}
