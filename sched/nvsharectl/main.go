// SPDX-License-Identifier: Apache-2.0

// nvsharectl shows and changes what nvshare-scheduler does on this node.
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/manual"
)

// Exit statuses.
const (
	exitOK          = 0
	exitFailed      = 1 // the command failed, or the scheduler is unhealthy
	exitUsage       = 2
	exitUnreachable = 3 // no scheduler answers
)

// callTimeout bounds each call: the scheduler answers from memory.
const callTimeout = 10 * time.Second

// errUnhealthy is returned after the status has said what is wrong.
var errUnhealthy = errors.New("unhealthy")

func main() {
	ctx, stop := untilStopped()
	defer stop()
	os.Exit(run(ctx, os.Args[1:], standard()))
}

// untilStopped returns a context that ends when somebody stops this process.
func untilStopped() (context.Context, context.CancelFunc) {
	stops := slices.DeleteFunc([]os.Signal{syscall.SIGTERM, syscall.SIGINT}, signal.Ignored) // a script may have the latter ignored
	return signal.NotifyContext(context.Background(), stops...)
}

// run is main without the process.
func run(ctx context.Context, args []string, io streams) int {
	ran := false
	out := &sink{Writer: io.out}
	io.out = out
	cmd := rootCommand(io, &ran)
	cmd.SetArgs(args)
	called, err := cmd.ExecuteContextC(ctx)
	if out.err != nil {
		ran, err = true, fmt.Errorf("print: %w", out.err)
	}
	if err == nil {
		return exitOK
	}
	if errors.Is(err, errUnhealthy) {
		return exitFailed
	}
	var program exitError
	if errors.As(err, &program) {
		fmt.Fprintf(io.err, "nvsharectl: %v\n", err)
		return program.status
	}
	if !ran { // cobra refused the command line
		err = usageError{err}
	}
	text := messageOf(err)
	if exitStatus(err) == exitUsage {
		text += "\nRun " + called.CommandPath() + " --help"
	}
	fmt.Fprintf(io.err, "nvsharectl: %s\n", text)
	return exitStatus(err)
}

// messageOf is what an error says to people: of the scheduler's answers the message alone.
func messageOf(err error) string {
	if st, ok := status.FromError(err); ok {
		return st.Message()
	}
	return err.Error()
}

// usageError marks errors that the user made on the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func exitStatus(err error) int {
	var usage usageError
	var unreachable *api.UnreachableError
	switch {
	case errors.As(err, &usage) || status.Code(err) == codes.InvalidArgument:
		return exitUsage
	case errors.As(err, &unreachable) && !errors.Is(err, fs.ErrPermission): // behind a closed door one may answer
		return exitUnreachable
	}
	return exitFailed
}

// asRoot says what to do where the host refused to have its files changed.
func asRoot(err error) error {
	if errors.Is(err, fs.ErrPermission) && os.Geteuid() != 0 {
		return fmt.Errorf("%w (use sudo)", err)
	}
	return err
}

type rootFlags struct {
	runDir string
	output string
	set    setFlags
}

func rootCommand(io streams, ran *bool) *cobra.Command {
	f := &rootFlags{}
	root := &cobra.Command{
		Use:   "nvsharectl",
		Short: "Show and change what nvshare-scheduler does on this node",
		Long: `nvsharectl shows which container holds which GPU and who waits, and changes the
scheduler's settings. Without a command or a setting it prints the status.

Turns and limits hold for programs that load libnvshare.so. A static program, a
raw ioctl or a process that removes LD_PRELOAD is not held, and a program runs
without turns while there is no scheduler.

Exit status: 0 fine, 1 unhealthy or failed, 2 usage, 3 no scheduler answers.`,
		Example: `  nvsharectl                  status
  nvsharectl config set turn-length 200ms
  nvsharectl set --container ml/train-a/main --core-limit 25 --memory-limit 8Gi`,
		Args:          noCommand,
		Version:       api.Version,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			*ran = true
			return gpuIsNamed(cmd)
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.set.given(cmd) {
				if cmd.Flags().Changed("output") {
					return usageError{errors.New("--output is for the status: it cannot go with --set-tq or --anti-thrash")}
				}
				return f.set.run(cmd, f.runDir, io)
			}
			return showStatus(cmd.Context(), f, io)
		},
	}
	root.SetFlagErrorFunc(flagError)
	root.SetOut(io.out)
	root.SetErr(io.err)
	root.PersistentFlags().StringVar(&f.runDir, "run-dir", api.RunDir(), "the scheduler's `directory`; default from NVSHARE_RUN_DIR")
	outputFlag(root, f)
	f.set.add(root)
	root.AddCommand(statusCommand(f, io), topCommand(f, io), whyCommand(f, io), suspendCommand(f, io), resumeCommand(f, io), eventsCommand(f, io), webCommand(f, io), setCommand(f, io), configCommand(f, io), migrateCommand(f, io), drainCommand(f, io), undrainCommand(f, io), startCommand(f, io), endedCmd(), describeCommand(f, io), versionCommand(f, io), doctorCommand(f, io), cdiCommand(io),
		installCommand(newInstaller(io)), uninstallCommand(newInstaller(io)), manual.Command("1", api.Version, completions))
	complete(root, f)
	manual.Wrap(root)
	return root
}

// gpuIsNamed refuses --gpu with an empty value, which is that of a variable that a script has
// not set. Without the flag a command is for all GPUs, so it would change them all.
func gpuIsNamed(cmd *cobra.Command) error {
	if f := cmd.Flags().Lookup("gpu"); f != nil && f.Changed && f.Value.String() == "" {
		return usageError{errors.New("--gpu is empty: give a GPU's index or UUID (nvsharectl status lists them)")}
	}
	return nil
}

// call connects, and turns a scheduler that does not answer into an
// UnreachableError.
func call(ctx context.Context, runDir string, f func(context.Context, *api.Conn) error) error {
	return callWithin(ctx, callTimeout, runDir, f)
}

// ask makes one call of the control API.
func ask[Request, Response any](ctx context.Context, runDir string, what func(*api.Conn, context.Context, Request) (Response, error), req Request) (r Response, err error) {
	err = call(ctx, runDir, func(ctx context.Context, c *api.Conn) (err error) {
		r, err = what(c, ctx, req)
		return err
	})
	return r, err
}

// callWithin is call with another bound.
func callWithin(ctx context.Context, patience time.Duration, runDir string, f func(context.Context, *api.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := api.Dial(ctx, runDir)
	if err != nil {
		return err
	}
	defer c.Close()
	err = f(ctx, c)
	if errors.Is(err, ttrpc.ErrClosed) || api.TimedOut(err) {
		return &api.UnreachableError{Path: api.SocketPath(runDir), Err: errors.New("no answer")}
	}
	return err
}
