// SPDX-License-Identifier: Apache-2.0

// Command nvshare-plugin makes this node's GPUs available to containers through
// nvshare. It puts the shim on the host, writes the CDI specs, keeps them right as
// GPUs and driver change, and serves pods as an NRI plugin.
//
// When the plugin ends, the files and specs stay: running containers need the shim,
// and containers that restart need the spec. Only a node without GPUs has its specs
// removed.
//
// While no plugin is registered, pods that ask for GPUs start without one; the next plugin
// ends their containers. So the plugin ends only for a wrong command line or installation. With GPUs, drivers or CDI directories
// that it cannot use, or with files that it cannot place, it refuses pods that ask, says
// why, and tries again.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/journal"
	"github.com/nvshare/nvshare/sched/manual"
)

type flags struct {
	runDir, libDir, binDir string
	lib, hook              string
	cdiDir, hostRoot       string
	driverRoot             string
	nriSocket, index       string
	simgpu                 string
	noNRI, place           bool
	ready, live            bool
	promiseMemory          uint32
	kube                   liveFlags
	dra                    draFlags
	audit                  string
	exclusion              []string
	maxCore                string
	mostCore               api.Bounds
}

func main() {
	log := journal.New()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	status := exitUsage
	if err := command(&status, log).ExecuteContext(ctx); err != nil {
		if errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0 {
			err = fmt.Errorf("%w\nRun it as root", err)
		}
		fmt.Fprintf(os.Stderr, "nvshare-plugin: %v\n", err)
		if status == exitUsage {
			fmt.Fprintln(os.Stderr, "Run nvshare-plugin --help")
		}
		os.Exit(status)
	}
}

// Exit statuses.
const (
	exitFailed = 1
	exitUsage  = 2
)

// maxPromise is a hundred times the memory of a GPU: more must be a mistake.
const maxPromise = 10000

// command returns the program; status is set to what its errors then mean.
func command(status *int, log logrus.FieldLogger) *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "nvshare-plugin",
		Short: "Share this node's GPUs with containers: CDI specs and NRI plugin",
		Long: `nvshare-plugin puts the shim on the host, writes the CDI specs nvshare.com/gpu
and nvshare.com/gpu-nri, and gives GPUs to pods that ask for them in
annotations. At SIGHUP it looks for GPUs and driver again. NVSHARE_DEBUG=1 logs
more.`,
		Args:          cobra.NoArgs,
		Version:       api.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cmd.Flags().Changed("promise-memory") {
				f.dra.promise = f.promiseMemory
			}
			if err := f.dra.check(cmd.Flags()); err != nil {
				return err
			}
			if err := f.check(); err != nil {
				return err
			}
			*status = exitFailed
			return run(cmd.Context(), f, log)
		},
	}
	s := cmd.Flags()
	s.StringVar(&f.runDir, "run-dir", env("NVSHARE_RUN_DIR", cdi.DefaultRunDir), "the scheduler's run `directory` (NVSHARE_RUN_DIR)")
	s.StringVar(&f.libDir, "lib-dir", cdi.DefaultLibDir, "host `directory` for the shim; not on a noexec mount")
	s.StringVar(&f.binDir, "bin-dir", "", "host `directory` for the OCI hook (default: bin beside --lib-dir)")
	s.StringVar(&f.lib, "lib", "", "`path` of the shim to place (default: found beside this program)")
	s.StringVar(&f.hook, "hook", "", "`path` of the OCI hook to place (default: found beside this program)")
	s.StringVar(&f.cdiDir, "cdi-dir", cdi.DefaultSpecDir, "`directory` for the CDI specs")
	s.StringVar(&f.hostRoot, "host-root", "", "`path` of the host's / in this container")
	s.StringVar(&f.driverRoot, "driver-root", "", "host `directory` below which the NVIDIA driver's libraries are installed as if it was /, beside the places that are looked into anyway")
	s.StringVar(&f.nriSocket, "nri-socket", "/var/run/nri/nri.sock", "`path` of the container runtime's NRI socket")
	s.StringVar(&f.index, "index", "10", "`two digits`: plugins are called in ascending order")
	s.StringVar(&f.simgpu, "simgpu", os.Getenv("NVSHARE_SIMGPU"), "`directory` of a simulated GPU to use instead of real ones (NVSHARE_SIMGPU)")
	s.Uint32Var(&f.promiseMemory, "promise-memory", 100, "`percent` of each GPU's memory that memory limits may add up to where the plugin chooses the GPU; above 100 only if the scheduler swaps. With --dra, the default is the GPU's memory and an equal part of the size that the scheduler's --swap-memory says")
	s.BoolVar(&f.place, "place", false, "place shim and hook on the host and exit")
	s.BoolVar(&f.ready, "ready", false, "say whether the plugin that runs gives GPUs, and exit: status 1 and the reason if it does not")
	s.BoolVar(&f.live, "live", false, "say whether the plugin that runs is stuck, and exit: status 1 if it is and has to be started again; not where it gives no GPUs for another reason")
	s.BoolVar(&f.noNRI, "no-nri", false, "place files, write specs and exit: for hosts without NRI")
	s.StringSliceVar(&f.exclusion, "exclusion-namespaces", nil, "`namespaces` whose pods may keep others off their GPUs by the annotation "+plugin.ExclusionAnnotation+", separated by commas; *: all; \"\": none")
	s.StringVar(&f.maxCore, "max-core-request", "", "greatest `percentage` of each GPU that the core requests of one namespace's annotations may add up to, also by namespace: 50,prod=100; \"\": no bound")
	f.kube.add(s)
	f.dra.add(s)
	s.StringVar(&f.audit, "audit", "stop", "`stop|report`: what to do about containers that asked for GPUs and run without nvshare, as after the node's reboot, at each registration and as they start; stop, after which the kubelet starts them again, needs the host's PID namespace and CAP_KILL")
	cmd.CompletionOptions.DisableDefaultCmd = true
	manual.Wrap(cmd)
	cmd.AddCommand(manual.Command("8", api.Version, nil))
	return cmd
}

func env(key, otherwise string) string {
	if v := os.Getenv(key); v != "" {
		return v
	}
	return otherwise
}

// check finds what is wrong on the command line before the host is touched.
func (f *flags) check() (err error) {
	if f.promiseMemory < 1 || f.promiseMemory > maxPromise {
		return fmt.Errorf("--promise-memory %d: give a percentage from 1 to %d", f.promiseMemory, maxPromise)
	}
	if f.mostCore, err = api.ParseBounds(f.maxCore, api.ParsePercent); err != nil {
		return fmt.Errorf("--max-core-request: %w", err)
	}
	if err := nri.CheckPluginIndex(f.index); err != nil {
		return fmt.Errorf("--index: %w", err)
	}
	if f.kube.advertise && f.dra.on {
		return errors.New("--advertise and --dra are two ways to ask for the same GPUs: leave one out")
	}
	if f.noNRI && f.kube.advertise {
		return errors.New("--advertise needs NRI, which gives the GPUs: leave out --no-nri")
	}
	if f.noNRI && f.dra.on {
		return errors.New("--dra needs NRI, which puts the shim into the containers of claims: leave out --no-nri")
	}
	if err := plugin.Audit(f.audit).Check(); err != nil {
		return fmt.Errorf("--audit: %w", err)
	}
	return nil
}

// absolute makes paths absolute, which CDI needs.
func (f *flags) absolute() (err error) {
	f.binDir = cmp.Or(f.binDir, filepath.Join(filepath.Dir(filepath.Clean(f.libDir)), "bin"))
	for _, p := range []*string{&f.runDir, &f.libDir, &f.binDir, &f.cdiDir, &f.nriSocket} {
		if *p, err = filepath.Abs(*p); err != nil {
			return err
		}
	}
	return nil
}

func run(ctx context.Context, f flags, log logrus.FieldLogger) (err error) {
	if err := f.absolute(); err != nil {
		return err
	}
	runDir := cdi.OnHost(f.hostRoot, f.runDir)
	if f.live {
		return isLive(runDir, namespaceFile, canWrite)
	}
	if f.ready {
		return errors.Join(isReady(runDir, namespaceFile), f.dra.isRegistered())
	}
	n := &node{
		log:     log,
		health:  &plugin.Health{},
		options: cdi.Options{HostRoot: f.hostRoot, DriverRoot: f.driverRoot, SimDir: f.simgpu, Log: log},
		paths:   cdi.Paths{ShimDir: filepath.Join(f.libDir, cdi.ShimLink), Hook: filepath.Join(f.binDir, cdi.HookFile), RunDir: f.runDir},
		cdiDir:  cdi.OnHost(f.hostRoot, f.cdiDir),
		every:   watchInterval,

		generate: cdi.Generate,
		again:    func() <-chan time.Time { return time.After(partialInterval) },
	}
	n.placed, err = newPlaced(f, log)
	if err != nil {
		return err
	}
	if f.place {
		_, err := n.placed.place()
		return err
	}
	if f.noNRI {
		_, err := n.refresh(ctx, true)
		return err
	}

	lock := openLeaderLock(cdi.OnHost(f.hostRoot, filepath.Dir(f.libDir)), whoIs(f.dra.on, namespaceFile), log)
	defer lock.Close()
	taken, err := lock.take()
	if err != nil {
		return err
	}
	s, err := newService(ctx, f, n, runDir)
	if err != nil {
		return err
	}
	if taken {
		s.refuse()
	} else {
		log.Info("an earlier nvshare-plugin of this installation still runs on this node: serving beside it until it ends")
		s.serveBeside()
		if err := lock.wait(s.ctx); s.ctx.Err() != nil {
			return s.end()
		} else if err != nil {
			return errors.Join(err, s.end())
		}
	}
	return s.lead()
}
