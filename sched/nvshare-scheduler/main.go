// SPDX-License-Identifier: Apache-2.0

// nvshare-scheduler decides which container may use a GPU, and when.
package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"os/user"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/settings"

	"github.com/coreos/go-systemd/v22/activation"
	systemd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/rundir"
	"github.com/nvshare/nvshare/sched/journal"
	"github.com/nvshare/nvshare/sched/manual"
	"github.com/nvshare/nvshare/sched/web"
	"github.com/nvshare/nvshare/sched/wire"
)

// Exit statuses.
const (
	exitFailed = 1
	exitUsage  = 2
)

// defaultMetricsAddr is the port that nvshare's users know.
const defaultMetricsAddr = "0.0.0.0:9402"

type flags struct {
	runDir, quantum, grace, antiThrash, fenceAction, simGPU string
	tuning                                                  tuningFlags
	swap                                                    swapFlags
	rules                                                   ruleFlags
	memoryLimit                                             string
	metrics                                                 bool
	metricsAddr                                             string
	metricsProcesses                                        uint16
	metricsDCGM                                             bool
	takeOver                                                bool
	controlGroup                                            string
	webAddr, webTokenFile                                   string
	checkpoint, warden                                      string
	holdAll                                                 bool
}

func main() {
	debug.SetTraceback("crash") // a panic ends it by a signal: status 2 is a wrong command line, see the unit of systemd
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	status := exitUsage
	manual.Main(ctx, command(&status), &status, exitUsage)
}

// command returns the program; status is set to what its errors then mean.
func command(status *int) *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "nvshare-scheduler",
		Short: "Decide which container may use a GPU, and when",
		Long: `nvshare-scheduler finds the GPUs of this node and grants each to its tenants in
turn. It runs in the foreground and logs to standard error; with
NVSHARE_DEBUG=1 in the environment it logs each decision. It needs no root and
no capability, but a run directory that belongs to its user; only
--fence-action kill needs CAP_KILL.

Its decisions hold for programs that load libnvshare.so. A static program, a
raw ioctl or a process that removes LD_PRELOAD is not held, but to its core
limit where nvshare-warden runs.`,
		Args:          cobra.NoArgs,
		Version:       api.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.swap.readyGiven = cmd.Flags().Changed("swap-ready")
			opts, err := f.options(logrus.NewEntry(journal.New()))
			if err != nil {
				return err
			}
			opts.Flags = settingsSaid(cmd.Flags())
			*status = exitFailed
			if opts.Sockets.Tenants, err = passedSocket(activation.Files(true)); err != nil {
				return err
			}
			if f.takeOver {
				waits := func() { opts.Log.Info("an earlier nvshare-scheduler still runs: waiting for its end") }
				if err := rundir.Await(cmd.Context(), opts.RunDir, waits); err != nil {
					return nil // told to end meanwhile
				}
			}
			return serve(cmd.Context(), opts)
		},
	}
	f.add(cmd)
	cmd.AddCommand(prepareCommand(status, &f.runDir), overlapDaemonCommand(status), manual.Command("8", api.Version, nil))
	cmd.CompletionOptions.DisableDefaultCmd = true
	manual.Wrap(cmd)
	return cmd
}

func (f *flags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	cmd.PersistentFlags().StringVar(&f.runDir, "run-dir", api.RunDir(), "`directory` of sockets and state; default from NVSHARE_RUN_DIR")
	fs.StringVar(&f.quantum, "tq", sched.DefaultQuantum.String(), "time quantum: `seconds`, or with a unit, like 200ms")
	fs.StringVar(&f.grace, "grace", sched.DefaultGrace.String(), "`time` in which a process must release a GPU after a revoke; then others get it")
	fs.StringVar(&f.antiThrash, "anti-thrash", antiThrashDefault(), "`on|off|auto`: how tenants share a GPU; on: tenants take turns; off: all run at the same time; auto: time slices, turns, or all at once, as suits them")
	fs.StringVar(&f.fenceAction, "fence-action", "hold", "`hold|kill`: what to do about a process that did not release a GPU in the grace period; hold: nvshare-warden, where it runs, keeps it off but in its tenant's turns until it has released")
	f.tuning.add(cmd)
	f.swap.add(cmd)
	f.rules.add(cmd)
	fs.StringVar(&f.memoryLimit, "default-memory-limit", "", "memory limit, on each GPU, of containers and users that have none of their own: a `size`, like 8Gi; \"\": none")
	fs.BoolVar(&f.metrics, "metrics", os.Getenv("NVSHARE_METRICS_ENABLE") == "1", "serve Prometheus metrics on /metrics, and /healthz, to everybody who reaches the address; default from NVSHARE_METRICS_ENABLE")
	fs.StringVar(&f.metricsAddr, "metrics-addr", cmp.Or(os.Getenv("NVSHARE_METRICS_ADDR"), defaultMetricsAddr), "`address` of --metrics; default from NVSHARE_METRICS_ADDR")
	fs.BoolVar(&f.metricsDCGM, "metrics-dcgm", os.Getenv("NVSHARE_METRICS_DCGM") == "1", "with --metrics: also what pods have under the names and labels of NVIDIA's dcgm-exporter (DCGM_FI_DEV_GPU_UTIL, _FB_USED, _FB_FREE, _XID_ERRORS); default from NVSHARE_METRICS_DCGM")
	fs.Uint16Var(&f.metricsProcesses, "metrics-processes", 0, "`number` of processes that have metrics of their own (nvshare_client_*) beside those of their tenants; each new process makes new series")
	fs.StringVar(&f.webAddr, "web-addr", os.Getenv("NVSHARE_WEB_ADDR"), "serve the page of nvsharectl web on this `address`, like 127.0.0.1:9404; \"\": nowhere; default from NVSHARE_WEB_ADDR")
	fs.StringVar(&f.webTokenFile, "web-token-file", os.Getenv("NVSHARE_WEB_TOKEN_FILE"), "a `file` with the token that readers of --web-addr need; without one the address is of loopback; default from NVSHARE_WEB_TOKEN_FILE")
	fs.StringVar(&f.controlGroup, "control-group", "", "`group`, by name or number, whose members may use the control socket; it is as powerful as the scheduler")
	fs.BoolVar(&f.takeOver, "take-over", os.Getenv("NVSHARE_TAKE_OVER") == "1", "where another nvshare-scheduler has the run directory, wait for its end, and do not fail; default from NVSHARE_TAKE_OVER")
	fs.StringVar(&f.checkpoint, "checkpoint", "auto", "`auto|off|PATH`: the program by which the driver takes the context of a suspended process off the GPU too; auto: nvshare-checkpoint beside this program or in PATH, if it is there")
	fs.StringVar(&f.warden, "warden", filepath.Join(api.WardenDir(), api.WardenSocket), "the `socket` of nvshare-warden: while one runs, programs without the shim are held from outside; \"\": they are only reported")
	fs.Lookup("warden").DefValue = "warden.sock in $NVSHARE_WARDEN_DIR or /var/run/nvshare-warden"
	fs.BoolVar(&f.holdAll, "hold-all", false, "have nvshare-warden hold all programs without the shim that use a GPU, and not only those of tenants that nvshare gave a GPU, a limit or another term")
	fs.StringVar(&f.simGPU, "simgpu", os.Getenv("NVSHARE_SIMGPU"), "use the simulated GPU in `directory`; default from NVSHARE_SIMGPU")
}

// prepareCommand is what root does before a scheduler of another user starts.
func prepareCommand(status *int, runDir *string) *cobra.Command {
	var owner string
	cmd := &cobra.Command{
		Use:   "prepare --owner UID:GID",
		Short: "Make the run directory and give it to a user; needs CAP_CHOWN",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			var uid, gid uint32
			if n, _ := fmt.Sscanf(owner, "%d:%d", &uid, &gid); n != 2 || owner != fmt.Sprintf("%d:%d", uid, gid) {
				return fmt.Errorf("--owner: %.64q is not UID:GID: give two numbers, like 65529:65529", owner)
			}
			*status = exitFailed
			return rundir.Prepare(*runDir, int(uid), int(gid))
		},
	}
	cmd.Flags().StringVar(&owner, "owner", "", "`UID:GID` of the scheduler's user")
	return cmd
}

// passedSocket returns the one that systemd passed on, if any.
func passedSocket(files []*os.File) (*os.File, error) {
	switch len(files) {
	case 0:
		return nil, nil
	case 1:
		return files[0], nil
	}
	return nil, fmt.Errorf("systemd passed on %d sockets: nvshare-scheduler.socket has one", len(files))
}

// groupNumber reads what a user writes. Go reads /etc/group only; getent asks the other
// services of nsswitch.conf too, such as LDAP.
func groupNumber(name string) (int, error) {
	if n, err := strconv.ParseUint(name, 10, 31); err == nil {
		return int(n), nil
	}
	g, err := user.LookupGroup(name)
	if err == nil {
		return strconv.Atoi(g.Gid)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	line, failed := exec.CommandContext(ctx, "getent", "group", "--", name).Output()
	if fields := strings.Split(strings.TrimSpace(string(line)), ":"); failed == nil && len(fields) > 2 {
		return strconv.Atoi(fields[2])
	}
	return 0, err
}

func (f *flags) options(log *logrus.Entry) (daemon.Options, error) {
	o := daemon.Options{Config: node.Config{Log: log}, Version: api.Version, List: lister(f.simGPU, log)}
	var err error
	if o.RunDir, err = filepath.Abs(f.runDir); err != nil {
		return o, fmt.Errorf("--run-dir: %w", err)
	}
	if err := f.fillTurns(&o); err != nil {
		return o, err
	}
	s := &cdi.Sampler{SimDir: f.simGPU}
	o.Sample, o.Release, o.Warden, o.HoldAll = sampler(s), s.Release, f.warden, f.holdAll
	o.MPSControl, o.OverlapStarter = mpsControl(f.simGPU), []string{"/proc/self/exe", overlapCommand}
	runner, err := checkpointer(f.checkpoint, f.simGPU, o.RunDir)
	if err != nil {
		return o, err
	}
	o.SuspendDir = f.swap.suspendDir
	if runner != nil {
		o.Checkpoint, o.CheckpointCheck = runner, func(ctx context.Context) error { return canCheckpoint(ctx, runner) }
	}
	if err := f.fillServed(&o); err != nil {
		return o, err
	}
	if o.Tuning, err = f.tuning.tuning(); err != nil {
		return o, err
	}
	if f.memoryLimit != "" && f.memoryLimit != "0" {
		if o.DefaultMemoryLimit, err = api.ParseMemoryLimit(f.memoryLimit); err != nil {
			return o, fmt.Errorf("--default-memory-limit: %w", err)
		}
	}
	if err := f.rules.fill(&o); err != nil {
		return o, err
	}
	return o, f.swap.fill(&o)
}

// fillTurns says how GPUs are shared.
func (f *flags) fillTurns(o *daemon.Options) (err error) {
	if o.Quantum, err = api.ParseDuration(f.quantum); err != nil {
		return fmt.Errorf("--tq: %w", err)
	}
	if err := settings.CheckQuantum(o.Quantum); err != nil {
		return fmt.Errorf("--tq: %w", err)
	}
	if o.Grace, err = api.ParseDuration(f.grace); err != nil {
		return fmt.Errorf("--grace: %w", err)
	}
	if err := settings.CheckGrace(o.Grace); err != nil {
		return fmt.Errorf("--grace: %w", err)
	}
	if o.FenceKill = f.fenceAction == "kill"; !o.FenceKill && f.fenceAction != "hold" {
		return fmt.Errorf("--fence-action: %q is neither hold nor kill", f.fenceAction)
	}
	if runtime.NumCPU() >= 4 { // else tenants need the processors more
		o.Spin = wire.SpinTime
	}
	mode, err := api.ParseAntiThrash(f.antiThrash)
	if err != nil {
		return fmt.Errorf("--anti-thrash: %w", err)
	}
	switch mode {
	case api.Mode_MODE_CONCURRENT:
		o.Mode = sched.Concurrent
	case api.Mode_MODE_AUTO:
		o.Mode = sched.Auto
	}
	return nil
}

// fillServed says what is served to whom.
func (f *flags) fillServed(o *daemon.Options) error {
	if f.metrics {
		if _, _, err := net.SplitHostPort(f.metricsAddr); err != nil {
			return fmt.Errorf("--metrics-addr: %w (give host:port, like %s)", err, defaultMetricsAddr)
		}
		o.MetricsAddr = f.metricsAddr
		o.MetricsProcesses = int(f.metricsProcesses)
		o.MetricsDCGM = f.metricsDCGM
	}
	if f.webAddr != "" {
		if _, err := web.Check(f.webAddr, f.webTokenFile); err != nil {
			return fmt.Errorf("--web-addr, --web-token-file: %w", err)
		}
		o.WebAddr, o.WebTokenFile = f.webAddr, f.webTokenFile
	}
	if f.controlGroup != "" {
		group, err := groupNumber(f.controlGroup)
		if err != nil {
			return fmt.Errorf("--control-group: %w", err)
		}
		o.Sockets.ControlGroup = &group
	}
	return nil
}

func lister(simGPU string, log *logrus.Entry) daemon.Lister {
	return func(ctx context.Context) ([]node.Found, error) {
		o := cdi.Options{SimDir: simGPU, Log: log}
		found, err := cdi.Discover(ctx, o)
		if err == nil { // a fault that is recorded of a lost GPU keeps new containers off it
			found = cdi.AddUnopened(ctx, o, found)
		}
		gpus := make([]node.Found, 0, len(found))
		next := 0 // after all indexes
		for _, g := range found {
			next = g.Index + 1
			gpus = append(gpus, node.Found{Index: g.Index, UUID: g.UUID, Name: g.Name, MemoryBytes: g.MemoryBytes, PCIBusID: g.PCIBusID, Model: model(g.Model), Unopened: g.Unopened})
		}
		// To a program in a MIG device, that is the GPU: CUDA shows it with a UUID
		// of its own (cuDeviceGetUuid_v2).
		for _, g := range found {
			for _, in := range g.Instances {
				if in.UUID != "" {
					gpus = append(gpus, node.Found{Index: next, UUID: in.UUID, Name: g.Name + " MIG " + in.Name(g), MIG: in.Numbers(g), MemoryBytes: in.MemoryBytes, PCIBusID: g.PCIBusID, Model: model(g.Model)})
					next++
				}
			}
		}
		return gpus, err
	}
}

func model(m cdi.Model) *api.GPUModel {
	return &api.GPUModel{Brand: m.Brand, Architecture: m.Architecture, ComputeCapability: m.ComputeCapability, DriverVersion: m.DriverVersion, CudaVersion: m.CUDAVersion}
}

// sampler asks NVML.
func sampler(s *cdi.Sampler) metrics.Sampler {
	return func(ctx context.Context) ([]metrics.GPUSample, error) {
		found, err := s.Sample(ctx)
		samples := make([]metrics.GPUSample, 0, len(found))
		for _, g := range found {
			samples = append(samples, metrics.GPUSample(g))
		}
		return samples, err
	}
}

// serve runs until ctx is done. systemd is told when clients can connect.
func serve(ctx context.Context, o daemon.Options) error {
	warnWithout(o.Log)
	d, err := daemon.New(o)
	if err != nil {
		return err
	}
	o.Log.Infof("nvshare-scheduler %s: run directory %s, time quantum %v", o.Version, o.RunDir, o.Quantum)
	if _, err := systemd.SdNotify(false, systemd.SdNotifyReady); err != nil {
		o.Log.WithError(err).Warn("tell systemd that we are ready")
	}
	if every, err := systemd.SdWatchdogEnabled(false); err != nil {
		o.Log.WithError(err).Warn("systemd's watchdog")
	} else if every > 0 {
		go answerWatchdog(ctx, d, every/3)
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

// answerWatchdog tells systemd that the scheduler answers, as long as it does:
// one that hangs is then restarted, and its tenants find the next one.
func answerWatchdog(ctx context.Context, d *daemon.Daemon, every time.Duration) {
	for tick := time.Tick(every); ; {
		if err := d.Answers(ctx); err != nil {
			return
		}
		_, _ = systemd.SdNotify(false, systemd.SdNotifyWatchdog)
		select {
		case <-tick:
		case <-ctx.Done():
			return
		}
	}
}
