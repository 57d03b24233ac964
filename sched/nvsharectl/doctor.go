// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/api"
)

// level is how bad a finding is.
type level string

const (
	pass level = "PASS"
	info level = "INFO" // of what nobody has asked for
	warn level = "WARN"
	fail level = "FAIL"
)

// finding is what one check of doctor found.
type finding struct {
	Check string `json:"check"`
	Level level  `json:"level"`
	Text  string `json:"text"`
	Fix   string `json:"fix,omitempty"` // a command, where one mends it
}

// patient is what doctor examines.
type patient struct {
	ctx       context.Context
	runDir    string
	self      string // path of this program
	root      string // of the host's file system
	simGPU    string
	shim      string                                       // path of the shim
	status    *api.StatusResponse                          // nil: no scheduler answers
	whyNot    error                                        // then
	program   func(shim string) (stderr string, err error) // runs a program under the shim
	versionOf func(program string) (string, error)         // asks podman
	smi       func() (string, error)                       // asks the driver about modes
	daemon    int                                          // process id of the scheduler; 0: not known
}

func (p *patient) at(path string) string { return cdi.OnHost(p.root, path) }

type doctorFlags struct {
	output, simGPU, shim string
	wait                 time.Duration
}

func doctorCommand(root *rootFlags, io streams) *cobra.Command {
	f := &doctorFlags{}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check this host, and say how to fix what does not work",
		Long: `doctor makes one check a line: PASS, INFO (what this host cannot do, and nobody
asks for), WARN (something does not work that not everybody needs) or FAIL,
with the command that fixes it. Exit status 1: a check has failed. With --wait
it tries again until none fails.`,
		Example: `  sudo nvsharectl doctor
  sudo nvsharectl doctor --wait 60      after an installation
  sudo nvsharectl doctor test           two programs prove shares and limits
  sudo nvsharectl doctor bundle         a file for a bug report`,
		Args: noCommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), root.runDir, io) },
	}
	fs := cmd.PersistentFlags()
	fs.StringVar(&f.simGPU, "simgpu", os.Getenv("NVSHARE_SIMGPU"), "examine the simulated GPU in `directory`; default from NVSHARE_SIMGPU")
	fs.StringVar(&f.shim, "shim", "", "`path` of the shim (default: where the plugin or the installation puts it)")
	addForm(cmd, &f.output, "", "text", "json", "yaml")
	cmd.Flags().Var((*durationFlag)(&f.wait), "wait", "try again for this `time`, in seconds or with a unit, until no check fails")
	cmd.AddCommand(bundleCommand(root, f, io), trialCommand(root, f, io), probeCommand(io))
	return cmd
}

func (f *doctorFlags) run(ctx context.Context, runDir string, io streams) error {
	end := time.Now().Add(f.wait)
	all := f.patient(ctx, runDir).examine()
	for worst(all) == fail && time.Now().Before(end) {
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
		all = f.patient(ctx, runDir).examine()
	}
	return conclude(io, f.output, all)
}

// conclude prints findings. It returns errUnhealthy if a check has failed.
func conclude(io streams, output string, all []finding) error {
	if output != "text" {
		if err := encode(io, output, all); err != nil {
			return err
		}
	} else {
		printFindings(io, all)
	}
	if worst(all) == fail {
		return errUnhealthy
	}
	return nil
}

// patient looks at this host.
func (f *doctorFlags) patient(ctx context.Context, runDir string) *patient {
	p := &patient{ctx: ctx, runDir: runDir, simGPU: f.simGPU, shim: f.shim, program: underShim, versionOf: versionOf,
		smi: askSMI}
	p.self, _ = os.Executable()
	p.whyNot = call(ctx, runDir, func(ctx context.Context, c *api.Conn) (err error) {
		p.daemon = c.Server
		p.status, err = c.Status(ctx, &api.StatusRequest{})
		return err
	})
	return p
}

func worst(all []finding) level {
	found := pass
	for _, f := range all {
		if f.Level == fail {
			return fail
		}
		if f.Level == warn {
			found = warn
		}
	}
	return found
}

func printFindings(io streams, all []finding) {
	count := map[level]int{}
	colours := map[level]string{pass: green, warn: yellow, fail: red}
	for _, f := range all {
		count[f.Level]++
		fmt.Fprintf(io.out, "%s  %-10s  %s\n", io.paint(colours[f.Level], string(f.Level)), f.Check, printable(f.Text))
		if f.Fix != "" {
			fmt.Fprintf(io.out, "%16s  → %s\n", "", printable(f.Fix))
		}
	}
	fmt.Fprintf(io.out, "%d passed, %s, %d failed\n", count[pass], numbered(count[warn], "warning", "warnings"), count[fail])
}
