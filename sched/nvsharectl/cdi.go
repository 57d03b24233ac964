// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
)

// cdiFlags say where things are, for both commands.
type cdiFlags struct {
	simGPU string
	kind   string
	output string
	paths  cdi.Paths
}

func cdiCommand(io streams) *cobra.Command {
	f := &cdiFlags{paths: cdi.DefaultPaths}
	cmd := &cobra.Command{
		Use:   "cdi",
		Short: "Describe this node's GPUs to container engines",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usageError{errors.New("cdi: say generate or list")}
		},
	}
	cmd.PersistentFlags().StringVar(&f.simGPU, "simgpu", os.Getenv("NVSHARE_SIMGPU"), "use the simulated GPU in `directory`; default from NVSHARE_SIMGPU")

	generate := &cobra.Command{
		Use:   "generate",
		Short: "Print the CDI spec of this node's GPUs",
		Example: `  nvsharectl cdi generate --output /etc/cdi/nvshare.com-gpu.yaml
  podman run --device nvshare.com/gpu=0 ...`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.generate(cmd, io) },
	}
	fs := generate.Flags()
	fs.StringVar(&f.output, "output", "", "write to `file`, replacing it as a whole, and not to standard output")
	fs.StringVar(&f.kind, "kind", cdi.Kind, "`kind` of device: "+cdi.Kind+" for people, "+cdi.KindNRI+" for nvshare-plugin")
	fs.StringVar(&f.paths.LibDir, "lib-dir", f.paths.LibDir, "the host's `directory` with "+cdi.ShimFile)
	fs.StringVar(&f.paths.Hook, "hook", f.paths.Hook, "`path` of "+cdi.HookFile+" on the host")

	list := &cobra.Command{
		Use:   "list",
		Short: "List the names of this node's devices",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return f.list(cmd, io) },
	}
	cmd.AddCommand(generate, list)
	return cmd
}

func (f *cdiFlags) options(io streams) cdi.Options {
	log := logrus.New()
	log.SetOutput(io.err)
	return cdi.Options{SimDir: f.simGPU, Log: log}
}

var errNoGPU = errors.New("no GPU found on this node (is the NVIDIA driver loaded? nvidia-smi -L lists its GPUs)")

func (f *cdiFlags) generate(cmd *cobra.Command, io streams) error {
	if f.kind != cdi.Kind && f.kind != cdi.KindNRI {
		return usageError{fmt.Errorf("--kind: %q is neither %s nor %s", f.kind, cdi.Kind, cdi.KindNRI)}
	}
	var err error
	if f.paths.RunDir, err = filepath.Abs(cmd.Flag("run-dir").Value.String()); err != nil {
		return usageError{fmt.Errorf("--run-dir: %w", err)}
	}
	for _, p := range []*string{&f.paths.LibDir, &f.paths.Hook} {
		if *p, err = filepath.Abs(*p); err != nil {
			return err
		}
	}
	found, err := cdi.Generate(cmd.Context(), f.options(io), f.paths)
	if err != nil {
		return err
	}
	if len(found.GPUs) == 0 {
		return errNoGPU
	}
	data, err := cdi.Marshal(found.Spec(f.kind))
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(f.paths.LibDir, cdi.ShimFile)); errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintf(io.err, "warning: %v; containers with these devices cannot start before it is there (nvshare-plugin --no-nri puts it there)\n", err)
	}
	if f.output == "" {
		_, err := io.out.Write(data)
		return err
	}
	if err := replaceFile(f.output, data); err != nil {
		return fmt.Errorf("write the CDI spec: %w", err)
	}
	fmt.Fprintf(io.err, "wrote %s: %d GPUs, from %s\n", f.output, len(found.GPUs), found.Source)
	return nil
}

// replaceFile writes a file that everyone can read, as a whole or not at all.
// The directory is made if need be: /etc/cdi is not there on a fresh host. What
// is there and is no file, like /dev/stdout, is left alone.
func replaceFile(path string, data []byte) error {
	if st, err := os.Lstat(path); err == nil && !st.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file; remove it, or choose another name", path)
	}
	if err := cdi.MakeDir(filepath.Dir(path)); err != nil {
		return err
	}
	return cdi.ReplaceFile(path, data, 0o644, nil)
}

func (f *cdiFlags) list(cmd *cobra.Command, io streams) error {
	gpus, err := cdi.Discover(cmd.Context(), f.options(io))
	if err != nil {
		return err
	}
	if len(gpus) == 0 {
		return errNoGPU
	}
	for _, name := range cdi.Names(gpus) {
		fmt.Fprintf(io.out, "%s=%s\n", cdi.Kind, name)
	}
	return nil
}
