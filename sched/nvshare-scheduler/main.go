// SPDX-License-Identifier: Apache-2.0

// nvshare-scheduler decides which container may use a GPU, and when.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	systemd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon"
	"github.com/nvshare/nvshare/sched/wire"
)

// Exit statuses.
const (
	exitFailed = 1
	exitUsage  = 2
)

type flags struct {
	runDir, quantum, grace, antiThrash, simGPU string
	spin                                       time.Duration
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	status := exitUsage
	cmd := command(&status)
	if err := cmd.ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "nvshare-scheduler: %v\n", err)
		os.Exit(status)
	}
}

// command returns the program; status is set to what its errors then mean.
func command(status *int) *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "nvshare-scheduler",
		Short: "Decide which container may use a GPU, and when",
		Long: `nvshare-scheduler finds the GPUs of this node and gives each to one client at a
time. It runs in the foreground and logs to standard error; NVSHARE_DEBUG=1 in
the environment logs every decision. It needs no root with a run directory of
its own.`,
		Args:          cobra.NoArgs,
		Version:       api.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			opts, err := f.options(newLog())
			if err != nil {
				return fmt.Errorf("%w\nRun nvshare-scheduler --help", err)
			}
			*status = exitFailed
			return serve(cmd.Context(), opts)
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.runDir, "run-dir", api.RunDir(), "`directory` of sockets and state; default from NVSHARE_RUN_DIR")
	fs.StringVar(&f.quantum, "tq", sched.DefaultQuantum.String(), "time quantum: `seconds`, or with a unit, like 200ms")
	fs.StringVar(&f.grace, "grace", sched.DefaultGrace.String(), "`time` a client has to release a GPU before others get it anyway")
	fs.StringVar(&f.antiThrash, "anti-thrash", "on", "`on|off`: one client at a time, or all at once")
	fs.DurationVar(&f.spin, "spin", defaultSpin(), "`time` that scheduler and next client may spin at a hand-over, at most 8ms; 0: sleep")
	fs.StringVar(&f.simGPU, "simgpu", os.Getenv("NVSHARE_SIMGPU"), "use the simulated GPU in `directory`; default from NVSHARE_SIMGPU")
	return cmd
}

// defaultSpin: where cores are scarce, tenants need them more.
func defaultSpin() time.Duration {
	if runtime.NumCPU() < 4 {
		return 0
	}
	return wire.SpinTime
}

func newLog() *logrus.Entry {
	logger := logrus.New()
	logger.SetOutput(os.Stderr)
	if os.Getenv("NVSHARE_DEBUG") == "1" {
		logger.SetLevel(logrus.DebugLevel)
	}
	return logrus.NewEntry(logger)
}

func (f *flags) options(log *logrus.Entry) (daemon.Options, error) {
	o := daemon.Options{Version: api.Version, Log: log, List: lister(f.simGPU, log)}
	var err error
	if o.RunDir, err = filepath.Abs(f.runDir); err != nil {
		return o, fmt.Errorf("--run-dir: %w", err)
	}
	if o.Quantum, err = api.ParseDuration(f.quantum); err != nil {
		return o, fmt.Errorf("--tq: %w", err)
	}
	if o.Quantum < sched.MinQuantum || o.Quantum > sched.MaxQuantum {
		return o, fmt.Errorf("--tq: %v is not from %v to %v", o.Quantum, sched.MinQuantum, sched.MaxQuantum)
	}
	if o.Grace, err = api.ParseDuration(f.grace); err != nil {
		return o, fmt.Errorf("--grace: %w", err)
	}
	if o.Grace < sched.MinGrace || o.Grace > sched.MaxGrace {
		return o, fmt.Errorf("--grace: %v is not from %v to %v", o.Grace, sched.MinGrace, sched.MaxGrace)
	}
	if f.spin < 0 || f.spin > wire.SpinTime {
		return o, fmt.Errorf("--spin: %v is not from 0 to %v", f.spin, wire.SpinTime)
	}
	o.Spin = f.spin
	mode, err := api.ParseAntiThrash(f.antiThrash)
	if err != nil {
		return o, fmt.Errorf("--anti-thrash: %w", err)
	}
	if mode == api.Mode_MODE_CONCURRENT {
		o.Mode = sched.Concurrent
	}
	return o, nil
}

func lister(simGPU string, log *logrus.Entry) daemon.Lister {
	return func(ctx context.Context) ([]daemon.GPU, error) {
		found, err := cdi.Discover(ctx, cdi.Options{SimDir: simGPU, Log: log})
		gpus := make([]daemon.GPU, 0, len(found))
		for _, g := range found {
			gpus = append(gpus, daemon.GPU{Index: g.Index, UUID: g.UUID, Name: g.Name, MemoryBytes: g.MemoryBytes})
		}
		return gpus, err
	}
}

// serve runs until ctx is done. systemd is told when clients can connect.
func serve(ctx context.Context, o daemon.Options) error {
	d, err := daemon.New(o)
	if err != nil {
		return err
	}
	o.Log.Infof("nvshare-scheduler %s: run directory %s, time quantum %v", o.Version, o.RunDir, o.Quantum)
	if _, err := systemd.SdNotify(false, systemd.SdNotifyReady); err != nil {
		o.Log.WithError(err).Warn("tell systemd that we are ready")
	}
	go func() {
		<-ctx.Done()
		_, _ = systemd.SdNotify(false, systemd.SdNotifyStopping)
	}()
	if err := d.Run(ctx); err != nil {
		return err
	}
	o.Log.Info("nvshare-scheduler has ended; clients that hold a GPU go on")
	return nil
}
