// SPDX-License-Identifier: Apache-2.0

// Command simgpu-judge prints who had a GPU when. With --exclusive it exits 1
// if two processes ever had one at the same time.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/tests/judge"
)

var errGuilty = errors.New("two processes had a GPU at the same time")

type options struct {
	dir       string
	output    string
	exclusive bool
	window    judge.Options
}

func main() {
	if err := command().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "simgpu-judge:", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	var o options
	c := &cobra.Command{
		Use:   "simgpu-judge [flags] [RECORD-FILE...]",
		Short: "Say who had a GPU when, from a simulated GPU's log or from record files",
		Long: "Reads the log in the simulated GPU's state directory, or, when files are named,\n" +
			"what cuda-busy --record wrote.",
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(_ *cobra.Command, files []string) error {
			return run(os.Stdout, o, files)
		},
	}
	dir := os.Getenv("NVSHARE_SIMGPU_DIR")
	if dir == "" {
		dir = "/run/nvshare-simgpu"
	}
	f := c.Flags()
	f.StringVar(&o.dir, "dir", dir, "state directory of the simulated GPU")
	f.StringVarP(&o.output, "output", "o", "table", "table or json")
	f.BoolVar(&o.exclusive, "exclusive", false, "exit 1 on any overlap, and when there is no work to judge")
	f.Int64Var(&o.window.Since, "since", 0, "ignore what was before, ns of the evidence's clock")
	f.Int64Var(&o.window.Until, "until", 0, "ignore what came after, ns of the evidence's clock")
	return c
}

func run(w io.Writer, o options, files []string) error {
	var t judge.Trace
	var err error
	if len(files) > 0 {
		t, err = judge.ReadRecords(files...)
	} else {
		t, err = judge.ReadLog(filepath.Join(o.dir, "log"))
	}
	if err != nil {
		return err
	}
	r := judge.Judge(t, o.window)
	switch o.output {
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		err = e.Encode(r)
	case "table":
		err = table(w, r)
	default:
		err = fmt.Errorf("unknown output %q (table or json)", o.output)
	}
	if err != nil {
		return err
	}
	if o.exclusive && len(r.GPUs) == 0 {
		return errors.New("no work on any GPU: nothing to judge")
	}
	if o.exclusive && r.Overlaps() > 0 {
		return errGuilty
	}
	return nil
}

func table(w io.Writer, r judge.Report) error {
	for _, g := range r.GPUs {
		fmt.Fprintf(w, "%s  %s\n", g.GPU, ms(g.End-g.Begin))
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(tw, "  TENANT\tSHARE\tBUSY\tTURNS\tLONGEST TURN\tLONGEST WAIT\tWORK")
		for _, u := range g.Tenants {
			fmt.Fprintf(tw, "  %s\t%.1f%%\t%s\t%d\t%s\t%s\t%d\n", u.Tenant, 100*u.Share, ms(u.Busy), u.Turns,
				ms(u.LongestTurn), ms(u.LongestWait), u.Work)
		}
		if err := tw.Flush(); err != nil {
			return err
		}
		fmt.Fprintf(w, "  overlaps: %d", g.Overlaps.Count)
		if p := g.Overlaps.First; p != nil {
			fmt.Fprintf(w, ", %s in all; first: %s (pid %d) %d..%d, %s (pid %d) %d..%d", ms(g.Overlaps.Total),
				p[0].Process.Tenant, p[0].Process.PID, p[0].Begin, p[0].End,
				p[1].Process.Tenant, p[1].Process.PID, p[1].Begin, p[1].End)
		}
		fmt.Fprintln(w)
	}
	if r.Lost > 0 {
		fmt.Fprintf(w, "the log's ring lost its %d oldest records: raise log_records\n", r.Lost)
	}
	return nil
}

func ms(ns int64) string {
	return time.Duration(ns).Round(100 * time.Microsecond).String()
}
