// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/cdi"
)

// cdiFlags are the paths that all cdi commands take.
type cdiFlags struct {
	simGPU string
	output string
	dirs   []string
	paths  cdi.Paths
}

func cdiCommand(io streams) *cobra.Command {
	f := &cdiFlags{paths: cdi.DefaultPaths}
	cmd := &cobra.Command{
		Use:   "cdi",
		Short: "Describe this node's GPUs to container engines",
		Args:  noCommand,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usageError{errors.New("cdi: give a subcommand: generate, list or validate")}
		},
	}
	cmd.PersistentFlags().StringVar(&f.simGPU, "simgpu", os.Getenv("NVSHARE_SIMGPU"), "use the simulated GPU in `directory`; default from NVSHARE_SIMGPU")

	generate := &cobra.Command{
		Use:   "generate",
		Short: "Print the CDI spec of this node's GPUs",
		Example: `  sudo nvsharectl cdi generate --output /etc/cdi/nvshare.com-gpu.yaml
  podman run --device nvshare.com/gpu=0 ...`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error { return asRoot(f.generate(cmd, io)) },
	}
	fs := generate.Flags()
	fs.StringVar(&f.output, "output", "", "write to `file`, replacing it as a whole, and not to standard output")
	fs.StringVar(&f.paths.ShimDir, "lib-dir", f.paths.ShimDir, "the host's `directory` with "+cdi.ShimFile)
	fs.StringVar(&f.paths.Hook, "hook", f.paths.Hook, "`path` of "+cdi.HookFile+" on the host")

	list := &cobra.Command{
		Use:   "list",
		Short: "List the names of this node's devices",
		Args:  noWords,
		RunE:  func(cmd *cobra.Command, _ []string) error { return f.list(cmd, io) },
	}
	validate := &cobra.Command{
		Use:   "validate",
		Short: "Check the CDI specs that container engines read on this node",
		Long: `validate checks the specs that container engines read: whether nvshare's specs
are valid and of the loaded driver, whether another file declares the same
devices, and whether this node has the files that they name. Exit status 1:
containers would fail.`,
		Args: noWords,
		RunE: func(_ *cobra.Command, _ []string) error { return f.validate(io) },
	}
	validate.Flags().StringArrayVar(&f.dirs, "cdi-dir", systemSpecDirs, "look in this `directory`; may be repeated, later ones win")
	cmd.AddCommand(generate, list, validate)
	return cmd
}

// systemSpecDirs are the directories that all engines read, rootless podman too.
var systemSpecDirs = []string{"/etc/cdi", cdi.DefaultSpecDir}

func (f *cdiFlags) validate(io streams) error {
	bad := false
	for _, found := range cdi.Validate(f.options(io), f.dirs...) {
		word := "note"
		if found.Bad {
			word, bad = "BAD", true
		}
		if found.File != "" {
			found.Text = found.File + " " + found.Text
		}
		fmt.Fprintf(io.out, "%-5s %s\n", word, found.Text)
	}
	if bad {
		return errUnhealthy
	}
	fmt.Fprintf(io.out, "ok    engines that read %s find the devices of %s\n", strings.Join(f.dirs, " and "), cdi.Kind)
	return nil
}

func (f *cdiFlags) options(io streams) cdi.Options {
	log := logrus.New()
	log.SetOutput(io.err)
	return cdi.Options{SimDir: f.simGPU, Log: log}
}

var errNoGPU = errors.New("no GPU found on this node (is the NVIDIA driver loaded? nvidia-smi -L lists its GPUs)")

func (f *cdiFlags) generate(cmd *cobra.Command, io streams) error {
	var err error
	if f.paths.RunDir, err = filepath.Abs(cmd.Flag("run-dir").Value.String()); err != nil {
		return usageError{fmt.Errorf("--run-dir: %w", err)}
	}
	for _, p := range []*string{&f.paths.ShimDir, &f.paths.Hook} {
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
	data, err := cdi.Marshal(found.Spec(cdi.Kind))
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(f.paths.ShimDir, cdi.ShimFile)); errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintf(io.err, "warning: %v; containers with these devices cannot start before it is there (nvshare-plugin --no-nri puts it there)\n", err)
	}
	if f.output == "" {
		_, err := io.out.Write(data)
		return err
	}
	if err := replaceFile(f.output, data); err != nil {
		return fmt.Errorf("write the CDI spec: %w", err)
	}
	fmt.Fprintf(io.err, "wrote %s: %s, from %s\n", f.output, numbered(len(found.GPUs), "GPU", "GPUs"), found.Source)
	f.warnOfTwins(io)
	return nil
}

// warnOfTwins names the files that declare the same devices as the new one.
func (f *cdiFlags) warnOfTwins(io streams) {
	for _, found := range cdi.Validate(f.options(io), filepath.Dir(f.output)) {
		if found.Bad && strings.Contains(found.Text, cdi.Kind+"=") {
			fmt.Fprintf(io.err, "warning: %s %s\n", found.File, found.Text)
			return // the other devices are declared twice too
		}
	}
}

// replaceFile writes a file that everyone can read, as a whole or not at all. It makes
// the directory: a fresh host has no /etc/cdi. Anything there that is no regular file,
// like /dev/stdout, is an error.
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
