// SPDX-License-Identifier: Apache-2.0

// nvshare-warden carries out what nvshare-scheduler decides about processes that have no
// shim.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"os/user"
	"strconv"
	"syscall"

	systemd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/journal"
	"github.com/nvshare/nvshare/sched/manual"
	"github.com/nvshare/nvshare/sched/warden"
	"github.com/nvshare/nvshare/sched/warden/rm"
)

// Exit statuses.
const (
	exitFailed = 1
	exitUsage  = 2
)

type flags struct {
	dir, simGPU, owner string
	guard              bool
}

func main() {
	status := exitUsage
	manual.Main(context.Background(), command(&status), &status, exitUsage)
}

func command(status *int) *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   "nvshare-warden",
		Short: "Hold processes that have no shim, as nvshare-scheduler says (experimental)",
		Long: `nvshare-warden sets time slices of processes that have no shim, and takes their
channels off the GPU, from outside. It decides nothing: nvshare-scheduler says
what to do. It is root, and needs CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH,
CAP_CHOWN and CAP_KILL, in the host's PID namespace. Whatever ends it, nobody stays off the
GPU: a second process of it, the guard, sees to that.`,
		Args:          cobra.NoArgs,
		Version:       api.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(*cobra.Command, []string) error {
			*status = exitFailed
			return f.run(logrus.NewEntry(journal.New()))
		},
	}
	fs := cmd.Flags()
	cmd.PersistentFlags().StringVar(&f.dir, "dir", api.WardenDir(), "`directory` of the socket, and of what is written down; default from NVSHARE_WARDEN_DIR")
	cmd.PersistentFlags().StringVar(&f.simGPU, "simgpu", os.Getenv("NVSHARE_SIMGPU"), "use the simulated GPU in `directory`; default from NVSHARE_SIMGPU")
	fs.StringVar(&f.owner, "scheduler-user", "root", "`user`, by name or number, whose scheduler's orders are carried out")
	fs.BoolVar(&f.guard, "guard", false, "be the guard of a warden, which starts it so")
	_ = fs.MarkHidden("guard")
	cmd.AddCommand(lookCommand(status, &f), manual.Command("8", api.Version, nil))
	cmd.CompletionOptions.DisableDefaultCmd = true
	manual.Wrap(cmd)
	return cmd
}

func (f *flags) driver() (rm.Driver, error) {
	if f.simGPU != "" {
		return rm.OpenSimulated(), nil
	}
	return rm.OpenNvidia("")
}

func (f *flags) run(log *logrus.Entry) error {
	d, err := f.driver()
	if err != nil {
		return err
	}
	if f.guard {
		return warden.RunGuard(f.dir, d, log)
	}
	uid, err := userNumber(f.owner)
	if err != nil {
		return fmt.Errorf("--scheduler-user: %w", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	guard := []string{"/proc/self/exe", "--guard", "--dir", f.dir, "--simgpu", f.simGPU}
	w, err := warden.New(warden.Options{Dir: f.dir, UID: uid, Driver: d, Guard: guard, Log: log})
	if err != nil {
		return err
	}
	if _, err := systemd.SdNotify(false, systemd.SdNotifyReady); err != nil {
		log.WithError(err).Warn("tell systemd that we are ready")
	}
	log.Infof("nvshare-warden %s: %s/%s", api.Version, f.dir, warden.Socket)
	return w.Run(ctx.Done())
}

func userNumber(name string) (int, error) {
	if n, err := strconv.ParseUint(name, 10, 31); err == nil {
		return int(n), nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(u.Uid)
}

// lookCommand shows what the warden can see of a process.
func lookCommand(status *int, f *flags) *cobra.Command {
	return &cobra.Command{
		Use:   "look PID",
		Short: "Show the clients, groups and channels of a process; changes nothing",
		Args:  cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			pid, err := strconv.Atoi(args[0])
			if err != nil {
				return fmt.Errorf("%.32q is no pid", args[0])
			}
			*status = exitFailed
			d, err := f.driver()
			if err != nil {
				return err
			}
			found, err := rm.Inspect(d, pid)
			if err != nil {
				return err
			}
			out := json.NewEncoder(os.Stdout)
			out.SetIndent("", "  ")
			return out.Encode(found)
		},
	}
}
