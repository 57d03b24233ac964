// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"go.yaml.in/yaml/v3"
)

const monitoring = "../../deployments/helm/nvshare/monitoring/"

var metricName = regexp.MustCompile(`nvshare_[a-z_]+`)

// expressions returns the queries of the dashboard, by panel.
func expressions(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(monitoring + "dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			ID      int
			Title   string
			Targets []struct{ RefID, Expr string }
		}
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			// As Grafana puts in what "All" means.
			all[p.Title+" "+target.RefID] = strings.NewReplacer("$gpu", ".*", "$node", ".*", "$namespace", ".*", "$__rate_interval", "1m").Replace(target.Expr)
		}
	}
	if len(all) < 20 {
		t.Fatalf("found %d queries in the dashboard: its form is another", len(all))
	}
	return all
}

// The dashboard shows what of tenants is off their GPU, and asks for no metric that there
// is not.
func TestDashboardNamesMetrics(t *testing.T) {
	listed, err := os.ReadFile("../../sched/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	shown := map[string]bool{}
	for panel, query := range expressions(t) {
		for _, name := range metricName.FindAllString(query, -1) {
			shown[name] = true
			if !strings.Contains(string(listed), "`"+strings.TrimSuffix(name, "_bucket")+"`") {
				t.Errorf("%s: sched/metrics.md has no %s", panel, name)
			}
		}
	}
	for _, name := range []string{"nvshare_gpu_suspended_clients", "nvshare_gpu_suspends_total", "nvshare_gpu_migrations_total", "nvshare_arena_file_bytes"} {
		if !shown[name] {
			t.Errorf("the dashboard does not show %s", name)
		}
	}
}

// rule is an alert or a recorded series.
type rule struct {
	Alert, Record, Expr string
	Annotations         map[string]string
}

func alerts(t *testing.T) []rule { return rulesOf(t, "alerts.yaml") }

// recorded are the series of pods.
func recorded(t *testing.T) []rule { return rulesOf(t, "recording.yaml") }

func rulesOf(t *testing.T, name string) (all []rule) {
	t.Helper()
	text, err := os.ReadFile(monitoring + name)
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Groups []struct{ Rules []rule } }
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) < 5 {
		t.Fatalf("found %d rules in %s: the form of the file is another", len(all), name)
	}
	return all
}

// Pods' GPU time and memory: recorded of metrics that there are, in the dashboard, and in no other rule's
// place.
func TestRecordedSeries(t *testing.T) {
	listed, err := os.ReadFile("../../sched/metrics.md")
	if err != nil {
		t.Fatal(err)
	}
	shown := ""
	for _, query := range expressions(t) {
		shown += query + "\n"
	}
	series := regexp.MustCompile(`nvshare:[a-z_:]+`)
	names := map[string]bool{}
	for _, r := range recorded(t) {
		if names[r.Record] = true; !series.MatchString(r.Record) || !strings.Contains(shown, r.Record+"{") {
			t.Errorf("the dashboard does not show %q", r.Record)
		}
		for _, name := range metricName.FindAllString(r.Expr, -1) {
			if !strings.Contains(string(listed), "`"+name+"`") {
				t.Errorf("%s: sched/metrics.md has no %s", r.Record, name)
			}
		}
		for _, name := range series.FindAllString(r.Expr, -1) { // of an earlier rule
			if !names[name] {
				t.Errorf("%s is recorded of %s, which is not yet there", r.Record, name)
			}
		}
	}
	for _, name := range series.FindAllString(shown, -1) {
		if !names[name] {
			t.Errorf("the dashboard shows %s, which nobody records", name)
		}
	}
}

// Each alert has a section of the runbooks, and leads there.
func TestAlertsHaveRunbooks(t *testing.T) {
	const page = "deployments/kubernetes/runbooks.md"
	const site = "https://github.com/nvshare/nvshare/blob/main/"
	text, err := os.ReadFile("../../" + page)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range alerts(t) {
		if !strings.Contains(string(text), "\n## "+a.Alert+"\n") {
			t.Errorf("%s has no section %s", page, a.Alert)
		}
		if want := site + page + "#" + strings.ToLower(a.Alert); a.Annotations["runbook_url"] != want {
			t.Errorf("%s leads to %q, want %q", a.Alert, a.Annotations["runbook_url"], want)
		}
	}
}

func need(t *testing.T, program string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err != nil {
		t.Skipf("LEFT OUT: %s is not on the path (make test-unit unpacks it), so dashboard and alerts were not evaluated", program)
	}
	return path
}

// Each alert fires at what it is for, and only then: testdata/alerts_test.yaml says when.
func TestAlertsFire(t *testing.T) {
	promtool := need(t, "promtool")
	for _, args := range [][]string{{"check", "rules", monitoring + "alerts.yaml", monitoring + "recording.yaml"}, {"test", "rules", "testdata/alerts_test.yaml", "testdata/recording_test.yaml"}} {
		if out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args, err, out)
		}
	}
	text, err := os.ReadFile("testdata/alerts_test.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range alerts(t) {
		if !strings.Contains(string(text), `alertname="`+a.Alert+`"`) {
			t.Errorf("testdata/alerts_test.yaml does not try %s", a.Alert)
		}
	}
}

// prometheus is one that scrapes a bed.
type prometheus struct{ url string }

// startPrometheus starts one with the rules, that scrapes an address.
func startPrometheus(t *testing.T, b *Bed, target string) *prometheus {
	t.Helper()
	program := need(t, "prometheus")
	rules, err := filepath.Abs(monitoring)
	b.must(t, err)
	config := fmt.Sprintf("global: {scrape_interval: 200ms, evaluation_interval: 200ms}\nrule_files: [%q]\nscrape_configs:\n- job_name: nvshare\n  static_configs: [{targets: [%q]}]\n", rules+"/*.yaml", target)
	b.must(t, os.WriteFile(b.Dir+"/prometheus.yaml", []byte(config), 0o644))
	logFile := b.Dir + "/prometheus.log"
	log, err := os.Create(logFile)
	b.must(t, err)
	defer log.Close()
	cmd := exec.Command(program, "--config.file="+b.Dir+"/prometheus.yaml", "--storage.tsdb.path="+b.Dir+"/tsdb", "--web.listen-address=127.0.0.1:0")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	b.must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	said := regexp.MustCompile(`msg="Listening on" address=(\S+)`)
	p := &prometheus{}
	b.must(t, b.Await(t.Context(), func() error {
		text, err := os.ReadFile(logFile)
		if m := said.FindSubmatch(text); m != nil {
			p.url = "http://" + string(m[1])
			return nil
		}
		return fmt.Errorf("prometheus does not listen: %w\n%s", err, text)
	}))
	return p
}

// get asks for JSON.
func (p *prometheus) get(t *testing.T, path string, answer any) error {
	client := &http.Client{Timeout: Patience}
	defer client.CloseIdleConnections()
	r, err := client.Get(p.url + path)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err == nil {
		err = json.Unmarshal(text, answer)
	}
	if err != nil {
		return fmt.Errorf("%s: %w: %s", path, err, text)
	}
	return nil
}

// series returns how many series a query has. An error of the query ends the test.
func (p *prometheus) series(t *testing.T, query string) (int, error) {
	t.Helper()
	var answer struct {
		Status, Error, ErrorType string
		Data                     struct{ Result []json.RawMessage }
	}
	if err := p.get(t, "/api/v1/query?query="+url.QueryEscape(query), &answer); err != nil {
		return 0, err
	}
	if answer.ErrorType == "bad_data" {
		t.Fatalf("%s: %s", query, answer.Error)
	}
	if answer.Status != "success" {
		return 0, fmt.Errorf("%s: %s", query, answer.Error)
	}
	return len(answer.Data.Result), nil
}

func (p *prometheus) awaitSeries(t *testing.T, b *Bed, what, query string) {
	t.Helper()
	if err := b.Await(t.Context(), func() error {
		n, err := p.series(t, query)
		if err == nil && n == 0 {
			err = fmt.Errorf("no series")
		}
		return err
	}); err != nil {
		t.Errorf("%s: %s: %v", what, query, err)
	}
}

// A real Prometheus scrapes a scheduler with tenants. Each query of the dashboard has
// series, each alert is evaluated, each metric that an alert names is there, and the alert
// for a scheduler that is down fires when it is.
func TestDashboardAndAlertsInPrometheus(t *testing.T) {
	need(t, "prometheus")
	b := newBed(t, "--anti-thrash", "on", "--tq", "20ms", "--swap-memory", "1Gi", "--metrics", "--metrics-addr", "127.0.0.1:0")
	b.must(t, b.Tenant("cuda-busy", "--seconds", "600"))
	b.must(t, b.Tenant("cuda-busy", "--seconds", "600", "--mem-mib", "64"))
	b.awaitTenants(t, 1)
	at, err := b.Said(t.Context(), "metrics: http://")
	b.must(t, err)
	p := startPrometheus(t, b, strings.TrimSuffix(at, "/metrics"))
	for panel, query := range expressions(t) {
		if strings.Contains(query, "nvshare:pod_") { // there is no pod here
			b.must(t, b.Await(t.Context(), func() error {
				_, err := p.series(t, query)
				return err
			}))
			continue
		}
		p.awaitSeries(t, b, panel, query)
	}
	for _, a := range alerts(t) {
		if _, err := p.series(t, a.Expr); err != nil {
			t.Errorf("%s: %v", a.Alert, err)
		}
		for _, name := range metricName.FindAllString(a.Expr, -1) {
			p.awaitSeries(t, b, a.Alert, name)
		}
	}
	type ruleAnswer struct {
		Data struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError, State string }
			}
		}
	}
	// rules awaits a look at all of them.
	rules := func(look func(name, health, state, lastError string) error) {
		t.Helper()
		b.must(t, b.Await(t.Context(), func() error {
			var answer ruleAnswer
			if err := p.get(t, "/api/v1/rules", &answer); err != nil {
				return err
			}
			n := 0
			for _, g := range answer.Data.Groups {
				for _, r := range g.Rules {
					if err := look(r.Name, r.Health, r.State, r.LastError); err != nil {
						return err
					}
					n++
				}
			}
			if want := len(alerts(t)) + len(recorded(t)); n != want {
				return fmt.Errorf("%d rules, want %d", n, want)
			}
			return nil
		}))
	}
	rules(func(name, health, _, lastError string) error {
		if health != "ok" {
			return fmt.Errorf("%s is %s: %s", name, health, lastError)
		}
		return nil
	})
	b.must(t, b.EndScheduler())
	rules(func(name, _, state, _ string) error {
		if name == "NvshareSchedulerDown" && state == "inactive" {
			return fmt.Errorf("%s is %s, and the scheduler is down", name, state)
		}
		return nil
	})
}
